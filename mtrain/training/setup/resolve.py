"""Resolves the settings that a config takes from another model (`training.init_from`, `tokenizer.path`), from
the run that it resumes, or, for the vocabulary size, from the corpus and the budget (`model.preset: auto`).

Keys that the config does not set are inherited from the other model. Keys that it sets must have the values
of that model, except for dropout rates, `model.alignment_head`, the decoding settings and, unless positions
are learned, `data.max_length`.
"""

import re
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from mtrain.checkpoint import model_folder
from mtrain.checkpoint.checkpoint import checkpoint_folders
from mtrain.checkpoint.model_folder import Loaded
from mtrain.config import recipe
from mtrain.config.choices import AUTOMATIC, OPEN_IF_NULL
from mtrain.config.load import read_config, validate
from mtrain.config.schema import Config
from mtrain.config.sections.model import DECODER_KEYS, Architecture
from mtrain.config.sections.tokenizer import TokenizerConfig
from mtrain.config.sections.training import TrainingConfig
from mtrain.config.yaml_io import read_yaml_file
from mtrain.data.reading.digests import RawFiles
from mtrain.data.scanning.scanner import CorpusScanner
from mtrain.data.store.folder import shared_tokenizer
from mtrain.device import resolve_device
from mtrain.errors import ModelError, UsageError
from mtrain.model.build import AnyModel
from mtrain.storage.manifest import read_json

_MAY_DIFFER = re.compile(r"model\.(\w*dropout|alignment_head)|decoding\.\w+")
Values = dict[str, dict[str, Any]]  # by section and key


class Resolved(NamedTuple):
    """A resolved config, and what was read to resolve it."""

    config: Config
    initial_model: Loaded[AnyModel] | None = None  # that training starts from
    saved: Config | None = None  # of the run that has checkpoints; keys of newer versions have defaults


def resolve_config(
    config: Config,
    scanner: CorpusScanner | None = None,
    relearn: bool = False,
    speed: float | None = None,
    load_weights: bool = True,
) -> Resolved:
    """Set the keys that come from another model or from `preset: auto`.

    A run with a tokenizer keeps its vocabulary size, unless with `relearn`. `speed` is the `assumed_speed` of
    all devices that train, by default of one of this machine. Raises the errors of `inherit_settings`, and
    DataError if the corpora cannot be read to count their pairs.
    """
    resolved = inherit_settings(config, load_weights)
    if resolved.saved or config.training.init_from is not None:
        return resolved
    return Resolved(_choose_tokenizer_settings(resolved.config, scanner, relearn, speed))


def inherit_settings(config: Config, load_weights: bool = False) -> Resolved:
    """Set the keys that come from another model, without reading the corpora.

    A run with checkpoints keeps its settings, even if the other model is missing by now or the corpus has
    grown. Without `load_weights`, only the settings of the initial model are read. Raises ModelError if a
    model is missing or damaged, UsageError naming a key that differs from the model.
    """
    run_dir = Path(config.run_dir)
    if checkpoint_folders(run_dir) and (file := run_dir / "config.yaml").exists():
        saved = validate(Config, read_config(file), str(file))
        if saved.training.encoder_after is None:  # in a run of an earlier version
            training = saved.training.model_copy(update={"encoder_after": 0})
            saved = saved.model_copy(update={"training": training})
        config = _inherit(config, _settings_of_run(config, saved))  # `open_run` checks the other keys
        return Resolved(config, saved=saved)
    init_from, path = config.training.init_from, config.tokenizer.path
    if init_from is None:
        if path is not None:
            inherited: Values = {"tokenizer": {**_settings_of_model(config, Path(path)), "path": path}}
            config = _inherit_checked(config, inherited, f"tokenizer.path: {path}")
        return Resolved(config)
    classifies = config.model.is_classifier
    initial_model = model_folder.load_any_model(Path(init_from)) if load_weights else None
    found = initial_model.config if initial_model else model_folder.read_settings(Path(init_from))
    if not classifies:  # a pair classifier may start from the encoder of a translation model
        model_folder.require_translation(Path(init_from), found)
    settings = found.model_dump(mode="json")
    inherited = {section: settings[section] for section in ("tokenizer", "decoding")}
    if config.model.alignment_head and not settings["model"]["alignment_head"]:
        inherited["decoding"]["alignment_layer"] = None  # that of the head is chosen
    inherited["data"] = {"max_length": settings["max_length"]}
    if not classifies:
        inherited["data"]["language_tags"] = settings["language_tags"]
    others = {"head", *DECODER_KEYS} if classifies else set()
    if config.model.preset == "auto":
        others |= {"dropout", "activation_dropout"}  # the recipe chooses these, too
    kept = Architecture.model_fields.keys() - others
    inherited["model"] = {key: value for key, value in settings["model"].items() if key in kept}
    inherited["model"]["preset"] = config.model.preset  # `auto`: the recipe is yet to be chosen
    inherited["tokenizer"]["path"] = init_from
    config = _inherit_checked(config, inherited, f"training.init_from: {init_from}")
    return Resolved(config, initial_model)


