"""Model folders: the weights, the vocabulary and the settings that a translator needs, and nothing else."""

import hashlib
import logging
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

from mtrain.checkpoint.checkpoint import (
    TrainState,
    best_weights,
    checkpoint_folders,
    load_weights,
    verify_checkpoint,
)
from mtrain.config.load import override, validate
from mtrain.config.schema import Config, ModelFolderConfig
from mtrain.config.yaml_io import read_yaml_file, to_yaml
from mtrain.errors import ModelError, UsageError
from mtrain.model.transformer import Transformer
from mtrain.storage.atomic import write_folder, write_text
from mtrain.storage.manifest import MANIFEST, read_json, verify_folder
from mtrain.tokenizer.tokenizer import Tokenizer, model_config, vocabulary_files

log = logging.getLogger(__name__)


def publish_best(run_dir: Path, state: TrainState, config: Config, tokenizer: Tokenizer) -> None:
    """Make `RUN/model` the best checkpoint's weights with all that a translator needs, if it is not so."""
    if state.best_step is None:
        return
    best = run_dir / "checkpoints" / f"step-{state.best_step:08d}"
    if not best.exists():  # it was pruned, and training went back to before that
        log.warning("%s: is gone; model/ stays as it is", best)
        return
    folder, contents = run_dir / "model", to_yaml(_folder_config(config, tokenizer))
    with suppress(OSError, ValueError, LookupError, TypeError):
        old, new = (read_json(place / MANIFEST) for place in (folder, best))
        same = old["model.safetensors"] == new[best_weights(best).name]
        if same and (folder / "config.yaml").read_text(encoding="utf-8") == contents:
            return
    try:
        verify_checkpoint(best)
    except ModelError as error:
        log.warning("%s; model/ stays as it is", error)
        return
    save_model_folder(folder, best_weights(best), contents, tokenizer)


def save_model_folder(folder: Path, weights: Path, contents: str, tokenizer: Tokenizer) -> None:
    """Write config.yaml with `contents`, a copy of `weights`, and tokenizer/."""

    def fill(temporary: Path) -> None:
        write_text(temporary / "config.yaml", contents)
        shutil.copyfile(weights, temporary / "model.safetensors")
        copy_tokenizer(tokenizer.files[0].parent, temporary / "tokenizer")

    write_folder(folder, fill)


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the vocabularies and their listings, but not what a run notes beside them."""
    notes = shutil.ignore_patterns("config.yaml", "learnt-from.json", MANIFEST)
    shutil.copytree(source, folder, ignore=notes, dirs_exist_ok=True)


def tokenizer_folder(model: Path) -> Path:
    """Where a model or run folder has its tokenizer. Raises ModelError if it has none."""
    for folder in (model / "model" / "tokenizer", model / "tokenizer"):
        if folder.is_dir():
            return folder
    if not model.exists():
        raise ModelError(f"{model}: no such model or run folder")
    raise ModelError(f"{model}: not a model folder: it has no tokenizer/")


class LoadedModel(NamedTuple):
    """A model in eval mode with its tokenizer and settings."""

    model: Transformer
    tokenizer: Tokenizer
    config: ModelFolderConfig
    fingerprint: str  # SHA-256 of the folder's manifest


def load_model(path: Path, overrides: Sequence[str] = ()) -> LoadedModel:
    """Load a model folder, or the best model of a run folder, onto the CPU, every file verified.

    Raises ModelError if it is missing, damaged, or its parts disagree.
    """
    if not path.is_dir():
        raise ModelError(f"{path}: {'not a folder' if path.exists() else 'no such model or run folder'}")
    folder = path / "model" if (path / "checkpoints").is_dir() else path
    with suppress(ModelError):
        return _load(folder, overrides)
    time.sleep(0.2)  # a run that goes on may have put a new model in the place of the one that was being read
    return _load(folder if folder.is_dir() else path, overrides)


def _load(path: Path, overrides: Sequence[str]) -> LoadedModel:
    """Load a model folder, or the best checkpoint of a run folder."""
    in_run = (path / "checkpoints").is_dir()
    folder = _best_checkpoint(path) if in_run else path
    vocabularies = [file.name for files in vocabulary_files(path / "tokenizer") for file in files]
    if in_run:
        verify_checkpoint(folder)
        verify_folder(path / "tokenizer", vocabularies)
    else:
        names = ["config.yaml", "model.safetensors", *(f"tokenizer/{name}" for name in vocabularies)]
        verify_folder(folder, names)
    tokenizer, file = Tokenizer(path / "tokenizer"), path / "config.yaml"
    if not file.is_file():  # a pipe would hang
        raise ModelError(f"{file}: no such file")
    try:
        raw = read_yaml_file(file)
        if in_run:
            config = _folder_config(validate(Config, raw, str(file)), tokenizer)
        else:
            config = validate(ModelFolderConfig, raw, str(file))
    except UsageError as error:  # of the folder, not of the user
        raise ModelError(str(error)) from None
    raw = config.model_dump(mode="json")
    for assignment in overrides:
        if not assignment.startswith("decoding."):
            raise UsageError(f"--set {assignment}: of a trained model only decoding.* can be set")
        raw = override(raw, assignment)
    config = validate(ModelFolderConfig, raw, "--set")
    network = config.model
    sizes = (tokenizer.source_vocab_size, tokenizer.target_vocab_size)
    if sizes != (network.source_vocab_size, network.target_vocab_size):
        raise ModelError(f"{folder}: the tokenizer has {sizes} pieces; the model expects others")
    if (network.pad_id, network.unk_id, network.bos_id, network.eos_id) != tokenizer.special:
        raise ModelError(f"{folder}: the tokenizer's special ids are not those of the model")
    with torch.device("meta"):  # no memory is taken, and nothing drawn, before the weights are known to fit
        model = Transformer(network)
    load_weights(model, best_weights(folder))
    model.make_positions()
    manifest = hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()
    return LoadedModel(model.eval(), tokenizer, config, manifest)


def _best_checkpoint(run_dir: Path) -> Path:
    """The best checkpoint of a run, or its newest if the best is not known."""
    folders = checkpoint_folders(run_dir)
    if not folders:
        raise ModelError(f"{run_dir}: this run has no checkpoint yet")
    best = None
    with suppress(OSError, ValueError, LookupError, TypeError):
        best = read_json(run_dir / "checkpoints" / "index.json")["best"]
    return next((folder for folder in folders if folder.name == best), folders[-1])


def _folder_config(config: Config, tokenizer: Tokenizer) -> ModelFolderConfig:
    return ModelFolderConfig(
        source_lang=config.data.source_lang,
        target_lang=config.data.target_lang,
        max_length=config.data.max_length,
        tokenizer=config.tokenizer,
        model=model_config(config.model, tokenizer, config.data.max_length),
        decoding=config.decoding,
    )
