"""Rows of token ids of different lengths, in a single array."""

from collections.abc import Sequence
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.integer]
Indices = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


class Rows(NamedTuple):
    """Rows of ids of different lengths: the container of token ids from the shards to the batches."""

    ids: Ids  # of all rows, one after another
    lengths: Ids  # of each row

    @classmethod
    def from_lists(cls, rows: Sequence[Sequence[int]]) -> "Rows":
        """Rows of int32 ids."""
        lengths = np.array([len(row) for row in rows], np.int32)
        return cls(np.fromiter(chain.from_iterable(rows), np.int32, int(lengths.sum())), lengths)

    def to_lists(self) -> list[list[int]]:
        """The ids of each row."""
        ids = self.ids.tolist()
        return [ids[start:stop] for start, stop in pairwise(self.starts.tolist())]

    @property
    def starts(self) -> Indices:
        """Where the ids of each row start, and where the last row ends."""
        return np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])

    def take(self, rows: Ids | Sequence[int]) -> "Rows":
        """The given rows, in the given order."""
        indices = np.asarray(rows, np.int64)
        # Arrow copies whole rows, which is faster than copying ids by their indices.
        taken = self._to_arrow().take(indices).buffers()[2]
        lengths = self.lengths[indices]
        return Rows(np.frombuffer(taken or b"", self.ids.dtype)[: int(lengths.sum())], lengths)

    def select(self, kept: Mask) -> "Rows":
        """Some of the rows, in their order; `kept` says which. Unlike `take`, this needs no pyarrow."""
        return Rows(self.ids[np.repeat(kept, self.lengths)], self.lengths[kept])

    def distinct(self) -> tuple["Rows", Indices]:
        """The distinct rows, and the index among them of each row."""
        encoded = self._to_arrow().dictionary_encode()
        which = encoded.indices.to_numpy().astype(np.int64)
        examples = np.empty(len(encoded.dictionary), np.int64)  # a row with each of the distinct contents
        examples[which] = np.arange(len(which))
        return self.take(examples), which

    def _to_arrow(self) -> Any:
        """An array of the bytes of each row."""
        import pyarrow as pa  # here, because decoding needs only `pad`, and should start fast

        starts = pa.py_buffer(self.starts * self.ids.itemsize)
        ids = pa.py_buffer(np.ascontiguousarray(self.ids))
        return pa.Array.from_buffers(pa.large_binary(), len(self.lengths), [None, starts, ids])

    @staticmethod
    def join(parts: Sequence["Rows"]) -> "Rows":
        """The rows of several parts."""
        return Rows(*(np.concatenate(column) for column in zip(*parts, strict=True)))


Sides = tuple[Rows, Rows]  # source, target


def pad(rows: Rows, fill: int, width: int = 0) -> tuple[Indices, Mask]:
    """Pad rows on the right to the length of the longest one, and at least to `width`. Returns a matrix and a
    mask, True at ids, both (rows, width)."""
    width = max(width, int(rows.lengths.max(initial=0)))
    keep = np.arange(width) < rows.lengths[:, None]
    matrix = np.full(keep.shape, fill, np.int64)
    matrix[keep] = rows.ids
    return matrix, keep


def ranges(starts: Ids, lengths: Ids) -> Indices:
    """The indices start, start + 1, ... of several ranges, one after another."""
    ends = np.cumsum(lengths, dtype=np.int64)
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(ends[-1] if len(ends) else 0)