def _settings_of_run(config: Config, saved: Config) -> Values:
    """The settings of a run that its config need not repeat, from the `saved` config of the run."""
    values = saved.model_dump(mode="json")
    kept = ("learning_rate", "warmup_steps", "encoder_after", "best_metric")
    inherited: Values = {
        "training": {key: values["training"][key] for key in kept},
        "tokenizer": {"normalization": saved.tokenizer.normalization},
    }
    if config.training.init_from is not None:
        inherited |= {section: values[section] for section in ("tokenizer", "model", "decoding")}
        inherited["data"] = {key: values["data"][key] for key in ("max_length", "language_tags")}
        if config.model.alignment_head and not saved.model.alignment_head:
            inherited["decoding"]["alignment_layer"] = None
    elif config.tokenizer.path is not None:
        inherited["tokenizer"] = values["tokenizer"]
    if config.model.preset == "auto":
        _require_end(config.training, saved.training)
        for section, key in (name.split(".") for name in AUTOMATIC):
            inherited.setdefault(section, {})[key] = values[section][key]
        if config.training.max_minutes is None:
            inherited["training"]["planned_steps"] = None
        inherited["training"]["max_steps"] = _planned_steps(config, saved)
    return inherited


def _require_end(training: TrainingConfig, before: TrainingConfig) -> None:
    """Raise UsageError if a run gets another kind of limit in place of the steps at which its schedule ends.
    If it had `max_minutes`, these steps were planned."""
    # In fine-tuning, mtrain may have planned `max_steps`, which the run keeps.
    names = ("max_epochs",) if training.init_from else ("max_steps", "max_epochs")
    ends = {name: getattr(before, name) for name in names if getattr(before, name)}
    if not ends or before.max_minutes or training.max_steps or training.max_epochs:
        return
    if training.max_minutes or training.patience not in (None, before.patience):
        began = " and ".join(f"{name} {value:,}" for name, value in ends.items())
        raise UsageError(f"training: the run began with {began}; give max_steps or max_epochs, too")


def _planned_steps(config: Config, saved: Config) -> int | None:
    """The `max_steps` that a run planned, in proportion to `max_minutes` if these have changed since. Fewer
    minutes do not reduce the plan below the steps that they allow at the speed of the run so far: the time
    may not have limited it."""
    steps = saved.training.max_steps
    minutes, before = config.training.max_minutes, saved.training.max_minutes
    if config.training.max_epochs not in (None, saved.training.max_epochs):
        return None  # they limit the number of steps
    if steps is None or minutes is None or before is None or saved.training.planned_steps is not None:
        return steps
    planned = max(1, round(steps * minutes / before))
    if planned < steps:
        planned = max(planned, min(steps, _steps_within(minutes, Path(config.run_dir))))
    # With `max_epochs`, which `allowed_steps` respects, the minutes may not have limited the steps.
    return planned if config.training.max_epochs is None else max(steps, planned)


def _steps_within(minutes: float, run_dir: Path) -> int:
    """The steps that a run takes in some minutes, validation included, if it continues at its speed so far; 0
    if no checkpoint tells."""
    with suppress(OSError, ValueError, LookupError, TypeError, ArithmeticError):
        state = read_json(checkpoint_folders(run_dir)[-1] / "state.json")
        return int(minutes * 60 * state["step"] / state["seconds"])
    return 0


