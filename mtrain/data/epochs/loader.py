"""Loads the training batches: plans a window while the previous one is used, and makes batches a few steps
ahead."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from itertools import chain
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from mtrain.data.epochs.batching import collate
from mtrain.data.epochs.packed_batch import AnyBatch, ChooseLayout, Layout, PackedBatch, batch_type, pack
from mtrain.data.epochs.schedule import Position
from mtrain.data.epochs.windows import Opened, Window, WindowPlanner
from mtrain.data.rewriting.rewrite import never, raise_if_cancelled
from mtrain.data.store.shards import EncodedCorpus
from mtrain.duration import format_duration
from mtrain.tokenizer.rows import Indices, Rows
from mtrain.tokenizer.tokenizer import Tokenizer

log = logging.getLogger(__name__)

AHEAD = 3  # steps whose batches are made in advance
_POLL = 0.2  # seconds between looks at a signal while waiting
_LONG = 1.0  # seconds; a longer wait is logged
Waited = TypeVar("Waited")


class StepInput(NamedTuple):
    """The input of one optimizer step."""

    epoch: int  # from 1
    tokens: int  # target tokens of all batches, of all ranks
    batches: list[AnyBatch]  # the micro-batches of this rank
    locate: Callable[[], list[str]]  # returns where its pairs come from, as `file:line`
    next: Position  # of the next step, to resume from
    stage: int | None = None  # from 1; None without stages


class Loader:
    """Makes the training batches of planned windows, for `device`; for `layout_for` see `make_batch`. A rank
    without pairs has a batch without pairs."""

    def __init__(
        self, planner: WindowPlanner, tokenizer: Tokenizer, device: torch.device, layout_for: ChooseLayout
    ):
        self.planner, self.device = planner, device
        self.tokenizer, self.layout_for = tokenizer, layout_for

    def steps(
        self, start: Position | None = None, cancelled: Callable[[], bool] = never
    ) -> Generator[StepInput, None, None]:
        """Yield steps without end, from the first one or `start` on. While a window is used, the next one is
        opened in the background.

        Raises DataError if an epoch has no pairs or a window is damaged, CancelledError if `cancelled`
        returns true while a step is waited for.
        """
        planner = self.planner
        # The next steps and, with the last one of a window, the window that follows.
        pending: deque[tuple[Future[StepInput], Future[Opened] | None]] = deque()
        ended = threading.Event()

        def following_step() -> StepInput:
            making, opening = pending.popleft()
            step = _wait(making, cancelled)
            return step if opening is None else step._replace(next=_wait_for_window(opening, cancelled)[0])

        with ThreadPoolExecutor(1, "windows") as background, ThreadPoolExecutor(1, "loader") as pool:
            try:
                position, window = planner.find(start or Position(), cancelled)
                while True:
                    taken = planner.schedule.steps_to_take(position, len(window.plan.steps))
                    after, opening = planner.after(position, taken), None
                    if planner.is_trained_on(after):
                        opening = background.submit(planner.find, after, ended.is_set)
                    for done in range(1, taken + 1):
                        is_last = done == taken
                        following = after if is_last else position.after(done)
                        making = pool.submit(self._make, window, position.after(done - 1), following)
                        # The next window may be empty; then training continues with the one after it.
                        pending.append((making, opening if is_last and window.share < 1 else None))
                        if len(pending) > AHEAD:
                            yield following_step()
                    # If the next window is ready, its batches are made before the last ones are used.
                    while pending and not (opening and opening.done() and not opening.exception()):
                        yield following_step()
                    if opening is None:
                        position, window = planner.find(after, cancelled)
                    else:
                        position, window = _wait_for_window(opening, cancelled)
            finally:
                ended.set()  # nobody needs the next window

    def _make(self, window: Window, position: Position, following: Position) -> StepInput:
        plan = window.plan
        batches = [self.batch(rows, window.corpus) for rows in plan.steps[position.step] if len(rows)]
        batches = batches or [batch_type(self.device).without_pairs()]
        locate = partial(window.corpus.locate, [row for batch in batches for row in batch.rows])
        stage = len(position.starts) if self.planner.schedule.stages else None
        tokens = plan.step_tokens[position.step]
        return StepInput(position.epoch + 1, tokens, batches, locate, following, stage)

    def batch(self, rows: Indices, corpus: EncodedCorpus) -> AnyBatch:
        """The tensors of some rows of a window, pinned if the device is a GPU. They are moved to the device
        later, so that it holds one micro-batch at a time."""
        special = self.tokenizer.special
        sides = corpus.fetch(rows)
        batch = make_batch(self.device, *sides, special.pad, special.bos, rows.tolist(), self.layout_for)
        self._require_known_ids(batch)
        return batch.pinned() if isinstance(batch, PackedBatch) else batch

    def _require_known_ids(self, batch: AnyBatch) -> None:
        """Raise DataError if a batch has ids that are not in the vocabulary because a shard has been
        overwritten since it was verified."""
        sizes = self.tokenizer.source_vocab_size, self.tokenizer.target_vocab_size
        inputs = batch.inputs()
        for ids, size in zip((inputs.source, inputs.target_in), sizes, strict=True):
            if ids.min() < 0 or ids.max() >= size:
                self.planner.corpus.require_undamaged()


def make_batch(
    device: torch.device,
    source: Rows,
    target: Rows,
    pad_id: int,
    bos_id: int,
    rows: list[int],
    layout_for: ChooseLayout = lambda exact: None,
) -> AnyBatch:
    """A batch on the host, of the kind that suits a device, of encoded pairs. Each side ends in EOS. A packed
    batch has the layout that `layout_for` returns for the exact one, if any."""
    if batch_type(device) is PackedBatch:
        return pack(source, target, bos_id, rows, layout_for(Layout.of(source.lengths, target.lengths)))
    return collate(source, target, pad_id, bos_id, rows)


def layouts_of(window: Window) -> Iterator[Layout]:
    """Yield the exact layouts of the micro-batches of a window, if they are packed."""
    for rows in chain.from_iterable(window.plan.steps):
        yield Layout.of(window.corpus.source_lengths[rows], window.corpus.target_lengths[rows])


def largest_batches(loader: Loader, window: Window) -> list[AnyBatch]:
    """The batches of a window that need the most memory: the one with the most tokens (with padding, if any),
    and the one with the largest attention matrices, unless that is the same. If there are other windows or
    stages, the second is a batch of the longest possible pairs, which they may contain."""
    corpus, planner = window.corpus, loader.planner
    micro_batches = [rows for step in window.plan.steps for rows in step if len(rows)]
    if not micro_batches:  # the other ranks have all pairs of the window
        return []
    pairs = np.array([len(rows) for rows in micro_batches])
    sources = np.array([corpus.source_lengths[rows].max() for rows in micro_batches], np.int64)
    targets = np.array([corpus.target_lengths[rows].max() for rows in micro_batches], np.int64)
    tokens = pairs * (sources + targets)
    if batch_type(loader.device) is PackedBatch:
        tokens = np.array([each.source + each.target for each in layouts_of(window) if each.sequences])
    most_tokens = int(tokens.argmax())
    if window.share < 1 or len(planner.schedule.stages) > 1:
        budget, length = planner.division.micro_batch_tokens, planner.config.longest_sequence
        longest_pairs = batch_type(loader.device).of_size(max(1, budget // length), length)
        if longest_pairs.positions >= 2 * budget:  # no batch has more tokens
            return [longest_pairs]
        return [loader.batch(micro_batches[most_tokens], corpus), longest_pairs]
    largest_attention = int((pairs * np.maximum(sources, targets) ** 2).argmax())
    chosen = dict.fromkeys((most_tokens, largest_attention))
    return [loader.batch(micro_batches[i], corpus) for i in chosen]


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
        raise_if_cancelled(cancelled)
    return future.result()
