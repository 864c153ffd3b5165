"""Rows of token ids of different lengths, in a single array."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Ids = npt.NDArray[np.integer]
Indices = npt.NDArray[np.int64]


class Rows(NamedTuple):
    """Rows of ids of different lengths."""

    ids: Ids  # of all rows
    lengths: Ids  # of each row

    @property
    def starts(self) -> Indices:
        """Where the ids of each row start, and where the last row ends."""
        return np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])

    def take(self, rows: Ids) -> "Rows":
        """The given rows, in the given order."""
        # Arrow copies whole rows, which is faster than copying ids by their indices.
        taken = self._to_arrow().take(pa.array(rows)).buffers()[2]
        lengths = self.lengths[rows]
        return Rows(np.frombuffer(taken or b"", self.ids.dtype)[: int(lengths.sum())], lengths)

    def distinct(self) -> tuple["Rows", Indices]:
        """The distinct rows, and the index among them of each row."""
        encoded = self._to_arrow().dictionary_encode()
        which = encoded.indices.to_numpy().astype(np.int64)
        examples = np.empty(len(encoded.dictionary), np.int64)  # a row with each of the distinct contents
        examples[which] = np.arange(len(which))
        return self.take(examples), which

    def _to_arrow(self) -> Any:
        """An array of the bytes of each row."""
        buffers = [
            None,
            *map(pa.py_buffer, (self.starts * self.ids.itemsize, np.ascontiguousarray(self.ids))),
        ]
        return pa.Array.from_buffers(pa.large_binary(), len(self.lengths), buffers)

    @staticmethod
    def join(parts: Sequence["Rows"]) -> "Rows":
        """The rows of several parts."""
        return Rows(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def ranges(starts: Ids, lengths: Ids) -> Indices:
    """The indices start, start + 1, ... of several ranges, one after another."""
    ends = np.cumsum(lengths, dtype=np.int64)
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(ends[-1] if len(ends) else 0)
