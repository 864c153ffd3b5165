"""Settings that come from another model (`training.init_from`, `tokenizer.path`) or from the corpus size
(`model.preset: auto`).

Keys that the config does not give are taken from the other model. Keys that it gives must agree with that
model, except for dropout rates, the decoding settings and, unless positions are learned, `data.max_length`.
"""

import json
import logging
import re
from pathlib import Path
from typing import Any

from torch import nn

from mtrain.checkpoint.checkpoint import checkpoint_folders
from mtrain.checkpoint.model_folder import LoadedModel, load_model, tokenizer_folder
from mtrain.config.load import validate
from mtrain.config.model import Architecture
from mtrain.config.presets import PRESETS, auto_size
from mtrain.config.schema import Config
from mtrain.config.tokenizer import TokenizerConfig
from mtrain.config.training import Part
from mtrain.config.yaml_io import read_yaml_file
from mtrain.data.scan import CorpusScanner
from mtrain.errors import ModelError, UsageError
from mtrain.storage.atomic import write_atomically

log = logging.getLogger(__name__)

_MAY_DIFFER = re.compile(r"model\.\w*dropout|decoding\.\w+")
_PARTS: dict[Part, tuple[str, ...]] = {
    "encoder": ("encoder.", "encoder_norm."),
    "decoder": ("decoder.", "decoder_norm."),
    "embeddings": ("source_embedding.", "target_embedding.", "learned_"),
}
Values = dict[str, dict[str, Any]]  # by section and key


def resolve_config(config: Config, scanner: CorpusScanner | None = None) -> tuple[Config, LoadedModel | None]:
    """Fill in what the config takes from another model or from `preset: auto`. Also returns the model that
    training is initialized with, if any.

    A run with checkpoints keeps the settings that it began with, although the other model may be missing and
    the corpus may have grown. Raises ModelError if a model is missing or damaged, UsageError naming a key
    that does not agree with it, DataError if the corpora cannot be read to count their pairs.
    """
    init_from, path, auto = config.training.init_from, config.tokenizer.path, config.model.preset == "auto"
    if init_from is None and path is None and not auto:
        return config, None
    run_dir = Path(config.run_dir)
    sections = ["tokenizer"] + ["model"] * (auto or init_from is not None) + ["decoding"] * bool(init_from)
    if checkpoint_folders(run_dir) and (file := run_dir / "config.yaml").exists():
        began = validate(Config, read_yaml_file(file), str(file)).model_dump(mode="json")
        taken = {section: began[section] for section in sections}
        if init_from is not None:
            taken["data"] = {"max_length": began["data"]["max_length"]}
        return _filled(config, taken), None  # `open_run` compares it
    if init_from is None:
        if path is None:
            return _with_sizes(config, scanner), None
        taken = {"tokenizer": {**_settings(Path(path)), "path": path}}
        return _with_sizes(_agreeing(config, taken, f"tokenizer.path: {path}"), scanner), None
    start = load_model(Path(init_from))
    own = start.config.model_dump(mode="json")
    taken = {section: own[section] for section in sections} | {"data": {"max_length": own["max_length"]}}
    taken["model"] = {key: own["model"][key] for key in Architecture.model_fields}
    taken["tokenizer"]["path"] = init_from
    return _agreeing(config, taken, f"training.init_from: {init_from}"), start


def _settings(model: Path) -> dict[str, Any]:
    """The tokenizer settings of a model or run folder."""
    try:
        file = tokenizer_folder(model).parent / "config.yaml"
    except ModelError as error:
        raise ModelError(f"tokenizer.path: {error}") from None
    try:
        return validate(TokenizerConfig, read_yaml_file(file)["tokenizer"], str(file)).model_dump(mode="json")
    except (UsageError, TypeError, KeyError) as error:  # an error of the folder, not of the config
        raise ModelError(f"tokenizer.path: {file} has no valid tokenizer settings: {error}") from None


def _with_sizes(config: Config, scanner: CorpusScanner | None) -> Config:
    """The config with the sizes that `model.preset: auto` chooses."""
    if config.model.preset != "auto":
        return config
    pairs = (scanner or CorpusScanner(config.data, config.seed, strict=False)).result.pairs
    _, preset, vocab_size = auto_size(pairs)
    filled = _filled(config, {"model": PRESETS[preset], "tokenizer": {"vocab_size": vocab_size}})
    chosen = (preset, filled.tokenizer.vocab_size, f"{pairs:,}")
    log.info("model.preset: auto: %s, vocabulary size %d, for %s pairs", *chosen)
    return filled


def _filled(config: Config, taken: Values) -> Config:
    raw = config.model_dump(mode="json", exclude_unset=True)
    if config.model.preset == "auto" and "model" in taken:
        del raw["model"]["preset"]
    filled = {section: {**values, **raw.get(section, {})} for section, values in taken.items()}
    return validate(Config, {**raw, **filled}, "the config")


def _agreeing(config: Config, taken: Values, origin: str) -> Config:
    """`_filled`, after checking that the keys that the config gives agree with the `taken` values."""
    filled = _filled(config, taken)
    given = filled.model_dump(mode="json")
    for section, values in taken.items():
        for key, own in values.items():
            name = f"{section}.{key}"
            free = _MAY_DIFFER.fullmatch(name) or (section == "data" and filled.model.positions != "learned")
            if (value := given[section][key]) != own and not free:
                unit = " learned positions" if section == "data" else ""
                raise UsageError(f"{name}: {value} was given, but {origin} has {own}{unit}; remove the key")
    return filled


def record_initial_model(run_dir: Path, start: LoadedModel | None, path: str | None) -> None:
    """Record the path and the fingerprint of the model that initializes a run, in `origin.json`."""
    file = run_dir / "origin.json"
    if start is None:
        file.unlink(missing_ok=True)  # of a run that ended before its first checkpoint
    else:
        write_atomically(
            file, json.dumps({"init_from": path, "fingerprint": start.fingerprint}, indent=1) + "\n"
        )


def freeze(model: nn.Module, parts: list[Part]) -> None:
    """Exclude parts of a model from training. A tied output projection belongs to the embeddings.

    Raises UsageError if nothing is left to train.
    """
    prefixes = tuple(prefix for part in parts for prefix in _PARTS[part])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(prefixes))
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError(f"training.freeze: {', '.join(parts)} leave nothing to train")
