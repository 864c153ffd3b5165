"""The training pairs of a data folder, which are opened a window at a time, and the plan of each window.

An epoch is a sequence of windows. Without stages of training, each consists of a few whole buckets of all
shards (`mtrain.data.store.shards`); with stages, `mtrain.data.epochs.mixing` chooses its pairs.
Memory therefore depends on the size of a window, and not on the size of the corpus.
"""

import copy
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

from mtrain.config.schema import Config
from mtrain.config.sections.corpora import Corpus
from mtrain.config.sections.data import DataConfig
from mtrain.data.epochs.batching import BatchPlan, Division, plan_batches
from mtrain.data.epochs.mixing import ChosenRows, Mixer, weights_by_size
from mtrain.data.epochs.schedule import FIRST_STAGE, Position, StageSchedule, StageStarts, WindowLayout
from mtrain.data.rewriting.rewrite import Key, Rewrite, never, replace_rows
from mtrain.data.store.damaged import report_damage
from mtrain.data.store.shards import EncodedCorpus, Shard
from mtrain.errors import DataError, ModelError


class WindowedCorpus:
    """The pairs of some shards."""

    def __init__(
        self,
        shards: Sequence[Shard],
        data: DataConfig,
        seed: int,
        run_dir: Path,
        verified: Iterable[int] = (),
        rewrites: Sequence[Rewrite] = (),
    ):
        """`verified` are the buckets that have just been compared with their hashes. Damaged shards are
        recorded in `run_dir`, and temporary files are written there. The `rewrites` change the rows of each
        window, one after the other. Raises DataError if a corpus with a share in a stage has no pairs."""
        self._shards, self._seed = shards, seed
        self._run_dir, self._rewrites = run_dir, rewrites
        self._corpora = _weighted(data, shards)
        self._verified = [set(verified) for _ in shards]
        self._pairs = sum(shard.info.kept for shard in shards)
        # Including repetitions by the weights of corpora.
        self._epoch_pairs = sum(shard.info.kept * self._corpora[shard.info.corpus].weight for shard in shards)
        self._noise = 0.0 if data.augment is None else data.augment.noise  # relative to these pairs
        counts = sum(np.diff(shard.buckets[:, 0]) for shard in shards)  # rows of each bucket
        self._buckets = np.flatnonzero(counts).tolist()  # small corpora may have empty ones
        # Without stages of training.
        self._layout = WindowLayout.of(self._pairs, len(self._buckets), data.window_pairs)
        self.mixer = None if data.stages is None else Mixer(data, shards, seed)
        self._whole: EncodedCorpus | None = None  # if it is one window

    def __len__(self) -> int:
        return self._pairs

    @property
    def fits_one_window(self) -> bool:
        """Whether all pairs are in memory at the same time."""
        return len(self._layout.edges()) == 2

    def layout(self, starts: StageStarts = FIRST_STAGE) -> WindowLayout:
        """What determines the windows of an epoch. `starts` are the first epochs of the stages that have
        begun."""
        return self._layout if self.mixer is None else self.mixer.mixture(starts).layout

    def windows(self, epoch: int) -> list[list[int]]:
        """The buckets of each window of an epoch without stages."""
        if self.fits_one_window:
            return [self._buckets]
        return [[self._buckets[i] for i in window] for window in self._layout.windows(self._seed, epoch)]

    def count_windows(self, starts: StageStarts = FIRST_STAGE) -> int:
        """The number of windows of an epoch."""
        return len(self.layout(starts).edges()) - 1

    def key(self, position: Position) -> Key:
        """What the random choices of the window at a position depend on, in addition to the seed."""
        has_several = self.count_windows(position.starts) > 1
        return (position.epoch, position.window) if has_several else (position.epoch,)

    def encoded(self, epoch: int = 0, window: int = 0) -> EncodedCorpus:
        """The pairs of a window (from 0) of an epoch without stages, as they were encoded. Raises DataError
        if they are damaged."""
        if self._whole is not None:
            return self._whole
        buckets = self.windows(epoch)[window]
        for index in range(len(self._shards)):
            self._verify(index, buckets)
        corpus = EncodedCorpus.open(self._shards, self._corpora, buckets)
        if self.fits_one_window:
            self._whole = corpus
            for verified in self._verified:
                verified.update(buckets)
        return corpus

    def open(self, position: Position, cancelled: Callable[[], bool] = never) -> EncodedCorpus:
        """The pairs of the window at a position, rewritten for its epoch. With stages, the weights of the
        pairs are the numbers of times that they occur. Raises DataError if pairs are damaged, CancelledError
        if `cancelled`, which is called from time to time, returns true."""
        corpus = self.encoded(position.epoch, position.window) if self.mixer is None else self._mix(position)
        if self._whole is not None and self.mixer is None:
            self.require_undamaged()  # unless `encoded` has just verified the pairs
        key = self.key(position)
        for rewrite in self._rewrites if len(corpus) else ():
            corpus = replace_rows(corpus, rewrite(corpus, key, cancelled), self._run_dir, cancelled)
        return corpus

    @property
    def has_fixed_lengths(self) -> bool:
        """Whether the pairs of each epoch are as long as the pairs of `encoded()`."""
        return self.fits_one_window and not self._rewrites

    def with_rewrites(self, choose: Callable[[Rewrite], bool]) -> Self:
        """The same pairs, of which only some rewrites change the rows."""
        other = copy.copy(self)
        other._rewrites = list(filter(choose, self._rewrites))
        return other

    def _mix(self, position: Position) -> EncodedCorpus:
        """The pairs of the window at a position in a stage, as they were encoded."""
        assert self.mixer is not None
        chosen = list(self.mixer.choose(position.starts, position.epoch, position.window, self._verify))
        chosen = chosen or [ChosenRows(0, self._shards[0].rows([]), np.zeros(0, np.int64))]
        counts = np.concatenate([part.counts for part in chosen])
        shards = [self._shards[part.shard] for part in chosen]
        weights = counts.astype(np.float64), np.broadcast_to(np.int64(1), len(counts))
        return EncodedCorpus.of_rows(shards, self._corpora, [part.rows for part in chosen], weights)

    def share_of_epoch(self, window: EncodedCorpus, starts: StageStarts = FIRST_STAGE) -> float:
        """The share of an epoch's pairs that a window has, on average. It is 1 if it is the only window."""
        if self.count_windows(starts) == 1:
            return 1.0
        total = self._epoch_pairs if self.mixer is None else self.mixer.mixture(starts).epoch_pairs
        return window.expected_pairs / (float(total) * (1 + self._noise))

    def of_average_epoch(self, max_epochs: int | None) -> tuple[EncodedCorpus, float]:
        """Some pairs, weighted by how often they occur in an epoch, on average over a run of `max_epochs`
        epochs; and their share of the pairs of such an epoch. Raises DataError if pairs are damaged."""
        weights = [corpus.weight for corpus in self._corpora]
        if self.mixer is not None:
            weights = self.mixer.mean_weights(max_epochs)
        of_shards = np.array([weights[shard.info.corpus] for shard in self._shards], np.float64)
        some = self.encoded().weighted(of_shards)
        total = sum(weight * shard.info.kept for weight, shard in zip(of_shards, self._shards, strict=True))
        return some, 1.0 if self.fits_one_window else some.expected_pairs / float(total)

    def require_undamaged(self) -> None:
        """Raise DataError if a shard is damaged."""
        for index in range(len(self._shards)):
            self._verify(index, self._buckets)

    def _verify(self, index: int, buckets: Sequence[int]) -> None:
        """Compare the rows of some buckets of a shard with their hashes, unless that has just been done. This
        reads them one after another, which is faster than in the order of training, and they stay in memory
        meanwhile. Raises DataError if they are damaged."""
        try:
            self._shards[index].verify_rows([b for b in buckets if b not in self._verified[index]])
        except ModelError as error:
            is_recorded = report_damage(self._run_dir)
            cure = "run again to encode this shard again" if is_recorded else "restore it"
            raise DataError(f"{error}; {cure}") from None
        self._verified[index].clear()  # the others may be opened much later