def find_tokenizer(config: Config) -> Path | None:
    """The tokenizer folder of the run or, if it has none, of `data.folder`; None if there is neither."""
    own = Path(config.run_dir) / "tokenizer"
    return own if (own / "config.yaml").exists() else shared_tokenizer(config.data)


def tokenizer_settings(folder: Path) -> TokenizerConfig:
    """The settings of the tokenizer folder of a run, or of the one in `data.folder`."""
    file = folder / "config.yaml"
    return validate(TokenizerConfig, read_yaml_file(file), str(file))


def _settings_of_model(config: Config, model: Path) -> dict[str, Any]:
    """The tokenizer settings of a model or run folder. It may be missing if `data.folder` contains a copy."""
    if not model.exists() and (shared := shared_tokenizer(config.data)):
        return tokenizer_settings(shared).model_dump(mode="json")
    try:
        folder = model_folder.tokenizer_folder(model)
    except ModelError as error:
        raise ModelError(f"tokenizer.path: {error}") from None
    # The config of a run without a model may lack settings that have their default value, or had the default
    # value of the time when it was written.
    has_settings = (folder / "config.yaml").exists()
    file = (folder if has_settings else folder.parent) / "config.yaml"
    try:
        values = read_yaml_file(file) if has_settings else read_yaml_file(file)["tokenizer"]
        return validate(TokenizerConfig, values, str(file)).model_dump(mode="json")
    except (UsageError, TypeError, KeyError) as error:  # an error of the folder, not of the config
        raise ModelError(f"tokenizer.path: {file} has no valid tokenizer settings: {error}") from None


def _choose_tokenizer_settings(
    config: Config, scanner: CorpusScanner | None, relearn: bool, speed: float | None
) -> Config:
    """Set the vocabulary size that `model.preset: auto` chooses, or has chosen for the run's tokenizer.
    A tokenizer that exists also keeps its normalization, whose default was once `nmt_nfkc`."""
    if config.tokenizer.path is not None:
        return config
    is_automatic = config.model.preset == "auto"
    if not relearn and (folder := find_tokenizer(config)):
        settings = tokenizer_settings(folder)
        kept: dict[str, Any] = {"normalization": settings.normalization}
        if is_automatic:  # the corpus need not be read to count its pairs
            kept["vocab_size"] = settings.vocab_size
        return _inherit(config, {"tokenizer": kept})
    if not is_automatic:
        return config
    pairs = (scanner or CorpusScanner(RawFiles(config.data), config.seed, strict=False)).result.usable_pairs
    tokens = pairs * recipe.TOKENS_PER_PAIR
    speed = speed or recipe.assumed_speed(resolve_device("auto").type)
    planned = recipe.Budget.of(config).limit(recipe.CorpusSize(pairs, tokens, tokens, 0), speed).tokens
    return _inherit(config, {"tokenizer": {"vocab_size": recipe.choose_vocab_size(pairs, planned)}})


def _inherit(config: Config, inherited: Values) -> Config:
    """Set the keys that the config does not set to the `inherited` values."""
    given = config.model_dump(mode="json", exclude_unset=True)
    if config.model.preset == "auto" and "model" in inherited:
        del given["model"]["preset"]
    for key in OPEN_IF_NULL:
        if given.get("training", {}).get(key, "") is None:
            del given["training"][key]
    sections = {section: {**values, **given.get(section, {})} for section, values in inherited.items()}
    return validate(Config, {**given, **sections}, "the config")


def _inherit_checked(config: Config, inherited: Values, origin: str) -> Config:
    """Like `_inherit`, but raise UsageError if the config sets a key to another value than the inherited one.

    `origin` names the other model in the message.
    """
    resolved = _inherit(config, inherited)
    values = resolved.model_dump(mode="json")
    has_learned_positions = resolved.model.positions == "learned"
    for section, expected in inherited.items():
        for key, other in expected.items():
            name = f"{section}.{key}"
            free = _MAY_DIFFER.fullmatch(name) or (key == "max_length" and not has_learned_positions)
            if (value := values[section][key]) != other and not free:
                unit = " learned positions" if key == "max_length" else ""
                raise UsageError(f"{name}: {value} was given, but {origin} has {other}{unit}; remove the key")
    return resolved
