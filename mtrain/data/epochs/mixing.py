"""Mixes the training corpora as the stages of training (`data.stages`) say.

Each corpus is an endless stream: all its pairs in a random order, over and over. A window takes the next
pairs of each stream, in proportion to the shares of the stage. An epoch takes each pair of the stage's
reference corpus exactly once. The streams of the other corpora continue where the previous epoch stopped, so
the numbers of times that two pairs of a corpus have occurred differ by at most one, in a stage and in the
whole run. An epoch that `max_steps` cuts short is an exception: the rest of its pairs is left out.

The buckets of a corpus are in a random order, and so are the pairs of each bucket. Consecutive
pairs of a stream are therefore in a few buckets, and the others need not be read. Each pass has the same
order, which matters little, because batches are formed from whole windows.
"""

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import pairwise
from math import ceil, floor
from typing import NamedTuple

import numpy as np

from mtrain.config.sections.data import DataConfig
from mtrain.config.sections.stages import Stage
from mtrain.data.epochs.schedule import StageStarts, WindowLayout
from mtrain.data.store.shards import Shard, StoredRows
from mtrain.data.text.hashes import Hashes, hash_numbers
from mtrain.errors import DataError
from mtrain.tokenizer.rows import Ids, Indices

_LAST_HASH = np.uint64(2**64 - 1)
Verify = Callable[[int, Sequence[int]], None]  # with the index of a shard and the buckets to read from it


def weights_by_size(sizes: Sequence[int], temperature: float) -> list[float]:
    """How often each pair of some corpora occurs, so that the share of a corpus is in proportion to its size
    to the power of 1 / `temperature` (Arivazhagan et al., "Massively Multilingual Neural Machine Translation
    in the Wild", 2019, section 3.1). The number of all pairs stays the same. An empty corpus has the weight
    1."""
    powers = [size ** (1 / temperature) if size else 0.0 for size in sizes]
    unit = sum(sizes) / max(sum(powers), 1.0)
    return [unit * power / size if size else 1.0 for size, power in zip(sizes, powers, strict=True)]


class Mixture(NamedTuple):
    """What an epoch of a stage consists of."""

    pairs: dict[int, Fraction]  # the pairs of each corpus, on average, by the index of the corpus
    layout: WindowLayout

    @property
    def epoch_pairs(self) -> Fraction:
        """All pairs of an epoch, on average."""
        return sum(self.pairs.values(), Fraction(0))

    def taken(self, corpus: int, epochs: Fraction | int) -> int:
        """How many pairs of a corpus the first epochs of the stage take."""
        return floor(self.pairs.get(corpus, 0) * epochs)


class ChosenRows(NamedTuple):
    """Rows of a shard, and how often each of them occurs in a window."""

    shard: int
    rows: StoredRows
    counts: Indices


