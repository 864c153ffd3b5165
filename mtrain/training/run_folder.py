"""The run folder: what may start or go on in it, and its tokenizer."""

import json
import logging
import os
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mtrain.checkpoint.checkpoint import Checkpoint, checkpoint_folders, open_checkpoint
from mtrain.checkpoint.model_folder import copy_tokenizer, tokenizer_folder
from mtrain.config.load import validate
from mtrain.config.schema import Config, TokenizerConfig
from mtrain.config.yaml_io import read_yaml_file, to_yaml
from mtrain.data.scan import RawData
from mtrain.errors import ModelError, StorageError, UsageError
from mtrain.storage.atomic import recover, write_atomically, write_folder, write_text
from mtrain.storage.locks import try_lock
from mtrain.tokenizer.learn import train_tokenizer
from mtrain.tokenizer.tokenizer import Tokenizer
from mtrain.training.init_from import resolved

log = logging.getLogger(__name__)

# Keys that may differ from one `fit` to the next: limits, what the memory holds, cadence, patience, decoding,
# exports, the folder's name. Validations by another search could not be compared.
_MAY_CHANGE = re.compile(
    r"run_dir|(decoding|export)\..+|training\.(max_\w+|micro_batch_tokens|validate_every|checkpoint_every|"
    r"keep_checkpoints|log_every|patience)"
)
_MARK = "# Written by mtrain: the resolved config of this run.\n"
_NAMES = ["config.yaml", "manifest.json", "tokenizer", "data", "checkpoints", "metrics.jsonl", "model"]
_NAMES += ["origin.json"]
_LEFTOVERS = ["checkpoints/.index.json.tmp", "data/.epoch-*", *(f".{name}.tmp" for name in _NAMES)]


