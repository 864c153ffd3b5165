"""What `mtrain info` reports about a model or a run. Nothing here imports PyTorch."""

import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from mtrain.checkpoint import model_info
from mtrain.checkpoint.model_card import read_card, stated_license
from mtrain.checkpoint.model_info import Description, Score
from mtrain.checkpoint.state import Plan
from mtrain.config.choices import Choice
from mtrain.config.load import read_config, validate
from mtrain.config.schema import Config
from mtrain.config.sections.training import TrainingConfig
from mtrain.errors import ModelError, UsageError
from mtrain.regular_files import read_file
from mtrain.runs.json_records import read_record
from mtrain.runs.limits import limit_reached
from mtrain.runs.metrics import read_metrics, validation_scores
from mtrain.storage.manifest import MANIFEST, UNLISTED, sha256, verify_folder
from mtrain.tokenizer.tokenizer import fingerprint_of, vocabulary_files

_Count = Annotated[int, Field(ge=0, lt=2**63)]
_CHOICES = TypeAdapter(list[Choice], config=ConfigDict(allow_inf_nan=False))


class Validation(BaseModel):
    """The scores of a validation."""

    step: _Count
    scores: list[Score]


class RunProgress(BaseModel):
    """The progress of a run, for display. Resuming uses the checkpoints themselves."""

    step: _Count = 0  # of the newest checkpoint
    epoch: _Count = 0  # number of complete epochs
    stage_starts: Annotated[list[_Count], Field(min_length=1)] = [0]  # first epochs of the begun stages
    target_tokens: _Count = Field(0, validation_alias="target_tokens_seen")
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    arithmetic: str = ""  # device, precision and versions that made the newest checkpoint
    validations_without_improvement: _Count = 0  # in a row
    logged_step: _Count = 0  # of the last line of metrics.jsonl
    checkpoints: _Count = 0
    plan: Plan | None = None  # by the clock
    best_metric: str | None = None  # that has selected the model
    best: Validation | None = None  # of the model in the run folder
    last: Validation | None = None
    finished: str | None = None  # the limit that was reached


def read_progress(run_dir: Path, training: TrainingConfig | None) -> RunProgress:
    """The progress of a run folder, as far as it is recorded. `training` is None if it is not known."""
    folders = sorted((run_dir / "checkpoints").glob("step-" + "[0-9]" * 8))
    index = read_record(run_dir / "checkpoints/index.json") or {}
    states = (read_record(folder / "state.json") for folder in reversed(folders))
    state = next(filter(None, states), {})  # `fit` resumes from the newest valid checkpoint
    validated = index.get("validated")
    if isinstance(validated, dict) and validated.get("step") == state.get("step"):
        state |= validated  # the state was saved before the validation
    progress = RunProgress()
    with suppress(ValidationError):  # a damaged state
        progress = RunProgress.model_validate(state)
    progress.checkpoints = len(folders)
    lines = list(read_metrics(run_dir))
    found = validation_scores(lines).items()
    validations = {f"step-{step:08d}": Validation(step=step, scores=scores) for step, scores in found}
    progress.best = validations.get(str(index.get("best")))
    progress.last = next(reversed(validations.values()), None)
    progress.logged_step = next((line["step"] for line in lines[::-1] if isinstance(line["step"], int)), 0)
    # If a validation is due, it may select another model.
    if training is not None and not state.get("validation_due"):
        progress.finished = limit_reached(training, progress)
    return progress


class Files(NamedTuple):
    """Number, size and hashes of the files of a model folder."""

    number: int
    size: int  # bytes
    fingerprint: str | None  # SHA-256 of the manifest
    tokenizer: str | None  # SHA-256 of the vocabulary files
    damage: str | None  # the first difference from the manifest


class Summary(NamedTuple):
    """What is known about a model or a run."""

    path: Path
    model: Description | None  # None for a run that has no model yet
    files: Files | None
    license: str | None
    notes: list[str]  # problems of files that no other command needs
    config: Config | None  # of a run
    progress: RunProgress | None  # of a run
    choices: list[Choice]  # of `model.preset: auto`, when a run began


def summarize(path: Path) -> Summary:
    """Read all that is known about a run folder, a model folder or an exported model.

    Raises ModelError if it is none of them, or if the settings of the model cannot be read. Other damage is
    part of the result.
    """
    model_info.require_folder(path)
    with suppress(ModelError, FileNotFoundError):
        summary = _summarize(path)
        if summary.files is None or summary.files.damage is None:
            return summary
    time.sleep(0.2)  # a running `fit` may just have replaced the model
    return _summarize(path)


def _summarize(path: Path) -> Summary:
    notes: list[str] = []
    folder = path
    config = progress = None
    choices: list[Choice] = []
    if model_info.is_run(path) or model_info.has_run_config(path):  # also if it has just begun
        folder = path / "model"
        try:
            config = validate(Config, read_config(path / "config.yaml"), str(path / "config.yaml"))
        except UsageError as error:
            notes.append(str(error))
        progress = read_progress(path, config.training if config else None)
        choices = _read_choices(path)
        if not folder.is_dir():
            return Summary(path, None, None, None, notes, config, progress, choices)
    model = model_info.describe_model(folder)
    if model.problem:
        notes.append(model.problem)
    license = None
    try:
        license = stated_license(read_card(folder) or "")
    except ModelError as error:
        notes.append(str(error))
    return Summary(path, model, _files(folder), license, notes, config, progress, choices)


def _read_choices(run_dir: Path) -> list[Choice]:
    """What `model.preset: auto` chose; none if it chose nothing, or if the record is missing or damaged."""
    with suppress(OSError, ValueError):
        return _CHOICES.validate_json(read_file(run_dir / "choices.json"))
    return []


def _files(folder: Path) -> Files:
    files = [file for file in folder.rglob("*") if file.is_file() and not file.is_symlink()]
    vocabularies = [file for part in vocabulary_files(folder / "tokenizer") for file in part]
    fingerprint = tokenizer = None
    with suppress(OSError):  # `damage` says what is wrong
        fingerprint = sha256(folder / MANIFEST)
        tokenizer = fingerprint_of(vocabularies)
    damage, is_exported = None, not (folder / "config.yaml").exists()
    names = [file.relative_to(folder).as_posix() for file in vocabularies]
    try:
        listed = verify_folder(folder, [] if is_exported else ["config.yaml", "model.safetensors", *names])
        # Without what is not part of the model, such as a CTranslate2 model that was made from it.
        files = [*listed, *(file for name in UNLISTED if (file := folder / name).is_file())]
    except ModelError as error:
        damage = str(error)
    return Files(len(files), sum(file.stat().st_size for file in files), fingerprint, tokenizer, damage)
