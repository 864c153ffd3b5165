"""The run folder: its lock, clean-up after a crash, its config, and the checkpoint to resume from."""

import json
import logging
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mtrain.checkpoint.checkpoint import Checkpoint, checkpoint_folders, open_checkpoint
from mtrain.checkpoint.model_folder import Loaded
from mtrain.checkpoint.model_info import RUN_HEADER, describe_ancestor, has_run_config
from mtrain.config.choices import Choice
from mtrain.config.schema import Config
from mtrain.config.sections.corpora import CORPUS_KINDS, CorpusSpec, Holdout
from mtrain.config.sections.data import DataConfig
from mtrain.config.yaml_io import dump_yaml, to_yaml_line
from mtrain.data.preparing.encode_folder import LOCK
from mtrain.errors import ModelError, StorageError, UsageError
from mtrain.model.build import AnyModel
from mtrain.paths import path_of
from mtrain.regular_files import read_file
from mtrain.storage.atomic import recover, write_atomically
from mtrain.storage.locks import owner_of, record_owner, try_lock
from mtrain.storage.manifest import MANIFEST

log = logging.getLogger(__name__)

# Keys that may change when a run is resumed. If the search settings of validation change, the best score is
# discarded. Whether files with other paths have the same contents is checked later, when they are read.
_MAY_CHANGE = re.compile(
    r"run_dir|data\.(check|folder|window_pairs|test(\..+)?|train(\[\d+\])?\.name)|(decoding|export)\..+|"
    r"data\.(train|validation)(\[\d+\])?\.(source|target|tsv|jsonl|parquet)|"
    r"model\.alignment_head|training\.(max_\w+|planned_steps|micro_batch_tokens|validate_every|checkpoint_every|"
    r"keep_checkpoints|log_every|parallel|cuda_graphs|precision|patience)"
)
_CORPUS = re.compile(r"data\.(train|validation)(\[\d+\])?(\.(?!weight$).+)?")
_CONTENTS = [
    *("config.yaml", "manifest.json", "tokenizer", "data", "checkpoints", "metrics.jsonl", "model"),
    *("origin.json", "memory-limit.json", "samples.jsonl", "best_validation.json", "test_scores.json"),
    *("choices.json", "clock.json", "suspect-shards.json", "tensorboard"),
]
_LEFTOVERS = ["checkpoints/.index.json.*tmp", "data/.epoch-*", *(f".{name}.*tmp" for name in _CONTENTS)]


