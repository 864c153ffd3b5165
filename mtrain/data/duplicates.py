"""Counts repeated items in bounded memory."""

import math

import numpy as np
import numpy.typing as npt

from mtrain.data.text_hashes import MIX, Hashes, unique

_BUFFER = 1_000_000  # keys that are collected before they are counted
_SPACE = 2**64


class DuplicateCounter:
    """Counts how many keys repeat an earlier one.

    The number is exact for up to `limit` distinct keys. For more, the number of distinct keys is estimated
    from those whose hashes are below a bound, at least about `limit` / 2 of them.
    """

    def __init__(self, limit: int):
        self._limit, self._share = limit, 1.0  # of all distinct keys
        self._added = 0
        self._keys: Hashes = np.empty(0, np.uint64)
        self._new: list[Hashes] = []

    def add(self, keys: npt.NDArray[np.uint64]) -> None:
        """Add some keys, hashes of 64 bits."""
        self._added += len(keys)
        mixed = keys * MIX
        self._new.append(mixed[mixed <= self._largest()])
        if sum(map(len, self._new)) >= _BUFFER:
            self._count()

    def duplicates(self) -> tuple[int, int]:
        """The number of keys that repeat an earlier one, and its standard error: 0 if it is exact."""
        self._count()
        distinct = len(self._keys) / self._share
        error = math.sqrt(len(self._keys) * (1 - self._share)) / self._share
        return max(0, round(self._added - distinct)), math.ceil(error)

    def _largest(self) -> np.uint64:
        """The largest key of the sample."""
        return np.uint64(int(_SPACE * self._share) - 1)

    def _count(self) -> None:
        self._keys = unique(np.concatenate([self._keys, *self._new]))
        self._new = []
        while len(self._keys) > self._limit:
            self._share /= 2
            self._keys = self._keys[self._keys <= self._largest()]
