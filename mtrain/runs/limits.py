"""When training ends."""

from collections.abc import Callable, Sequence
from typing import Protocol

from mtrain.checkpoint.state import Plan
from mtrain.config.sections.stages import Stage
from mtrain.config.sections.training import ENDING_AT_ZERO, TrainingConfig

LATEST = 1.05  # share of max_minutes after which a run ends even if more steps are planned
DECAYED = 0.95  # share of its schedule after which the learning rate need not decay further


class Progress(Protocol):
    """What the limits of a run are compared with."""

    step: int
    seconds: float
    validations_without_improvement: int
    plan: Plan | None

    @property
    def epoch(self) -> int: ...


def limit_reached(config: TrainingConfig, progress: Progress) -> str | None:
    """The limit at which training ends, if it is reached."""
    if config.max_steps is not None and progress.step >= config.max_steps:
        return f"max_steps ({config.max_steps})"
    if config.max_epochs is not None and progress.epoch >= config.max_epochs:
        return f"max_epochs ({config.max_epochs})"
    if config.max_minutes is not None:
        plan = None if config.planned_steps is None else progress.plan
        seconds = config.max_minutes * 60
        if plan is None:
            is_over = progress.seconds >= seconds
        else:
            decays = config.schedule in ENDING_AT_ZERO and plan.scheduled_at(progress.step) < DECAYED
            is_late = progress.seconds >= LATEST * seconds and not decays
            # The number of steps that max_epochs allows is an estimate: the run ends with the last epoch.
            is_over = is_late or (progress.step >= plan.total_steps and not plan.has_all_steps)
        if is_over:
            return f"max_minutes ({config.max_minutes:g})"
    if config.patience is not None and progress.validations_without_improvement >= config.patience:
        return f"patience (no improvement in {config.patience} validations)"
    return None


def allowed_steps(
    config: TrainingConfig,
    stages: Sequence[Stage] | None,
    steps_in_first_epoch: int | None,
    steps_in_epoch: Callable[[int], int],
    data_since: tuple[int, int] | None = None,
) -> int | None:
    """The number of steps that max_steps and max_epochs allow; None if neither is set. `steps_in_first_epoch`
    is required for max_epochs without stages, `steps_in_epoch` of each stage (from 0) with stages. Both are
    of the present data, on which the run trains since a step and a number of complete epochs."""

    def steps_of(epochs: int) -> int:
        if stages is not None:
            return _steps_of_stages(epochs, stages, steps_in_epoch)
        assert steps_in_first_epoch is not None
        return epochs * steps_in_first_epoch

    limits = [] if config.max_steps is None else [config.max_steps]
    if config.max_epochs is not None:
        step, epochs = data_since or (0, 0)
        limits.append(step + steps_of(max(epochs, config.max_epochs)) - steps_of(epochs))
    return min(limits, default=None)


def _steps_of_stages(epochs: int, stages: Sequence[Stage], steps_in_epoch: Callable[[int], int]) -> int:
    """The number of steps in the first epochs of a run with stages."""
    steps = 0
    for number, stage in enumerate(stages):
        if epochs == 0:  # it does not begin
            break
        in_epoch = steps_in_epoch(number)
        taken = epochs if stage.max_epochs is None else min(epochs, stage.max_epochs)
        of_stage = taken * in_epoch
        if stage.max_steps is not None and stage.max_steps < of_stage:
            of_stage, taken = stage.max_steps, -(-stage.max_steps // in_epoch)
        steps += of_stage
        epochs -= taken
    return steps
