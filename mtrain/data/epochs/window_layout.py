"""How an epoch is divided into windows."""

from itertools import pairwise
from typing import NamedTuple

import numpy as np


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
