"""Counts repeated items in bounded memory."""

import numpy as np
import numpy.typing as npt

LIMIT = 4_000_000  # distinct keys in memory, of 16 bytes each
_BUFFER = 1_000_000  # keys that are collected before they are counted
_MIX = np.uint64(0x9E3779B97F4A7C15)  # spreads keys that differ in few bits
_SPACE = 2**64


class DuplicateCounter:
    """Counts how many keys repeat an earlier one.

    The number is exact for up to `limit` distinct keys. For more, it is an estimate from a random sample of
    the distinct keys, which has at least about `limit` / 2 of them. By default, its standard error is below
    0.5% if a tenth of 100 million keys are repeated once.
    """

    def __init__(self, limit: int = LIMIT):
        self._limit, self._share = limit, 1.0  # of all distinct keys
        self._keys, self._counts = np.empty(0, np.uint64), np.empty(0, np.int64)
        self._new: list[npt.NDArray[np.uint64]] = []

    def add(self, keys: npt.NDArray[np.int64]) -> None:
        """Add some keys, hashes of 64 bits."""
        mixed = keys.view(np.uint64) * _MIX
        self._new.append(mixed[mixed <= self._largest()])
        if sum(map(len, self._new)) >= _BUFFER:
            self._count()

    def duplicates(self) -> int:
        """The number of keys that repeat an earlier one."""
        self._count()
        return round(float(self._counts.sum() - len(self._keys)) / self._share)

    def _largest(self) -> np.uint64:
        """The largest key of the sample."""
        return np.uint64(int(_SPACE * self._share) - 1)

    def _count(self) -> None:
        keys = np.concatenate([self._keys, *self._new])
        counts = np.concatenate([self._counts, np.ones(len(keys) - len(self._keys), np.int64)])
        self._keys, places = np.unique(keys, return_inverse=True)
        self._counts = np.bincount(places, counts, len(self._keys)).astype(np.int64)
        self._new = []
        while len(self._keys) > self._limit:
            self._share /= 2
            kept = self._keys <= self._largest()
            self._keys, self._counts = self._keys[kept], self._counts[kept]