class Mixer:
    """Chooses the pairs of each window of a run with stages."""

    def __init__(self, data: DataConfig, shards: Sequence[Shard], seed: int):
        """Raises DataError if no pair is left of a corpus that has a share in a stage."""
        assert data.stages is not None
        self._shards, self._seed = shards, seed
        self._names, self._stages = data.names, data.stages
        corpora = range(len(data.train))
        self._of_corpus = [[i for i, s in enumerate(shards) if s.info.corpus == corpus] for corpus in corpora]
        # Of each corpus, the number of pairs in each bucket.
        self._sizes = [np.zeros(len(shards[0].buckets) - 1, np.int64) for _ in corpora]
        for shard in shards:
            self._sizes[shard.info.corpus] += np.diff(shard.buckets[:, 0])
        numbered = enumerate(data.stages, start=1)
        self.mixtures = [self._mix(number, stage, data.window_pairs) for number, stage in numbered]

    def _mix(self, number: int, stage: Stage, window_pairs: int) -> Mixture:
        sizes = {name: int(size.sum()) for name, size in zip(self._names, self._sizes, strict=True)}
        if empty := [name for name in stage.shares if not sizes[name]]:
            cure = f"remove its share from stage {number}"
            raise DataError(f"{empty[0]}: this corpus has no usable pair; {cure}")
        counted = stage.counted(self._names)
        unit = sizes[counted] / Fraction(str(stage.shares[counted]))
        mixed = [(i, name) for i, name in enumerate(self._names) if name in stage.shares]
        pairs = {i: unit * Fraction(str(stage.shares[name])) for i, name in mixed}
        total = ceil(sum(pairs.values()))
        buckets = ceil(len(self._sizes[0]) * total / sum(sizes.values()))  # as large as in the corpora
        return Mixture(pairs, WindowLayout.of(total, buckets, window_pairs))

    def mixture(self, starts: StageStarts) -> Mixture:
        """The mixture of the current stage."""
        return self.mixtures[len(starts) - 1]

    def describe(self, starts: StageStarts) -> str:
        """The current stage, and the pairs of each corpus in an epoch of it."""
        mixture = self.mixture(starts)
        shares = ", ".join(
            f"{self._names[corpus]} {float(pairs / mixture.epoch_pairs):.1%} ({round(pairs):,} pairs)"
            for corpus, pairs in mixture.pairs.items()
        )
        return f"stage {len(starts)} of {len(self.mixtures)}: an epoch has {shares}"

    def mean_weights(self, max_epochs: int | None) -> list[float]:
        """How often the pairs of each corpus occur in an epoch, on average over a run of `max_epochs` epochs.
        A stage without a known number of epochs counts as one epoch."""
        left, total = max_epochs, 0
        taken = [Fraction(0)] * len(self._names)
        for stage, mixture in zip(self._stages, self.mixtures, strict=True):
            is_last = mixture is self.mixtures[-1]
            epochs = (left if is_last else stage.max_epochs) or 1
            epochs = epochs if left is None else min(epochs, left)
            for corpus, pairs in mixture.pairs.items():
                taken[corpus] += epochs * pairs
            total, left = total + epochs, None if left is None else left - epochs
            if left == 0:
                break
        sizes = [max(1, int(size.sum())) for size in self._sizes]
        return [float(pairs / total / size) for pairs, size in zip(taken, sizes, strict=True)]

    def choose(self, starts: StageStarts, epoch: int, window: int, verify: Verify) -> Iterator[ChosenRows]:
        """The rows of a window. `verify` is called before rows are read; its exceptions propagate."""
        mixture = self.mixture(starts)
        edges = mixture.layout.edges()[window : window + 2]
        # Of the stage, before and after the window.
        epochs = [epoch - starts[-1] + Fraction(edge, mixture.layout.buckets) for edge in edges]
        for corpus in mixture.pairs:
            earlier = zip(self.mixtures, pairwise(starts), strict=False)
            before = sum(stage.taken(corpus, stop - start) for stage, (start, stop) in earlier)
            first, last = (before + mixture.taken(corpus, each) for each in epochs)
            yield from self._take(corpus, first, last, verify)

    def _take(self, corpus: int, first: int, last: int, verify: Verify) -> Iterator[ChosenRows]:
        """The rows of a part of the stream of a corpus."""
        sizes = self._sizes[corpus]
        whole, parts = _divide(first, last, int(sizes.sum()))
        ranges = [self._ranges(corpus, *part) for part in parts]
        needed = {bucket for part in ranges for bucket in part}
        buckets = np.flatnonzero(sizes).tolist() if whole else sorted(needed)
        for index in self._of_corpus[corpus]:
            verify(index, buckets)
        bounds = [self._bounds(corpus, chosen) for chosen in ranges]
        for index in self._of_corpus[corpus]:
            shard = self._shards[index]
            rows = shard.rows(buckets)
            owners = np.searchsorted(shard.buckets[:, 0], rows.positions, side="right") - 1  # buckets of rows
            hashes = self._hashes(index, rows.positions)
            counts = np.full(len(owners), whole, np.int64)
            for lowest, highest in bounds:
                counts += (lowest[owners] <= hashes) & (hashes <= highest[owners])
            if len(chosen := np.flatnonzero(counts)):
                yield ChosenRows(index, rows.take(chosen), counts[chosen])

    def _ranges(self, corpus: int, start: int, stop: int) -> dict[int, tuple[int, int]]:
        """The buckets with the pairs from `start` to `stop` of a corpus, and which of their pairs these are.
        All are positions in the order of the stream."""
        sizes = self._sizes[corpus]
        sequence = np.random.SeedSequence([self._seed, corpus], spawn_key=(1,))
        order = np.random.default_rng(sequence).permutation(np.flatnonzero(sizes))
        stops = np.cumsum(sizes[order])
        starts = stops - sizes[order]
        firsts, lasts = np.maximum(start, starts) - starts, np.minimum(stop, stops) - starts
        ranges = zip(order.tolist(), firsts.tolist(), lasts.tolist(), strict=True)
        return {bucket: (first, last) for bucket, first, last in ranges if first < last}

    def _bounds(self, corpus: int, ranges: dict[int, tuple[int, int]]) -> tuple[Hashes, Hashes]:
        """The lowest and the highest hash of the pairs that are chosen from each bucket. The pairs of a
        bucket are in the order of their hashes, which are all different."""
        sizes = self._sizes[corpus]
        lowest, highest = np.full(len(sizes), _LAST_HASH), np.zeros(len(sizes), np.uint64)  # of no pair
        for bucket, (first, last) in ranges.items():
            if last - first == sizes[bucket]:
                lowest[bucket], highest[bucket] = 0, _LAST_HASH
                continue
            edges = [(i, self._shards[i].buckets[bucket : bucket + 2, 0]) for i in self._of_corpus[corpus]]
            hashes = np.concatenate([self._hashes(i, np.arange(*edge)) for i, edge in edges])
            hashes.sort()
            lowest[bucket], highest[bucket] = hashes[first], hashes[last - 1]
        return lowest, highest

    def _hashes(self, index: int, rows: Ids) -> Hashes:
        """The hashes of some rows of a shard, by which they are ordered in the stream."""
        shard = self._shards[index]
        return hash_numbers(shard.numbers(rows), f"{self._seed} {shard.info.corpus} order")


def _divide(first: int, last: int, size: int) -> tuple[int, list[tuple[int, int]]]:
    """Divide the positions from `first` to `last` of a stream into complete passes over the `size` pairs of
    a corpus, and the ranges of the incomplete passes before and after them. Returns the number of complete
    passes and these ranges."""
    begin, end = -(-first // size), last // size
    if begin > end:  # it is a part of them
        parts = [(first - end * size, last - end * size)]
    else:
        parts = [(first - (begin - 1) * size, size), (0, last - end * size)]
    return max(0, end - begin), [(start, stop) for start, stop in parts if start < stop]
