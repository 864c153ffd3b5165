"""Resolves the settings that a config takes from another model (`training.init_from`, `tokenizer.path`) or
from the corpus size (`model.preset: auto`).

Keys that the config does not set are inherited from the other model. Keys that it sets must have the values
of that model, except for dropout rates, the decoding settings and, unless positions are learned,
`data.max_length`.
"""

import logging
import re
from pathlib import Path
from typing import Any

from mtrain.checkpoint.checkpoint import checkpoint_folders
from mtrain.checkpoint.model_folder import LoadedModel, load_model, tokenizer_folder
from mtrain.config.load import validate
from mtrain.config.model import Architecture
from mtrain.config.presets import PRESETS, auto_size
from mtrain.config.schema import Config
from mtrain.config.tokenizer import TokenizerConfig
from mtrain.config.yaml_io import read_yaml_file
from mtrain.data.scan import CorpusScanner
from mtrain.errors import ModelError, UsageError

log = logging.getLogger(__name__)

_MAY_DIFFER = re.compile(r"model\.\w*dropout|decoding\.\w+")
Values = dict[str, dict[str, Any]]  # by section and key


def resolve_config(config: Config, scanner: CorpusScanner | None = None) -> tuple[Config, LoadedModel | None]:
    """Set the keys that come from another model or from `preset: auto`. Also returns the model that training
    starts from, if any.

    A run with checkpoints keeps its settings, even if the other model is missing by now or the corpus has
    grown. Raises ModelError if a model is missing or damaged, UsageError naming a key that differs from that
    model, DataError if the corpora cannot be read to count their pairs.
    """
    init_from, path, auto = config.training.init_from, config.tokenizer.path, config.model.preset == "auto"
    if init_from is None and path is None and not auto:
        return config, None
    run_dir = Path(config.run_dir)
    sections = ["tokenizer"] + ["model"] * (auto or init_from is not None) + ["decoding"] * bool(init_from)
    if checkpoint_folders(run_dir) and (file := run_dir / "config.yaml").exists():
        saved = validate(Config, read_yaml_file(file), str(file)).model_dump(mode="json")
        inherited = {section: saved[section] for section in sections}
        if init_from is not None:
            inherited["data"] = {"max_length": saved["data"]["max_length"]}
        return _inherit(config, inherited), None  # `open_run` checks the other keys
    if init_from is None:
        if path is None:
            return _choose_sizes(config, scanner), None
        inherited = {"tokenizer": {**_tokenizer_settings(Path(path)), "path": path}}
        return _choose_sizes(_inherit_checked(config, inherited, f"tokenizer.path: {path}"), scanner), None
    initial_model = load_model(Path(init_from))
    settings = initial_model.config.model_dump(mode="json")
    inherited = {section: settings[section] for section in sections}
    inherited["data"] = {"max_length": settings["max_length"]}
    inherited["model"] = {key: settings["model"][key] for key in Architecture.model_fields}
    inherited["tokenizer"]["path"] = init_from
    return _inherit_checked(config, inherited, f"training.init_from: {init_from}"), initial_model


def _tokenizer_settings(model: Path) -> dict[str, Any]:
    """The tokenizer settings of a model or run folder."""
    try:
        file = tokenizer_folder(model).parent / "config.yaml"
    except ModelError as error:
        raise ModelError(f"tokenizer.path: {error}") from None
    try:
        return validate(TokenizerConfig, read_yaml_file(file)["tokenizer"], str(file)).model_dump(mode="json")
    except (UsageError, TypeError, KeyError) as error:  # an error of the folder, not of the config
        raise ModelError(f"tokenizer.path: {file} has no valid tokenizer settings: {error}") from None


def _choose_sizes(config: Config, scanner: CorpusScanner | None) -> Config:
    """Replace `model.preset: auto` by the sizes that suit the number of training pairs."""
    if config.model.preset != "auto":
        return config
    pairs = (scanner or CorpusScanner(config.data, config.seed, strict=False)).result.pairs
    _, preset, vocab_size = auto_size(pairs)
    resolved = _inherit(config, {"model": PRESETS[preset], "tokenizer": {"vocab_size": vocab_size}})
    sizes = (preset, resolved.tokenizer.vocab_size, f"{pairs:,}")
    log.info("model.preset: auto: %s, vocabulary size %d, for %s pairs", *sizes)
    return resolved


def _inherit(config: Config, inherited: Values) -> Config:
    """Set the keys that the config does not set to the `inherited` values."""
    given = config.model_dump(mode="json", exclude_unset=True)
    if config.model.preset == "auto" and "model" in inherited:
        del given["model"]["preset"]
    sections = {section: {**values, **given.get(section, {})} for section, values in inherited.items()}
    return validate(Config, {**given, **sections}, "the config")


def _inherit_checked(config: Config, inherited: Values, origin: str) -> Config:
    """Like `_inherit`, but raise UsageError if the config sets a key to another value than the inherited one.

    `origin` names the other model in the message.
    """
    resolved = _inherit(config, inherited)
    values = resolved.model_dump(mode="json")
    for section, expected in inherited.items():
        for key, other in expected.items():
            name = f"{section}.{key}"
            free = _MAY_DIFFER.fullmatch(name) or (
                section == "data" and resolved.model.positions != "learned"
            )
            if (value := values[section][key]) != other and not free:
                unit = " learned positions" if section == "data" else ""
                raise UsageError(f"{name}: {value} was given, but {origin} has {other}{unit}; remove the key")
    return resolved
