"""Model folders, which contain only what translation needs: the weights, the tokenizer and the settings."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar, cast

from mtrain.checkpoint.checkpoint import INDEX, checkpoint_folders, evaluation_weights, verify_checkpoint
from mtrain.checkpoint.model_card import write_card
from mtrain.checkpoint.model_info import (
    ModelInfo,
    is_checkpoint,
    model_folder_of,
    read_model_config,
    require_model,
    run_folder_of,
    write_info,
)
from mtrain.checkpoint.tensors import load_weights, model_without_weights
from mtrain.config.load import read_config, validate, with_overrides
from mtrain.config.schema import Config, ModelFolderConfig
from mtrain.errors import ModelError, UsageError
from mtrain.model.build import AnyModel
from mtrain.model.classifier import PairClassifier
from mtrain.model.transformer import Transformer
from mtrain.storage.atomic import copy_files, write_folder, write_new_folder, write_text
from mtrain.storage.manifest import MANIFEST, read_json, sha256, verify_folder
from mtrain.tokenizer.tokenizer import Tokenizer, model_config, vocabulary_files


def save_model_folder(
    folder: Path,
    write_weights: Callable[[Path], object],
    contents: str,
    tokenizer: Tokenizer,
    info: ModelInfo,
    is_new: bool = False,
) -> None:
    """Write a model folder: config.yaml with `contents`, model.safetensors, which `write_weights` writes,
    tokenizer/, info.json and README.md. If it `is_new`, the folder must not exist yet."""

    def fill(temporary: Path) -> None:
        write_text(temporary / "config.yaml", contents)
        write_weights(temporary / "model.safetensors")
        copy_tokenizer(tokenizer.files[0].parent, temporary / "tokenizer")
        write_info(temporary, info)
        write_card(temporary)

    (write_new_folder if is_new else write_folder)(folder, fill)


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the vocabularies of a tokenizer folder, without the files that only runs use."""
    copy_files(source, folder, {"config.yaml", "learnt-from.json", MANIFEST})


def tokenizer_folder(model: Path) -> Path:
    """The tokenizer folder of a model or run folder. Raises ModelError if there is none."""
    run = run_folder_of(model) if is_checkpoint(model) else None
    for folder in (model / "model" / "tokenizer", (run or model) / "tokenizer"):
        if folder.is_dir():
            return folder
    require_model(model)
    raise ModelError(f"{model}: not a model folder: tokenizer/ is missing")


Model = TypeVar("Model", bound=AnyModel, covariant=True)


class Loaded(NamedTuple, Generic[Model]):
    """A model in evaluation mode, with its tokenizer and settings."""

    model: Model
    tokenizer: Tokenizer
    config: ModelFolderConfig
    fingerprint: str  # SHA-256 of the folder's manifest


LoadedModel = Loaded[Transformer]


def load_model(path: Path, overrides: Sequence[str] = ()) -> LoadedModel:
    """Load a translation model: a model folder, or the best model of a run folder.

    Raises ModelError if a file is missing or damaged, or if it is a pair classifier.
    """
    loaded = load_any_model(path, overrides)
    require_translation(path, loaded.config)
    return cast(LoadedModel, loaded)


def load_ensemble(folders: Sequence[Path], overrides: tuple[str, ...]) -> list[LoadedModel]:
    """Load a model or an ensemble. Raises ModelError if a folder is missing or damaged, or if the models
    cannot decode together."""
    loaded = [load_model(folder, overrides) for folder in folders]
    for (path, first), (folder, other) in combinations(zip(folders, loaded, strict=True), 2):
        if differing := disagreement(first, other):
            reason = f"its {differing} are not the same as in {path}"
            raise ModelError(f"{folder}: {reason}; the models of an ensemble must share them")
    return loaded


def disagreement(first: Loaded[AnyModel], other: Loaded[AnyModel]) -> str:
    """The first setting that differs between two models of an ensemble or an average, but must be the same,
    with the value of the other model and that of the first; empty if none differs."""
    ours, theirs = first.config, other.config
    if not ours.direction.agrees_with(theirs.direction):
        return f"languages ({theirs.direction}, not {ours.direction})"
    if ours.language_tags != theirs.language_tags:
        return f"language tags ({theirs.language_tags}, not {ours.language_tags})"
    return "vocabularies" if first.tokenizer.fingerprint != other.tokenizer.fingerprint else ""


def require_translation(path: Path, config: ModelFolderConfig) -> None:
    """Raise ModelError if a model is a pair classifier."""
    if config.model.is_classifier:
        cure = "use it with `mtrain score --classifier`"
        raise ModelError(f"{path}: is a pair classifier, which cannot translate; {cure}")


def load_classifier(path: Path, overrides: Sequence[str] = ()) -> Loaded[PairClassifier]:
    """Load a pair classifier: a model folder, or the best model of a run folder.

    Raises ModelError if a file is missing or damaged, or if it is a translation model.
    """
    loaded = load_any_model(path, overrides)
    if not isinstance(loaded.model, PairClassifier):
        cure = "train a pair classifier with model.head: pair_classifier"
        raise ModelError(f"{path}: is a translation model; {cure}")
    return cast(Loaded[PairClassifier], loaded)


