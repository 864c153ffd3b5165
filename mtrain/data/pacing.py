"""Spreads work in the background, such as subword sampling, over the training that takes place meanwhile."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SPEED = 2  # the work proceeds at most this many times as fast as training
_MARGIN = 3  # it waits only if training takes this many times as long as the rest of the work
_PAUSE = 10.0  # seconds without a step, after which the work no longer waits


class CancelledError(Exception):
    """The result is no longer needed."""


def never() -> bool:
    """For work that is not cancelled."""
    return False


class Pace:
    """Tells work on a window whether it is still needed, and when its next block may start. It is shared by
    the thread that trains and the one that does the work.

    A block waits only if the share of the blocks that have started is more than twice the share of the steps
    that were taken, and training on the remaining steps will take at least three times as long as the
    remaining blocks. Training therefore does not wait longer for the window because of this.
    """

    def __init__(
        self,
        steps: int = 0,
        cancelled: Callable[[], bool] = never,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`steps` is the number of steps that training takes meanwhile. If it is 0, training waits for the
        work, and no block waits. The work is no longer needed if `cancelled`, which is called from time to
        time, returns true."""
        self._steps, self._cancelled, self._clock = steps, cancelled, clock
        self._changed = threading.Condition()
        self._taken, self._first, self._last = 0, 0.0, 0.0  # the steps, and the times of two of them
        self._blocks, self._seconds = 0, 0.0  # that are done, and what they took
        self._at_once = steps == 0
        self._is_needed = True

    def step(self) -> None:
        """Tell that training has taken a step."""
        with self._changed:
            self._taken, self._last = self._taken + 1, self._clock()
            if self._taken == 1:
                self._first = self._last
            self._changed.notify_all()

    def hurry(self) -> None:
        """Tell that training waits for the result: no block waits any longer."""
        with self._changed:
            self._at_once = True
            self._changed.notify_all()

    def cancel(self) -> None:
        """Tell that the result is no longer needed."""
        with self._changed:
            self._is_needed = False
            self._changed.notify_all()

    def require_needed(self) -> None:
        """Raise CancelledError if the result is no longer needed."""
        if not self._is_needed or self._cancelled():
            raise CancelledError

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure how long a block takes."""
        start = self._clock()
        yield
        with self._changed:
            self._blocks, self._seconds = self._blocks + 1, self._seconds + self._clock() - start

    def spread(self, blocks: int, workers: int) -> Iterator[int]:
        """Yield the numbers of the blocks, each when it may start, if `workers` of them are done at the same
        time. Raises CancelledError if they are no longer needed."""
        for block in range(blocks):
            with self._changed:
                while self._is_needed and self.must_wait(block, blocks, workers):
                    self._changed.wait(self._pause)
            self.require_needed()
            yield block

    def must_wait(self, block: int, blocks: int, workers: int) -> bool:
        """Whether a block should not start yet."""
        if self._at_once or block * self._steps <= _SPEED * self._taken * blocks:
            return False
        if self._taken < 2 or not self._blocks:  # the speeds are not known; the first step may compile
            return False
        if self._clock() - self._last >= self._pause:
            return False
        training = (self._steps - self._taken) * self._step_seconds
        work = (blocks - block) * self._seconds / self._blocks / workers
        return training >= _MARGIN * work

    @property
    def _step_seconds(self) -> float:
        """How long a step takes, on average."""
        return (self._last - self._first) / max(self._taken - 1, 1)

    @property
    def _pause(self) -> float:
        """How long training takes no step if it pauses, for a validation for example, or has ended without
        cancelling the work."""
        return max(_PAUSE, _MARGIN * self._step_seconds)
