"""What a config leaves to another model: the tokenizer (`tokenizer.path`), or all (`training.init_from`); and
to its corpus: the sizes (`model.preset: auto`).

One rule for models: keys that the config leaves out are that model's, and those that it gives must agree with
it, but for dropouts, the search, and the longest sentence where no learned positions depend on it.
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
from mtrain.config.presets import PRESETS, auto_size
from mtrain.config.schema import Architecture, Config, Part, TokenizerConfig
from mtrain.config.yaml_io import read_yaml_file
from mtrain.data.scan import RawData
from mtrain.errors import ModelError, UsageError
from mtrain.storage.atomic import write_atomically

log = logging.getLogger(__name__)

_FREE = re.compile(r"model\.\w*dropout|decoding\.\w+")
_PARTS: dict[Part, tuple[str, ...]] = {
    "encoder": ("encoder.", "encoder_norm."),
    "decoder": ("decoder.", "decoder_norm."),
    "embeddings": ("source_embedding.", "target_embedding.", "learned_"),
}
Taken = dict[str, dict[str, Any]]  # values by section and key


def resolved(config: Config, raw: RawData | None = None) -> tuple[Config, LoadedModel | None]:
    """The config with all that it leaves to another model, or to `preset: auto`, filled in; and the model
    that training starts from, if there is one.

    A run with checkpoints takes what it took when it began: the other model need not exist any more, and the
    corpus may have grown. Raises ModelError if that is missing or damaged, UsageError naming a key that does
    not agree with it, DataError if corpora are to be counted and cannot be read.
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
        return _filled(config, taken), None  # whether it agrees, `open_run` tells
    if init_from is None:
        if path is None:
            return _with_sizes(config, raw), None
        taken = {"tokenizer": {**_settings(Path(path)), "path": path}}
        return _with_sizes(_agreeing(config, taken, f"tokenizer.path: {path}"), raw), None
    start = load_model(Path(init_from))
    own = start.config.model_dump(mode="json")
    taken = {section: own[section] for section in sections} | {"data": {"max_length": own["max_length"]}}
    taken["model"] = {key: own["model"][key] for key in Architecture.model_fields}
    taken["tokenizer"]["path"] = init_from
    return _agreeing(config, taken, f"training.init_from: {init_from}"), start


def _settings(model: Path) -> dict[str, Any]:
    """How the tokenizer of a model or run folder was made."""
    try:
        file = tokenizer_folder(model).parent / "config.yaml"
    except ModelError as error:
        raise ModelError(f"tokenizer.path: {error}") from None
    try:
        return validate(TokenizerConfig, read_yaml_file(file)["tokenizer"], str(file)).model_dump(mode="json")
    except (UsageError, TypeError, KeyError) as error:  # of the folder, not of the user
        raise ModelError(f"tokenizer.path: {file} does not say how the tokenizer was made: {error}") from None


def _with_sizes(config: Config, raw: RawData | None) -> Config:
    """The config with the sizes that `model.preset: auto` stands for."""
    if config.model.preset != "auto":
        return config
    pairs = (raw or RawData(config.data, config.seed, strict=False)).scan.pairs
    _, preset, vocab_size = auto_size(pairs)
    filled = _filled(config, {"model": PRESETS[preset], "tokenizer": {"vocab_size": vocab_size}})
    chosen = (preset, filled.tokenizer.vocab_size, f"{pairs:,}")
    log.info("model.preset: auto: %s, vocabulary size %d, for %s pairs", *chosen)
    return filled


def _filled(config: Config, taken: Taken) -> Config:
    raw = config.model_dump(mode="json", exclude_unset=True)
    if config.model.preset == "auto" and "model" in taken:
        del raw["model"]["preset"]
    filled = {section: {**values, **raw.get(section, {})} for section, values in taken.items()}
    return validate(Config, {**raw, **filled}, "the config")


def _agreeing(config: Config, taken: Taken, origin: str) -> Config:
    """`_filled`, if what the config gives agrees with what is taken."""
    filled = _filled(config, taken)
    given = filled.model_dump(mode="json")
    for section, values in taken.items():
        for key, own in values.items():
            name = f"{section}.{key}"
            free = _FREE.fullmatch(name) or (section == "data" and filled.model.positions != "learned")
            if (value := given[section][key]) != own and not free:
                unit = " learned positions" if section == "data" else ""
                raise UsageError(
                    f"{name}: {value} was given, but {origin} has {own}{unit}; leave the key out"
                )
    return filled


def note_origin(run_dir: Path, start: LoadedModel | None, path: str | None) -> None:
    """Write down, in `origin.json`, which model a run begins with: its place and its manifest's SHA-256."""
    file = run_dir / "origin.json"
    if start is None:
        file.unlink(missing_ok=True)  # of a run that never got to a checkpoint
    else:
        write_atomically(
            file, json.dumps({"init_from": path, "fingerprint": start.fingerprint}, indent=1) + "\n"
        )


def freeze(model: nn.Module, parts: list[Part]) -> None:
    """Keep parts of a model from being trained. A tied output projection is the embeddings' own.

    Raises UsageError if nothing is left to train.
    """
    prefixes = tuple(prefix for part in parts for prefix in _PARTS[part])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(prefixes))
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError(f"training.freeze: {', '.join(parts)} leave nothing to train")