def open_run(config: Config, resume: str) -> Checkpoint | None:
    """Enter the run folder, and choose the checkpoint to continue from; None to start afresh.

    `resume` is `auto` (the newest valid one), `never`, or the path of a checkpoint. Writes `config.yaml`.
    Raises UsageError if the folder is used and `resume` is never, or a key changed that may not; ModelError
    if no checkpoint is valid; StorageError if the folder cannot be written.
    """
    run_dir = Path(config.run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    checkpoints = checkpoint_folders(run_dir)
    if resume == "never" and checkpoints:
        raise UsageError(f"{run_dir}: has checkpoints, and --resume never was given; give another --run-dir")
    chosen = None
    if resume not in ("auto", "never"):
        wanted = [folder for folder in checkpoints if folder.resolve() == Path(resume).resolve()]
        if not wanted:
            raise ModelError(f"--resume {resume}: no such checkpoint in {run_dir}")
        chosen = open_checkpoint(wanted[0])
    elif checkpoints:
        chosen = _newest_valid(checkpoints)
    if chosen is not None and (run_dir / "config.yaml").exists():
        _compare(config, run_dir / "config.yaml")
    _write_config(config)
    return chosen


def tokenize(config: Config, force: bool = False) -> Tokenizer:
    """Make the run folder and its tokenizer without training. Raises what `prepare_tokenizer` raises."""
    raw, any_size = RawData(config.data, config.seed, Path(config.run_dir)), vocab_size_is_automatic(config)
    with claimed(Path(config.run_dir)):
        config, _ = resolved(config, raw)
        if not checkpoint_folders(Path(config.run_dir)):
            _write_config(config)
        tokenizer = prepare_tokenizer(config, raw, force, any_size)
        if any_size:
            adopt_vocab_size(config)
        return tokenizer


@contextmanager
def claimed(run_dir: Path) -> Iterator[None]:
    """Make the run folder, mend what a crash left there, and keep other processes out of it until the block
    or the process ends, however it ends. Nothing that is not ours is ever touched.

    Raises UsageError if it is another kind of folder, or naming the process that holds it already;
    StorageError if it cannot be written.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        config = run_dir / "config.yaml"
        ours = config.is_file() and config.read_text(encoding="utf-8", errors="replace").startswith(_MARK)
        if not ours and (foreign := [name for name in _NAMES if (run_dir / name).exists()]):
            raise UsageError(
                f"{run_dir}: is no run folder of mtrain but has {foreign[0]}, which a run would overwrite; "
                "give another --run-dir"
            )
        lock = try_lock(run_dir / ".lock")
    except OSError as error:
        raise StorageError(f"{run_dir}: cannot create the run folder: {error.strerror}") from None
    owner = run_dir / ".lock-owner"
    if lock is None:
        name = "another process"
        with suppress(OSError):
            name = owner.read_text(encoding="utf-8", errors="replace").strip() or name
        raise UsageError(f"{run_dir}: in use by {name}; wait, or give another --run-dir")
    try:
        with suppress(OSError):  # the folder is locked even if a full disk does not take the name
            owner.write_text(f"process {os.getpid()} on {socket.gethostname()}\n", encoding="utf-8")
        if ours:
            _clear(run_dir)
        yield
    finally:
        lock.release()


def _clear(run_dir: Path) -> None:
    """Remove what a crash left in a run folder, or put it back in its place."""
    try:
        for leftover in list(run_dir.glob("checkpoints/.step-*.*")):
            recover(leftover.with_name(leftover.stem.removeprefix(".")))
        for leftover in [found for pattern in _LEFTOVERS for found in run_dir.glob(pattern)]:
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
    except OSError as error:
        raise StorageError(f"{run_dir}: cannot clear the run folder: {error.strerror}") from None


def _write_config(config: Config) -> None:
    write_atomically(Path(config.run_dir) / "config.yaml", _MARK + to_yaml(config))


def _newest_valid(checkpoints: list[Path]) -> Checkpoint:
    for folder in reversed(checkpoints):
        try:
            return open_checkpoint(folder)
        except ModelError as error:
            log.warning("%s; trying the one before it", error)
    raise ModelError(f"{checkpoints[0].parent}: no checkpoint is valid; start another run with --run-dir")


def _compare(config: Config, file: Path) -> None:
    """Log the keys that changed since the run began. Raises UsageError at one that may not."""
    earlier = validate(Config, read_yaml_file(file), str(file))  # keys that it does not have get defaults
    for key, old, new in _changes(earlier.model_dump(mode="json"), config.model_dump(mode="json")):
        if not _MAY_CHANGE.fullmatch(key):
            raise UsageError(
                f"{key} was {old} when this run began and is {new} now; "
                "set it back, or start another run with --run-dir"
            )
        log.info("%s: %s, was %s", key, new, old)


def _changes(old: Any, new: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The keys that differ, in dotted form, with both values."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            yield from _changes(old.get(key), new.get(key), f"{path}.{key}".lstrip("."))
    elif old != new:
        yield path, old, new


def vocab_size_is_automatic(config: Config) -> bool:
    """Whether `model.preset: auto` chooses the vocabulary size of an unresolved config."""
    return config.model.preset == "auto" and "vocab_size" not in config.tokenizer.model_fields_set


def adopt_vocab_size(config: Config) -> Config:
    """The config with the vocabulary size that was learned, which `RUN/config.yaml` then states too. It is
    smaller than the automatic choice if the text is too small for that."""
    settings = Path(config.run_dir) / "tokenizer/config.yaml"
    recipe = validate(TokenizerConfig, read_yaml_file(settings), str(settings))
    if recipe == config.tokenizer:
        return config
    config = config.model_copy(update={"tokenizer": recipe})
    _write_config(config)
    return config


def prepare_tokenizer(
    config: Config, raw: RawData | None = None, force: bool = False, any_size: bool = False
) -> Tokenizer:
    """The tokenizer of the run. If it has none, learn it from the training text or copy `tokenizer.path`.

    With `any_size`, `vocab_size` is an upper limit, and the largest possible size below it is learned. Raises
    UsageError if the existing tokenizer was learned with other settings, or if checkpoints need the one that
    `force` would replace; ModelError if checkpoints need a tokenizer that is missing.
    """
    raw = raw or RawData(config.data, config.seed, Path(config.run_dir))
    run_dir, recipe = Path(config.run_dir), config.tokenizer
    folder = run_dir / "tokenizer"
    settings, learnt_from = folder / "config.yaml", folder / "learnt-from.json"
    trained = bool(checkpoint_folders(run_dir))

    def contents() -> str:
        return json.dumps(raw.training_hashes) + "\n"

    if force and trained:
        raise UsageError(f"{run_dir}: its checkpoints need this tokenizer; give another --run-dir")
    if settings.exists() and not force:
        learned = validate(TokenizerConfig, read_yaml_file(settings), str(settings))
        if any_size and learned.vocab_size <= recipe.vocab_size:
            recipe = recipe.model_copy(update={"vocab_size": learned.vocab_size})
        if learned != recipe:
            raise UsageError(
                f"{folder}: was learnt with other tokenizer settings; set them back, or replace it by "
                "`mtrain tokenize CONFIG --force`"
            )
        if not trained and learnt_from.exists() and learnt_from.read_text(encoding="utf-8") != contents():
            log.warning("tokenizer: learnt before data.train changed; `mtrain tokenize --force` renews it")
        return Tokenizer(folder)
    if trained:
        reason = "is gone, and the checkpoints need it"
        raise ModelError(f"{folder}: {reason}; restore it, or start another run with --run-dir")

    def fill(temporary: Path) -> None:
        learned = recipe
        if recipe.path is None:
            text = raw.scan.text
            sides = (lambda: text.side(0)), (lambda: text.side(1))
            size = train_tokenizer(recipe, *sides, temporary, config.seed, any_size)
            learned = recipe.model_copy(update={"vocab_size": size})
            write_text(temporary / learnt_from.name, contents())
        else:
            copy_tokenizer(tokenizer_folder(Path(recipe.path)), temporary)
        write_text(temporary / settings.name, to_yaml(learned))

    write_folder(folder, fill)
    return Tokenizer(folder)


def existing_tokenizer(config: Config) -> Tokenizer | None:
    """The tokenizer of the run, if it has one already or takes that of another model."""
    folder = Path(config.run_dir) / "tokenizer"
    if (folder / "config.yaml").exists():
        return Tokenizer(folder)
    return Tokenizer(tokenizer_folder(Path(config.tokenizer.path))) if config.tokenizer.path else None
