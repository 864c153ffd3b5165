"""The training pairs of a data folder, which are opened a window at a time.

An epoch is a sequence of windows, each of a few whole buckets of all shards (`mtrain.data.shards`). Memory
therefore depends on the size of a window, and not on the size of the corpus.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mtrain.config.corpora import Corpus
from mtrain.data.encoded import EncodedCorpus
from mtrain.data.rewrite import Cancelled, Key, Rewrite
from mtrain.data.shards import Shard
from mtrain.data.suspects import add_suspect
from mtrain.errors import DataError, ModelError


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
        windows, size, start = [], 1, 0
        while start < self.buckets:
            windows.append(sorted(order[start : start + size]))
            start, size = start + size, min(2 * size, self.largest)
        return windows


ONE_WINDOW = WindowLayout(1, 1)


class WindowedCorpus:
    """The pairs of some shards."""

    def __init__(
        self,
        shards: Sequence[Shard],
        corpora: Sequence[Corpus],
        window_pairs: int,
        seed: int,
        run_dir: Path,
        verified: Iterable[int] = (),
        rewrites: Sequence[Rewrite] = (),
    ):
        """`verified` are the buckets that have just been compared with their hashes. Damaged shards are
        recorded in `run_dir`. The `rewrites` change the rows of each window, one after the other."""
        self._run_dir = run_dir
        self._shards, self._corpora, self._seed = shards, corpora, seed
        self._verified, self._rewrites = set(verified), rewrites
        self._pairs = sum(shard.info.kept for shard in shards)
        # Including repetitions by the weights of corpora.
        self._epoch_pairs = sum(shard.info.kept * corpora[shard.info.corpus].weight for shard in shards)
        counts = np.zeros(len(shards[0].buckets) - 1, np.int64)  # rows of each bucket
        for shard in shards:
            counts += np.diff(shard.buckets[:, 0])
        self._buckets = np.flatnonzero(counts).tolist()  # small corpora may have empty ones
        self.layout = WindowLayout.of(self._pairs, len(self._buckets), window_pairs)
        self._whole: EncodedCorpus | None = None  # if it is one window

    def __len__(self) -> int:
        return self._pairs

    def windows(self, epoch: int) -> list[list[int]]:
        """The buckets of each window of an epoch."""
        if self.layout == ONE_WINDOW:
            return [self._buckets]
        return [[self._buckets[i] for i in window] for window in self.layout.windows(self._seed, epoch)]

    def key(self, epoch: int, window: int) -> Key:
        """What the random choices of a window depend on, in addition to the seed."""
        return (epoch,) if self.layout == ONE_WINDOW else (epoch, window)

    def encoded(self, epoch: int = 0, window: int = 0) -> EncodedCorpus:
        """The pairs of a window (from 0) as they were encoded. Raises DataError if they are damaged."""
        if self._whole is not None:
            return self._whole
        buckets = self.windows(epoch)[window]
        self._verify(buckets)
        corpus = EncodedCorpus.open(self._shards, self._corpora, buckets)
        if self.layout == ONE_WINDOW:
            self._whole = corpus
        return corpus

    def open(self, epoch: int, window: int = 0, cancelled: Cancelled = lambda: False) -> EncodedCorpus:
        """Like `encoded`, but rewritten for this epoch. Raises also what the rewrites raise."""
        corpus = self.encoded(epoch, window)
        for rewrite in self._rewrites:
            corpus = rewrite(corpus, self.key(epoch, window), cancelled)
        return corpus

    @property
    def has_fixed_lengths(self) -> bool:
        """Whether the pairs of each epoch are as long as those of `encoded()`."""
        return self.layout == ONE_WINDOW and not self._rewrites

    def share_of_epoch(self, window: EncodedCorpus) -> float:
        """The share of an epoch's pairs that a window has, on average. It is 1 if it is the only window."""
        return 1.0 if self.layout == ONE_WINDOW else window.expected_pairs / self._epoch_pairs

    def _verify(self, buckets: Sequence[int]) -> None:
        """Compare the rows of some buckets with their hashes, unless that has just been done. This reads them
        one after another, which is faster than in the order of training, and they stay in memory meanwhile.
        Raises DataError if they are damaged."""
        unverified = [bucket for bucket in buckets if bucket not in self._verified]
        for index, shard in enumerate(self._shards):
            try:
                shard.verify_rows(unverified)
            except ModelError as error:
                is_recorded = add_suspect(self._run_dir, index)
                cure = "run again to encode this shard again" if is_recorded else "restore it"
                raise DataError(f"{error}; {cure}") from None
        self._verified.difference_update(buckets)
