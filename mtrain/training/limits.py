"""When training ends."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from mtrain.config.training import TrainingConfig

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
        return f"patience (no better {recipe.best_metric} in {recipe.patience} validations)"
    return None


def allowed_steps(
    recipe: TrainingConfig, state: "TrainState", steps_in_epoch: Callable[[], int]
) -> int | None:
    """The number of steps that max_steps and max_epochs allow; None if neither is set. The state keeps the
    number of steps in the first epoch, so that a resumed run has the same learning rates."""
    limits = [] if recipe.max_steps is None else [recipe.max_steps]
    if recipe.max_epochs is not None:
        if state.steps_in_first_epoch is None:
            state.steps_in_first_epoch = steps_in_epoch()
        limits.append(recipe.max_epochs * state.steps_in_first_epoch)
    return min(limits, default=None)