def load_any_model(path: Path, overrides: Sequence[str] = ()) -> Loaded[AnyModel]:
    """Load a model folder, the best model of a run folder, or a checkpoint, onto the CPU. Every file is
    verified.

    Raises ModelError if a file is missing or damaged, or if the files do not fit together.
    """
    require_model(path)
    folder = model_folder_of(path)
    with suppress(ModelError):
        return _load(folder, overrides)
    time.sleep(0.2)  # a running `fit` may just have replaced the folder
    try:
        return _load(folder if folder.is_dir() else path, overrides)
    except ModelError as error:
        if folder == path or not folder.is_dir():
            raise
        raise ModelError(f"{error}; `mtrain fit` with the config of the run writes {folder} again") from None


def read_settings(path: Path) -> ModelFolderConfig:
    """The settings of a model folder, a run folder or a checkpoint. Its weights are not read, and may be
    missing. Raises ModelError if the settings or the tokenizer are missing or damaged."""
    require_model(path)
    folder = model_folder_of(path)
    folder = folder if folder.is_dir() else path
    run = run_folder_of(folder) if is_checkpoint(folder) or (folder / "checkpoints").is_dir() else None
    return _read_settings(run or folder, in_run=run is not None)[0]


def _read_settings(folder: Path, in_run: bool) -> tuple[ModelFolderConfig, Tokenizer]:
    """The settings and the tokenizer of a model folder or, if `in_run`, of a run folder."""
    tokenizer, file = Tokenizer(folder / "tokenizer"), folder / "config.yaml"
    if not in_run:
        return read_model_config(folder), tokenizer
    try:
        return folder_config(validate(Config, read_config(file), str(file)), tokenizer), tokenizer
    except UsageError as error:  # an error of the folder, not of the command line
        raise ModelError(str(error)) from None


def _load(path: Path, overrides: Sequence[str]) -> Loaded[AnyModel]:
    """Load a model folder, a checkpoint, or the best checkpoint of a run folder."""
    folder, run = path, run_folder_of(path) if is_checkpoint(path) else None
    if (path / "checkpoints").is_dir():
        folder, run = _best_checkpoint(path), path
    in_run, path = run is not None, run or path
    fingerprint = folder_fingerprint(folder)
    vocabularies = [file.name for files in vocabulary_files(path / "tokenizer") for file in files]
    if in_run:
        verify_checkpoint(folder)
        verify_folder(path / "tokenizer", vocabularies)
    else:
        names = ["config.yaml", "model.safetensors", *(f"tokenizer/{name}" for name in vocabularies)]
        verify_folder(folder, names)
    config, tokenizer = _read_settings(path, in_run)
    config = with_overrides(config, overrides, "decoding.", known="decoding.*")
    architecture = config.model
    sizes = (tokenizer.source_vocab_size, tokenizer.target_vocab_size)
    if sizes != (architecture.source_vocab_size, architecture.target_vocab_size):
        expected = f"{architecture.source_vocab_size} and {architecture.target_vocab_size}"
        found = f"the vocabulary sizes of the tokenizer are {sizes[0]} and {sizes[1]}"
        raise ModelError(f"{folder}: {found}, but the model expects {expected}")
    special = (architecture.pad_id, architecture.unk_id, architecture.bos_id, architecture.eos_id)
    if special != tokenizer.special:
        raise ModelError(f"{folder}: the tokenizer and the model have different special token ids")
    model = model_without_weights(architecture)  # allocates no memory before the weights are known to fit
    load_weights(model, evaluation_weights(folder) if in_run else folder / "model.safetensors")
    model.embed.make_positions()
    if folder_fingerprint(folder) != fingerprint:
        raise ModelError(f"{folder}: was replaced while it was loaded; try again")
    return Loaded(model.eval(), tokenizer, config, fingerprint)


def folder_fingerprint(folder: Path) -> str:
    """SHA-256 of the manifest of a folder; empty if it cannot be read."""
    with suppress(OSError):
        return sha256(folder / MANIFEST)
    return ""


def _best_checkpoint(run_dir: Path) -> Path:
    """The best checkpoint of a run, or the newest if the best is unknown."""
    folders = checkpoint_folders(run_dir)
    if not folders:
        raise ModelError(f"{run_dir}: this run has no checkpoint yet")
    best = None
    with suppress(OSError, ValueError, LookupError, TypeError):
        best = read_json(run_dir / "checkpoints" / INDEX)["best"]
    return next((folder for folder in folders if folder.name == best), folders[-1])


def folder_config(config: Config, tokenizer: Tokenizer, layer: int | None = None) -> ModelFolderConfig:
    """The config of the model folder of a run. `layer` is used if `decoding.alignment_layer` is not set."""
    decoding = config.decoding
    if decoding.alignment_layer is None:
        decoding = decoding.model_copy(update={"alignment_layer": layer})
    direction, tags, codes = config.data.direction, config.data.language_tags, list[str]()
    if tags.startswith("codes"):  # a model without tags may have a vocabulary with codes
        direction, codes = tokenizer.complete(direction, tags), [*tokenizer.source.codes]
    return ModelFolderConfig(
        source_lang=direction.source,
        target_lang=direction.target,
        language_tags=tags,
        languages=codes,
        normalizes_punctuation=tokenizer.source.normalizes_punctuation,
        max_length=config.data.max_length,
        tokenizer=config.tokenizer,
        model=model_config(config.model, tokenizer, config.data.max_length),
        decoding=decoding,
    )
