"""The progress of a run, as its folder records it, for `mtrain info`. Nothing here imports PyTorch."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from mtrain.checkpoint.model_info import Score
from mtrain.checkpoint.run_info import read_validations
from mtrain.config.training import TrainingConfig
from mtrain.runs.limits import limit_reached
from mtrain.storage.json_records import read_record, read_steps

_Count = Annotated[int, Field(ge=0, lt=2**63)]


class Validation(BaseModel):
    """The scores of a validation."""

    step: _Count
    scores: list[Score]


class RunProgress(BaseModel):
    """The progress of a run, for display. Resuming uses the checkpoints themselves."""

    step: _Count = 0  # of the newest checkpoint
    epoch: _Count = 0  # number of complete epochs
    stage_starts: Annotated[list[_Count], Field(min_length=1)] = [0]  # first epochs of the begun stages
    target_tokens: _Count = 0
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    validations_without_improvement: _Count = 0  # in a row
    logged_step: _Count = 0  # of the last line of metrics.jsonl
    checkpoints: _Count = 0
    best: Validation | None = None  # that of the model in the run folder
    last: Validation | None = None
    finished: str | None = None  # the limit that was reached


def read_progress(run_dir: Path, recipe: TrainingConfig | None) -> RunProgress:
    """The progress of a run folder, as far as it is recorded. `recipe` is None if it is not known."""
    folders = sorted((run_dir / "checkpoints").glob("step-" + "[0-9]" * 8))
    index = read_record(run_dir / "checkpoints/index.json") or {}
    state = (folders and read_record(folders[-1] / "state.json")) or {}
    validated = index.get("validated")
    if isinstance(validated, dict) and validated.get("step") == state.get("step"):
        state |= validated  # the state was saved before the validation
    values: dict[str, Any] = {
        "step": state.get("step", 0),
        "epoch": state.get("epoch", 0),
        "stage_starts": state.get("stage_starts", [0]),
        "target_tokens": state.get("target_tokens_seen", 0),
        "seconds": state.get("seconds", 0.0),
        "validations_without_improvement": state.get("validations_without_improvement", 0),
    }
    try:
        progress = RunProgress.model_validate(values)
    except ValidationError:  # a damaged state
        progress = RunProgress()
    progress.checkpoints = len(folders)
    scores = read_validations(run_dir)
    validations = {f"step-{step:08d}": Validation(step=step, scores=scores[step]) for step in scores}
    progress.best = validations.get(str(index.get("best")))
    progress.last = next(reversed(validations.values()), None)
    for record in read_steps(run_dir / "metrics.jsonl"):
        if isinstance(record["step"], int):
            progress.logged_step = record["step"]
    if recipe is not None and not state.get("validation_due"):  # the last validation may select another model
        progress.finished = limit_reached(
            recipe, progress.step, progress.epoch, progress.seconds, progress.validations_without_improvement
        )
    return progress