def _weighted(data: DataConfig, shards: Sequence[Shard]) -> list[Corpus]:
    """The training corpora, with weights by their sizes if `data.temperature` is given."""
    if data.temperature is None:
        return data.train
    sizes = [0] * len(data.train)
    for shard in shards:
        sizes[shard.info.corpus] += shard.info.kept
    weighted = zip(data.train, weights_by_size(sizes, data.temperature), strict=True)
    return [corpus.model_copy(update={"weight": weight}) for corpus, weight in weighted]


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


def require_pairs(plan: BatchPlan, epoch: int) -> None:
    """Raise DataError if the plan of an epoch (from 0) has no pairs."""
    if not plan.steps:
        raise DataError(f"epoch {epoch + 1} has no training pairs; raise the weights of data.train")


class WindowPlanner:
    """The windows of a corpus, with the steps that training takes on each of them."""

    def __init__(self, corpus: WindowedCorpus, config: Config, division: Division):
        self.corpus, self.config = corpus, config
        self.division = division
        self.schedule = StageSchedule(config.data.stages or ())
        self._opened: dict[tuple[int, int, StageStarts], Window] = {}
        self._opening = threading.Lock()

    def open(self, position: Position, cancelled: Callable[[], bool] = never) -> Window:
        """Open and plan the window at a position, whatever its step. If the weights of its pairs are low, the
        window may have no steps. The latest window with steps is cached.

        Raises DataError if it is damaged, CancelledError if `cancelled` returns true.
        """
        place = position.epoch, position.window, position.starts
        with self._opening:
            if place in self._opened:
                return self._opened[place]
            corpus = self.corpus.open(position, cancelled)
            lengths = corpus.source_lengths, corpus.target_lengths
            key = self.config.seed, *self.corpus.key(position)
            tokens = self.config.training.batch_tokens
            plan = plan_batches(lengths, tokens, self.division, key, corpus.weights)
            opened = Window(corpus, plan, self.corpus.share_of_epoch(corpus, position.starts))
            if plan.steps:
                self._opened = {place: opened}
            return opened

    def find(self, position: Position, cancelled: Callable[[], bool] = never) -> Opened:
        """The first window with steps from a position on, and the position of its first step.

        Raises DataError if a whole epoch has no pairs or a window is damaged, CancelledError if `cancelled`
        returns true.
        """
        position = self.schedule.in_stage(position)
        epoch_is_empty = position.window == 0  # as far as is known
        while True:
            window = self.open(position, cancelled)
            if window.plan.steps:
                return position, window
            following = self.after(position)
            if following.epoch > position.epoch:
                if epoch_is_empty:
                    require_pairs(window.plan, position.epoch)
                epoch_is_empty = True
            position = following

    def after(self, position: Position, taken: int = 0) -> Position:
        """The start of the window that follows the one at a position, after `taken` steps there."""
        return self.schedule.after(position, taken, self.corpus.count_windows(position.starts))

    def is_trained_on(self, position: Position) -> bool:
        """Whether training continues at the start of a window."""
        last = self.config.training.max_epochs
        return last is None or position.epoch < last

    def steps_in_epoch(self, stage: int = 0) -> int:
        """The number of steps in the first epoch of a stage (from 0), if each stage before it has one epoch.
        It is an estimate if the epoch has several windows. Raises DataError if the epoch has no pairs, or if
        pairs are damaged."""
        return self.find(Position(epoch=stage, starts=tuple(range(stage + 1))))[1].steps_in_epoch
