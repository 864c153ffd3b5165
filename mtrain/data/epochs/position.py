"""Positions in the training data, and where the stages of training end."""

from collections.abc import Sequence
from typing import NamedTuple

from mtrain.config.sections.stages import Stage
from mtrain.data.epochs.mixing import FIRST_STAGE, Starts


class Position(NamedTuple):
    """A step of the training data. All numbers are from 0."""

    epoch: int = 0
    window: int = 0  # of the epoch
    step: int = 0  # of the window
    starts: Starts = FIRST_STAGE  # the first epochs of the stages that have begun
    stage_step: int = 0  # of the current stage

    def after(self, steps: int) -> "Position":
        """The position after some steps of the same window and stage."""
        return self._replace(step=self.step + steps, stage_step=self.stage_step + steps)


START = Position()


class StageEnds(NamedTuple):
    """Tells where the stages of a run end."""

    stages: Sequence[Stage]  # none: the whole run has one mixture

    def steps_to_take(self, position: Position, steps: int) -> int:
        """The number of steps from a position to the end of its window of `steps` steps or, if that is
        earlier, of its stage."""
        left, stage = steps - position.step, self._ending(position.starts)
        if stage is None or stage.max_steps is None:
            return left
        return min(left, stage.max_steps - position.stage_step)

    def after(self, position: Position, taken: int, windows: int) -> Position:
        """The start of the window that follows the one at a position, one of `windows` in its epoch, after
        `taken` steps there."""
        position = position.after(taken)._replace(step=0)
        if position.window + 1 >= windows or self._has_taken_steps(position):
            return self.in_stage(position._replace(epoch=position.epoch + 1, window=0))
        return position._replace(window=position.window + 1)

    def in_stage(self, position: Position) -> Position:
        """A position or, if the stage at this position has ended, the start of the next one. A stage that has
        ended within an epoch is followed by another epoch."""
        stage, (epoch, window, step, starts, _) = self._ending(position.starts), position
        if stage is None:
            return position
        if self._has_taken_steps(position):
            epoch += bool(window or step)
        elif window or step or stage.max_epochs is None or epoch - starts[-1] < stage.max_epochs:
            return position
        return Position(epoch, starts=(*starts, epoch))

    def _has_taken_steps(self, position: Position) -> bool:
        """Whether the steps of the stage at a position have been taken."""
        stage = self._ending(position.starts)
        return stage is not None and stage.max_steps is not None and position.stage_step >= stage.max_steps

    def _ending(self, starts: Starts) -> Stage | None:
        """The current stage; None if it is the last one, or if there are no stages."""
        return self.stages[len(starts) - 1] if len(starts) < len(self.stages) else None