def open_run(config: Config, saved: Config | None, resume: str, allow_data_change: bool) -> Checkpoint | None:
    """The checkpoint to resume from; None for a new run, whose `config.yaml` is written.

    `saved` is the config that the run had last. `resume` is `auto` (the newest valid checkpoint), `never`, or
    the path of a checkpoint. With `allow_data_change`, the keys of the corpora may have changed; their
    contents are compared by `prepare_data`. Raises UsageError if there are checkpoints and `resume` is
    `never`, or if a key has changed that must not change; ModelError if no checkpoint is valid; StorageError
    if the folder cannot be written.
    """
    run_dir = Path(config.run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    checkpoints = checkpoint_folders(run_dir)
    if resume == "never" and checkpoints:
        raise UsageError(f"{run_dir}: already has checkpoints; with --resume never, give another --run-dir")
    chosen = None
    if resume not in ("auto", "never"):
        wanted = [folder for folder in checkpoints if folder.resolve() == path_of(resume).resolve()]
        if not wanted:
            raise ModelError(f"--resume {resume}: no such checkpoint in {run_dir}")
        chosen = open_checkpoint(wanted[0])
    elif checkpoints:
        chosen = _newest_valid(checkpoints)
    if chosen is None:
        write_config(config)  # now, because it marks the folder as a run folder
        # A run that ended before its first checkpoint may have left its choices and plans.
        for name in ("choices.json", "clock.json"):
            (run_dir / name).unlink(missing_ok=True)
    elif saved is not None:
        _check_config_changes(config, saved, len(chosen.state.position.starts), allow_data_change)
    return chosen


@contextmanager
def locked_run_folder(run_dir: Path) -> Iterator[None]:
    """Create the run folder, lock it against other processes, and clean up after a crash.

    The lock is released at the end of the block, or when the process ends. Files that mtrain did not write
    are not touched. Raises UsageError if the folder has other contents, or a model but no checkpoints, or if
    another process holds the lock, which the message names; StorageError if the folder cannot be written.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        _require_parts(run_dir)
        is_run = has_run_config(run_dir)
        if not is_run and (foreign := [name for name in _CONTENTS if _is_foreign(run_dir / name)]):
            problem = f"is not a run folder, and a run would overwrite its {foreign[0]}"
            raise UsageError(f"{run_dir}: {problem}; give another --run-dir")
        lock = try_lock(run_dir / ".lock")
    except OSError as error:
        raise StorageError(f"{run_dir}: cannot create the run folder: {error.strerror}") from None
    if lock is None:
        name = owner_of(run_dir / ".lock")
        raise UsageError(f"{run_dir}: in use by {name}; wait, or give another --run-dir")
    try:
        record_owner(run_dir / ".lock")
        if is_run:
            _clean_up(run_dir)
        if (run_dir / "model" / MANIFEST).is_file() and not checkpoint_folders(run_dir):
            problem = "has a model but no checkpoint to resume from; a new run would replace the model"
            cure = f"give another --run-dir, or move {run_dir / 'model'} elsewhere"
            raise UsageError(f"{run_dir}: {problem}; {cure}")
        yield
    finally:
        lock.release()


def _require_parts(run_dir: Path) -> None:
    """Raise ModelError if the config of a run is lost, or if a part of it is a link that leads nowhere."""
    for path in (run_dir / name for name in _CONTENTS):
        if path.is_symlink() and not path.exists():
            problem = f"a link to {path.readlink()}, which does not exist"
            raise ModelError(f"{path}: {problem}; restore it, or remove the link")
    file = run_dir / "config.yaml"
    if checkpoint_folders(run_dir) and not file.exists():
        cure = "restore it, or start another run with --run-dir"
        raise ModelError(f"{file}: missing, but the checkpoints need it; {cure}")


def _is_foreign(path: Path) -> bool:
    """Whether an entry of a folder without a config was not made by mtrain. A data folder is not foreign: it
    may have been made before the config was written, or by another run. A crash can leave it empty."""
    is_empty = path.is_dir() and not any(path.iterdir())
    return path.exists() and not is_empty and not (path / LOCK).exists()


def _clean_up(run_dir: Path) -> None:
    """Remove the temporary files that a crash left in a run folder, and restore replaced folders."""
    try:
        recover(run_dir / "model")
        for leftover in list(run_dir.glob("checkpoints/.step-*.*")):
            recover(leftover.with_name(leftover.stem.removeprefix(".")))
        for leftover in [found for pattern in _LEFTOVERS for found in run_dir.glob(pattern)]:
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
    except OSError as error:
        raise StorageError(f"{run_dir}: cannot clean up the run folder: {error.strerror}") from None


def write_config(config: Config) -> None:
    """Write the resolved config of a run to `RUN/config.yaml`, unless it is there. Raises StorageError.

    Until the recipe is chosen, only the given keys are written, since defaults would count as given. Corpora
    are always written without defaults, so that the file is hardly larger than the user's and can be read.
    """
    file = Path(config.run_dir) / "config.yaml"
    values = config.model_dump(mode="json", exclude_unset=config.model.preset == "auto")
    data = values["data"]
    data["train"] = [*map(_without_defaults, config.data.train)]
    if isinstance(config.data.validation, list):
        data["validation"] = [*map(_without_defaults, config.data.validation)]
    if config.data.test:
        data["test"] = {name: _without_defaults(test) for name, test in config.data.test.items()}
    text = RUN_HEADER + dump_yaml(values)
    with suppress(OSError):
        if read_file(file) == text.encode():
            return
    write_atomically(file, text)


def _without_defaults(corpus: CorpusSpec) -> dict[str, Any]:
    return corpus.model_dump(mode="json", exclude_defaults=True)


def record_choices(run_dir: Path, choices: Sequence[Choice]) -> None:
    """Write what `model.preset: auto` chose for a new run, and why, to `RUN/choices.json`. Raises
    StorageError."""
    values = [choice._asdict() for choice in choices]
    write_atomically(run_dir / "choices.json", json.dumps(values, indent=1) + "\n")


def record_initial_model(run_dir: Path, initial_model: Loaded[AnyModel] | None, path: str | None) -> None:
    """Write the path, the fingerprint and the origin of the model that a new run starts from to
    `RUN/origin.json`, or remove that file if there is no such model."""
    file = run_dir / "origin.json"
    if initial_model is None or path is None:
        file.unlink(missing_ok=True)  # from a run that ended before its first checkpoint
    else:
        ancestor = describe_ancestor(Path(path), initial_model.fingerprint)
        origin = {"init_from": path, **ancestor.model_dump(mode="json", exclude_none=True)}
        write_atomically(file, json.dumps(origin, indent=1) + "\n")


def _newest_valid(checkpoints: list[Path]) -> Checkpoint:
    for folder in reversed(checkpoints):
        try:
            return open_checkpoint(folder)
        except ModelError as error:
            log.warning("%s; trying the previous checkpoint", error)
    raise ModelError(f"{checkpoints[0].parent}: no checkpoint is valid; start another run with --run-dir")


def _check_config_changes(config: Config, previous: Config, stages: int, allow_data_change: bool) -> None:
    """Log the keys that have changed since the run began, when `stages` stages have begun. Raises UsageError
    if one of them must not. With `allow_data_change`, corpora may."""
    _check_stages(previous.data, config.data, stages)
    for key, old, new in _changes(previous.model_dump(mode="json"), config.model_dump(mode="json")):
        if key.startswith("data.stages"):
            continue
        # Another holdout would contain pairs that the run was trained on.
        is_held_out = key.startswith("data.validation") and isinstance(config.data.validation, Holdout)
        is_corpus = _CORPUS.fullmatch(key) is not None and not is_held_out
        if not (_MAY_CHANGE.fullmatch(key) or (is_corpus and allow_data_change)):
            change = f"{key} was {_format_value(old)} when this run began and is {_format_value(new)} now"
            hint = "add --allow-data-change, " if is_corpus else ""
            raise UsageError(f"{change}; {hint}restore it, or start another run with --run-dir")
        log.info("%s: %s, was %s", key, _format_value(new), _format_value(old))


def _check_stages(previous: DataConfig, data: DataConfig, begun: int) -> None:
    """Log a change of the stages of training. Raises UsageError unless the first `begun` of them are the
    same; the limits of the last of these, the current one, may change, and so may the names of corpora."""
    old, new = (_stages_by_number(each) for each in (previous, data))
    if old == new:
        return
    cure = "or start another run with --run-dir"
    if old is None:
        raise UsageError(f"data.stages was not given when this run began; remove it, {cure}")
    if new is None:
        raise UsageError(f"data.stages was given when this run began and is not now; restore it, {cure}")
    for number, before in enumerate(old[:begun], start=1):
        kept, problem = set(before), "has ended and cannot change"
        if number == begun:
            kept -= {"max_epochs", "max_steps"}
            problem = "has begun; only its max_epochs and max_steps can change"
        if number > len(new) or any(new[number - 1][key] != before[key] for key in kept):
            raise UsageError(f"data.stages: stage {number} {problem}; restore it, {cure}")
    log.info("data.stages: the stages from stage %d on have changed", begun)


def _stages_by_number(data: DataConfig) -> list[dict[str, Any]] | None:
    """The stages with the numbers of corpora in place of their names."""
    numbers = {name: number for number, name in enumerate(data.names)}
    if data.stages is None:
        return None
    found = []
    for stage in data.stages:
        shares = {numbers[name]: share for name, share in stage.shares.items()}
        found.append(stage.model_dump() | {"shares": shares, "of": numbers[stage.counted(data.names)]})
    return found


def _changes(old: Any, new: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the keys that differ, in dotted form, with both values. Corpora are compared one by one."""
    are_dicts = isinstance(old, dict) and isinstance(new, dict)
    # The keys of TSV corpora may differ, because those that are false are left out.
    if are_dicts and (not path or old.keys() == new.keys() or old.keys() & new.keys() & CORPUS_KINDS):
        absent = False if path else None
        for key in sorted(old.keys() | new.keys()):
            yield from _changes(old.get(key, absent), new.get(key, absent), f"{path}.{key}".lstrip("."))
    elif _are_sections(old) and _are_sections(new) and len(old) == len(new):
        for number, (before, now) in enumerate(zip(old, new, strict=True), start=1):
            yield from _changes(before, now, path if len(old) == 1 else f"{path}[{number}]")
    elif old != new:
        yield path, old, new


def _are_sections(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _format_value(value: Any) -> str:
    """A value of the config as in YAML: for a corpus, the names of its files; for another section, the keys
    that are set."""
    if isinstance(value, dict):
        named = (part for key, part in value.items() if key in CORPUS_KINDS or key == "target")
        if files := [file for file in named if file is not None]:
            return " and ".join(map(_format_value, files))
        if value and all(isinstance(part, dict) for part in value.values()):  # test sets by name
            return " and ".join(_format_value(value[key]) for key in sorted(value))
        return to_yaml_line({key: part for key, part in value.items() if part not in (None, False, 0, "off")})
    if isinstance(value, list):
        return ", ".join(map(_format_value, value)) or "none"
    return to_yaml_line(value)
