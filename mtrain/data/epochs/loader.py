"""Loads the training batches: plans a window while the previous one is used, and makes batches a few steps
ahead."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from typing import NamedTuple, TypeVar

import torch

from mtrain.config.schema import Config
from mtrain.data.epochs.batch import Batch, collate
from mtrain.data.epochs.batching import BatchPlan, Rows, plan_batches
from mtrain.data.epochs.mixing import FIRST_STAGE, Starts
from mtrain.data.epochs.position import START, Position, StageEnds
from mtrain.data.epochs.windows import WindowedCorpus
from mtrain.data.rewriting.throttle import Throttle, never
from mtrain.data.store.encoded import EncodedCorpus
from mtrain.duration import format_duration
from mtrain.errors import DataError
from mtrain.tokenizer.tokenizer import Tokenizer

log = logging.getLogger(__name__)

AHEAD = 3  # steps whose batches are made in advance


class Step(NamedTuple):
    """The input of one optimizer step."""

    epoch: int  # from 1
    tokens: int  # target tokens of all batches, of all ranks
    batches: list[Batch]  # the micro-batches of this rank
    locate: Callable[[], list[str]]  # returns where its pairs come from, as `file:line`
    next: Position  # of the next step, to resume from
    stage: int | None = None  # from 1; None without stages


class Window(NamedTuple):
    """A part of an epoch that is planned at once."""

    corpus: EncodedCorpus
    plan: BatchPlan
    share: float  # of the pairs of the epoch that it has; 1.0 if it is the whole epoch

    @property
    def steps_in_epoch(self) -> int:
        """The number of steps in an epoch; an estimate if it has several windows."""
        return round(len(self.plan.steps) / self.share)


Opened = tuple[Position, Window]  # a window, and where it starts
Waited = TypeVar("Waited")
_POLL = 0.2  # seconds between looks at a signal while waiting
_LONG = 1.0  # seconds; a longer wait is logged


def require_pairs(plan: BatchPlan, epoch: int) -> None:
    """Raise DataError if the plan of an epoch (from 0) has no pairs."""
    if not plan.steps:
        raise DataError(f"epoch {epoch + 1} has no training pairs; raise the weights of data.train")


class Loader:
    """The training batches of a corpus, for `device` and, if there are several ranks, for one of them. The
    number of micro-batches in a step is a multiple of `workers`, unless the step has too few pairs; a rank
    without pairs has a batch without pairs."""

    def __init__(
        self,
        corpus: WindowedCorpus,
        config: Config,
        tokenizer: Tokenizer,
        device: torch.device,
        micro_batch_tokens: int,
        workers: int = 1,
        rank: int = 0,
        world_size: int = 1,
    ):
        self.corpus, self.config, self.tokenizer, self.device = corpus, config, tokenizer, device
        self.micro_batch_tokens, self.workers = micro_batch_tokens, workers
        self.rank, self.world_size = rank, world_size
        self._stages = StageEnds(config.data.stages or ())
        self._opened: dict[tuple[int, int, Starts], Window] = {}
        self._opening = threading.Lock()

    def open(
        self, epoch: int, window: int = 0, throttle: Throttle | None = None, starts: Starts = FIRST_STAGE
    ) -> Window:
        """Open and plan a window (both from 0). If the weights of its pairs are low, it may have no steps.
        The latest window with steps is cached.

        Raises DataError if it is damaged, and what rewriting its rows raises.
        """
        with self._opening:
            if (epoch, window, starts) in self._opened:
                return self._opened[epoch, window, starts]
            corpus, recipe = self.corpus.open(epoch, window, throttle, starts), self.config.training
            lengths = (corpus.source_lengths, corpus.target_lengths)
            sizes = (recipe.batch_tokens, self.micro_batch_tokens)
            key = (self.config.seed, *self.corpus.key(epoch, window, starts))
            ranks = (self.rank, self.world_size)
            plan = plan_batches(lengths, *sizes, key, *ranks, corpus.weights, self.workers)
            opened = Window(corpus, plan, self.corpus.share_of_epoch(corpus, starts))
            if plan.steps:
                self._opened = {(epoch, window, starts): opened}
            return opened

    def find(self, position: Position, throttle: Throttle | None = None) -> Opened:
        """The first window with steps from a position on, and the position of its first step.

        Raises DataError if a whole epoch has no pairs, and what `open` raises.
        """
        position = self._stages.in_stage(position)
        epoch_is_empty = position.window == 0  # as far as is known

        def open_at(at: Position) -> Window:
            return self.open(at.epoch, at.window, throttle, at.starts)

        while not (window := open_at(position)).plan.steps:
            following = self._after(position)
            if following.epoch > position.epoch:
                if epoch_is_empty:
                    require_pairs(window.plan, position.epoch)
                epoch_is_empty = True
            position = following
        return position, window

    def steps_in_epoch(self, stage: int = 0) -> int:
        """The number of steps in the first epoch of a stage (from 0), if each stage before it has one epoch.
        It is an estimate if the epoch has several windows. Raises what `find` raises."""
        return self.find(Position(epoch=stage, starts=tuple(range(stage + 1))))[1].steps_in_epoch

    def steps(
        self, start: Position = START, cancelled: Callable[[], bool] = never
    ) -> Generator[Step, None, None]:
        """Yield steps without end. While a window is used, the next one is opened in the background.

        Raises what `find` raises; CancelledError if `cancelled` returns true while a step is waited for.
        """
        # The next steps and, with the last one of a window, the window that follows.
        pending: deque[tuple[Future[Step], Future[Opened] | None]] = deque()
        throttle = Throttle(cancelled=cancelled)  # training waits for the first window

        def following_step() -> Step:
            making, opening = pending.popleft()
            step = _wait(making, cancelled)
            return step if opening is None else step._replace(next=_wait_for_window(opening, cancelled)[0])

        with ThreadPoolExecutor(1, "windows") as background, ThreadPoolExecutor(1, "loader") as pool:
            try:
                position, window = self.find(start, throttle)
                while True:
                    taken = self._stages.steps_to_take(position, len(window.plan.steps))
                    throttle = Throttle(taken)
                    after, opening = self._after(position, taken), None
                    if self._is_trained_on(after):
                        opening = background.submit(self.find, after, throttle)
                    for done in range(1, taken + 1):
                        following = after
                        if done < taken:
                            following = position.after(done)
                        index, is_last = position.step + done - 1, done == taken
                        making = pool.submit(self._make, window, position, index, following)
                        # The next window may be empty; then training continues with the one after it.
                        pending.append((making, opening if is_last and window.share < 1 else None))
                        if len(pending) > AHEAD:
                            yield following_step()
                            throttle.step()
                    throttle.hurry()
                    # If the next window is ready, its batches are made before the last ones are used.
                    while pending and not (opening and opening.done() and not opening.exception()):
                        yield following_step()
                    if opening is None:
                        position, window = self.find(after, Throttle(cancelled=cancelled))
                    else:
                        position, window = _wait_for_window(opening, cancelled)
            finally:
                throttle.cancel()

    def _after(self, position: Position, taken: int = 0) -> Position:
        """The start of the window that follows the one at a position, after `taken` steps there."""
        return self._stages.after(position, taken, self.corpus.count_windows(position.starts))

    def _is_trained_on(self, position: Position) -> bool:
        """Whether training continues at the start of a window."""
        last = self.config.training.max_epochs
        return last is None or position.epoch < last

    def _make(self, window: Window, position: Position, index: int, following: Position) -> Step:
        batches = [self.batch(rows, window.corpus) for rows in window.plan.steps[index] if len(rows)]
        batches = batches or [Batch.without_pairs()]

        def locate() -> list[str]:
            return window.corpus.locate([row for batch in batches for row in batch.rows])

        stage = None if self.config.data.stages is None else len(position.starts)
        return Step(position.epoch + 1, window.plan.step_tokens[index], batches, locate, following, stage)

    def batch(self, rows: Rows, corpus: EncodedCorpus) -> Batch:
        """The tensors of some rows of a window, pinned if the device is a GPU. They are moved to the device
        later, so that it holds one micro-batch at a time."""
        indices: list[int] = rows.tolist()
        special = self.tokenizer.special
        batch = collate(*corpus.fetch(indices), special.pad, special.bos, indices)
        self._require_known_ids(batch)
        return batch.pinned() if self.device.type == "cuda" else batch

    def _require_known_ids(self, batch: Batch) -> None:
        """Raise DataError if a batch has ids that are not in the vocabulary because a shard has been
        overwritten since it was verified."""
        sizes = self.tokenizer.source_vocab_size, self.tokenizer.target_vocab_size
        for ids, size in zip((batch.source, batch.target_in), sizes, strict=True):
            if ids.min() < 0 or ids.max() >= size:
                self.corpus.require_undamaged()

    def largest(self, window: Window) -> list[Batch]:
        """The batches that need the most memory: the one with the most padded tokens, and the one with the
        largest attention matrices, unless that is the same. The former is from this window. So is the latter,
        unless there are other windows or stages: then it is a batch of the longest possible pairs, which
        these may contain."""
        corpus, plan = window.corpus, window.plan
        micro_batches = [rows for step in plan.steps for rows in step if len(rows)]
        if not micro_batches:  # the other ranks have all pairs of the window
            return []
        several = window.share < 1 or len(self.config.data.stages or ()) > 1
        length, budget = self.config.longest_sequence, self.micro_batch_tokens
        longest_pairs = [Batch.of_size(max(1, budget // length), length)] if several else []
        if several and longest_pairs[0].source.numel() >= budget:  # no batch has more tokens
            return longest_pairs
        sizes = [
            (len(rows), int(corpus.source_lengths[rows].max()), int(corpus.target_lengths[rows].max()))
            for rows in micro_batches
        ]
        linear = max(range(len(micro_batches)), key=lambda i: sizes[i][0] * (sizes[i][1] + sizes[i][2]))
        if several:
            return [self.batch(micro_batches[linear], corpus), *longest_pairs]
        square = max(range(len(micro_batches)), key=lambda i: sizes[i][0] * max(sizes[i][1:]) ** 2)
        return [self.batch(micro_batches[i], corpus) for i in dict.fromkeys((linear, square))]


def _wait_for_window(opening: Future[Opened], cancelled: Callable[[], bool]) -> Opened:
    start = time.monotonic()
    opened = _wait(opening, cancelled)
    if (seconds := time.monotonic() - start) > _LONG:
        waited = format_duration(seconds)
        log.warning("data: the next window was not ready in time; training waited %s for it", waited)
    return opened


def _wait(future: Future[Waited], cancelled: Callable[[], bool]) -> Waited:
    """The result of a future. Raises CancelledError if `cancelled` returns true before it is known."""
    while not wait([future], _POLL).done:
        if cancelled():
            raise CancelledError
    return future.result()
