"""How training proceeds through the data: the windows of an epoch, the stages of a run, and positions."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from mtrain.config.sections.stages import Stage

StageStarts = tuple[int, ...]  # the first epoch of each stage that has begun
FIRST_STAGE: StageStarts = (0,)


class WindowLayout(NamedTuple):
    """What determines the windows of an epoch, in addition to its seed."""

    buckets: int
    largest: int  # number of buckets in a window, at most

    @classmethod
    def of(cls, pairs: int, buckets: int, window_pairs: int) -> "WindowLayout":
        """Windows of about `window_pairs` pairs of a corpus that has `pairs` pairs in `buckets` buckets."""
        largest = max(1, window_pairs * buckets // max(pairs, 1))
        return cls(buckets, largest) if largest < buckets else ONE_WINDOW

    def windows(self, seed: int, epoch: int) -> list[list[int]]:
        """The buckets of each window of an epoch, if there are several windows.

        Their order is random. The first window is a single bucket, so that training starts soon, and each
        window is at most twice as large as the one before it.
        """
        # With a key of its own, because the batches of window 0 depend on [seed, epoch, 0], which NumPy takes
        # for the same as [seed, epoch].
        sequence = np.random.SeedSequence([seed, epoch], spawn_key=(0,))
        order = np.random.default_rng(sequence).permutation(self.buckets).tolist()
        return [sorted(order[start:stop]) for start, stop in pairwise(self.edges())]

    def edges(self) -> list[int]:
        """Where the windows of an epoch start, and where the last one ends, in buckets."""
        edges, size = [0], 1
        while edges[-1] < self.buckets:
            edges.append(min(edges[-1] + size, self.buckets))
            size = min(2 * size, self.largest)
        return edges


ONE_WINDOW = WindowLayout(1, 1)


class Position(NamedTuple):
    """A step of the training data. All numbers are from 0."""

    epoch: int = 0
    window: int = 0  # of the epoch
    step: int = 0  # of the window
    starts: StageStarts = FIRST_STAGE
    stage_step: int = 0  # of the current stage

    def after(self, steps: int) -> "Position":
        """The position after some steps of the same window and stage."""
        return self._replace(step=self.step + steps, stage_step=self.stage_step + steps)


class StageSchedule(NamedTuple):
    """Which steps belong to which stage of a run."""

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
        stage = self._ending(position.starts)
        if stage is None:
            return position
        epoch, starts = position.epoch, position.starts
        begun = position.window > 0 or position.step > 0  # the epoch
        if self._has_taken_steps(position):
            epoch += begun
        elif begun or stage.max_epochs is None or epoch - starts[-1] < stage.max_epochs:
            return position
        return Position(epoch, starts=(*starts, epoch))

    def _has_taken_steps(self, position: Position) -> bool:
        """Whether the steps of the stage at a position have been taken."""
        stage = self._ending(position.starts)
        return stage is not None and stage.max_steps is not None and position.stage_step >= stage.max_steps

    def _ending(self, starts: StageStarts) -> Stage | None:
        """The current stage; None if it is the last one, or if there are no stages."""
        return self.stages[len(starts) - 1] if len(starts) < len(self.stages) else None
