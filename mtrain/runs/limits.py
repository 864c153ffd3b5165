"""When training ends."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from mtrain.config.sections.stages import Stage
from mtrain.config.sections.training import TrainingConfig

if TYPE_CHECKING:
    from mtrain.checkpoint.checkpoint import TrainState


class Counts(Protocol):
    """What the limits apply to; see `TrainState`."""

    @property
    def step(self) -> int: ...
    @property
    def epoch(self) -> int: ...
    @property
    def seconds(self) -> float: ...
    @property
    def validations_without_improvement(self) -> int: ...


def limit_reached(recipe: TrainingConfig, state: Counts) -> str | None:
    """The limit at which training ends, if it is reached."""
    if recipe.max_steps is not None and state.step >= recipe.max_steps:
        return f"max_steps ({recipe.max_steps})"
    if recipe.max_epochs is not None and state.epoch >= recipe.max_epochs:
        return f"max_epochs ({recipe.max_epochs})"
    if recipe.max_minutes is not None and state.seconds >= recipe.max_minutes * 60:
        return f"max_minutes ({recipe.max_minutes:g})"
    if recipe.patience is not None and state.validations_without_improvement >= recipe.patience:
        return f"patience (no improvement in {recipe.patience} validations)"
    return None


def allowed_steps(
    recipe: TrainingConfig,
    state: "TrainState",
    stages: Sequence[Stage] | None,
    steps_in_epoch: Callable[[int], int],
) -> int | None:
    """The number of steps that max_steps and max_epochs allow; None if neither is set. `steps_in_epoch` is
    the number of steps in the first epoch of a stage (from 0); without stages, stage 0 is the whole run, and
    the state keeps that number, so that a resumed run has the same learning rates."""
    limits = [] if recipe.max_steps is None else [recipe.max_steps]
    if recipe.max_epochs is not None and stages is not None:
        limits.append(_steps_of_stages(recipe.max_epochs, stages, steps_in_epoch))
    elif recipe.max_epochs is not None:
        if state.steps_in_first_epoch is None:
            state.steps_in_first_epoch = steps_in_epoch(0)
        limits.append(recipe.max_epochs * state.steps_in_first_epoch)
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
        steps, epochs = steps + of_stage, epochs - taken
    return steps
