"""Changes of the rows of a window, for each epoch anew, such as subword sampling.

A change is made in blocks of rows and depends only on the seed, the epoch, the window and the rows. Its
result is stored in temporary files, so that memory does not depend on the size of a window. A throttle
spreads the work over the training that takes place meanwhile.
"""

import random
import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import CancelledError
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np

from mtrain.data.store.shards import EncodedCorpus
from mtrain.storage.temporary import TemporaryStream
from mtrain.tokenizer.rows import Rows, Sides

BLOCK = 10_000  # rows that are changed at a time
Key = tuple[int, ...]  # the epoch or, if it has several windows, the epoch and the window
Blocks = Generator[Sides, None, None]
_SPEED = 2  # the work proceeds at most this many times as fast as training
_MARGIN = 3  # it waits only if training takes this many times as long as the rest of the work
_PAUSE = 10.0  # seconds without a step, after which the work no longer waits


def never() -> bool:
    """For work that is not cancelled."""
    return False


class Throttle:
    """Tells work on a window whether it is still needed, and when its next block may start. It is shared by
    the thread that trains and the one that does the work.

    A block waits only if the share of the blocks that have started is more than twice the share of the steps
    that were taken, and training on the remaining steps takes, at the speed so far, at least three times as
    long as the remaining blocks. Pauses of training do not count. Until two steps have been taken and a block
    is finished, no block waits.
    """

    def __init__(self, steps: int = 0, cancelled: Callable[[], bool] = never):
        """`steps` is the number of steps that training takes meanwhile. If it is 0, training waits for the
        work, and no block waits. The work is no longer needed if `cancelled`, which is called from time to
        time, returns true."""
        self.steps, self._at_once = steps, steps == 0
        self._cancelled = cancelled
        self._changed = threading.Condition()
        self.taken, self._last = 0, 0.0  # steps, and the time of the last one
        self._timed, self._training = 0, 0.0  # steps without a pause before them, and their total duration
        self.finished, self._seconds = 0, 0.0  # finished blocks, and their total duration
        self._is_needed = True

    def step(self) -> None:
        """Record that training has taken a step."""
        with self._changed:
            now = time.monotonic()
            if self.taken and now - self._last < self._pause:
                self._timed, self._training = self._timed + 1, self._training + now - self._last
            self.taken, self._last = self.taken + 1, now
            self._changed.notify_all()

    def hurry(self) -> None:
        """Stop pacing, because training waits for the result: no block waits any longer."""
        with self._changed:
            self._at_once = True
            self._changed.notify_all()

    def cancel(self) -> None:
        """End the work, because its result is no longer needed."""
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
        start = time.monotonic()
        yield
        with self._changed:
            self.finished, self._seconds = self.finished + 1, self._seconds + time.monotonic() - start

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
        if self._at_once or block * self.steps <= _SPEED * self.taken * blocks:
            return False
        if not self._timed or not self.finished:  # the speeds are not known; the first step may compile
            return False
        if time.monotonic() - self._last >= self._pause:
            return False
        training = (self.steps - self.taken) * self._step_seconds
        work = (blocks - block) * self._seconds / self.finished / workers
        return training >= _MARGIN * work

    @property
    def _step_seconds(self) -> float:
        """How long a step takes, on average."""
        return self._training / max(self._timed, 1)

    @property
    def _pause(self) -> float:
        """How long training takes no step if it pauses, for a validation for example, or has ended without
        cancelling the work."""
        return max(_PAUSE, _MARGIN * self._step_seconds)


# Yields the new rows of a corpus a block at a time, each when the throttle allows it.
Rewrite = Callable[[EncodedCorpus, Key, Throttle], Blocks]


def replace_rows(corpus: EncodedCorpus, blocks: Blocks, folder: Path, throttle: Throttle) -> EncodedCorpus:
    """A corpus with the rows of `blocks` in place of its own, in the same order. Further rows are added to
    it. The ids are written to temporary files in `folder`.

    Raises StorageError if they cannot be written; CancelledError if they are no longer needed.
    """
    lengths = [np.empty((2, 0), np.int32)]
    files = TemporaryStream(folder), TemporaryStream(folder)
    with closing(blocks):
        for block in blocks:
            throttle.require_needed()
            lengths.append(np.stack([side.lengths for side in block], dtype=np.int32))
            for file, side in zip(files, block, strict=True):
                file.write(side.ids.astype(corpus.id_type).tobytes())
    of_sides = zip(files, np.concatenate(lengths, axis=1), strict=True)
    source, target = (Rows(file.as_array(corpus.id_type), of_side) for file, of_side in of_sides)
    return corpus.with_rows((source, target))


def make_generator(*parts: object) -> random.Random:
    """Random numbers that depend on some values."""
    return random.Random(" ".join(map(str, parts)))
