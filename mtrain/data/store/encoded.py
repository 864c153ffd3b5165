"""Encoded training pairs, as rows of token ids."""

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from mtrain.config.sections.corpora import Corpus
from mtrain.data.reading.files import place_of
from mtrain.data.store.shards import Shard, StoredRows
from mtrain.tokenizer.rows import Ids, Indices, Rows, ranges

LocateRows = Callable[[Sequence[int]], list[str]]
Weights = tuple[npt.NDArray[np.float64], Sequence[int] | Indices]  # of so many consecutive rows


class EncodedCorpus:
    """Token ids of training pairs. Each side of a row ends in EOS; lengths include it.

    The ids are memory-mapped. In memory, a row takes 20 bytes.
    """

    def __init__(self, parts: Sequence[StoredRows], weights: Weights, locate: LocateRows):
        """The rows of some parts, one after another. `weights` are some weights, and the number of
        consecutive rows that have each of them. `locate` returns the locations of rows as `file:line`."""
        self._weights, self.locate = weights, locate
        self._edges = np.cumsum([0, *(len(part.positions) for part in parts)])  # first row of each part
        self._ids = [[part.ids[side] for part in parts] for side in (0, 1)]
        self._starts = [_compact(np.concatenate([part.starts[side] for part in parts])) for side in (0, 1)]
        self.source_lengths, self.target_lengths = (
            np.concatenate([part.lengths[side] for part in parts]).astype(np.int32, copy=False)
            for side in (0, 1)
        )

    @classmethod
    def open(
        cls, shards: Sequence[Shard], corpora: Sequence[Corpus], buckets: Sequence[int]
    ) -> "EncodedCorpus":
        """The rows of some buckets of all shards, in the order of their pairs in the corpora."""
        weights = np.array([corpora[shard.info.corpus].weight for shard in shards], np.float64)
        chosen = np.asarray(buckets, np.int64)
        counts = [int(np.diff(shard.buckets[:, 0])[chosen].sum()) for shard in shards]
        return cls.of_rows(shards, corpora, (shard.rows(buckets) for shard in shards), (weights, counts))

    @classmethod
    def of_rows(
        cls, shards: Sequence[Shard], corpora: Sequence[Corpus], rows: Iterable[StoredRows], weights: Weights
    ) -> "EncodedCorpus":
        """The given `rows` of each shard, in the order of the shards, of which there must be at least one."""
        parts = list(rows)
        positions = [part.positions for part in parts]
        edges = np.cumsum([0, *map(len, positions)])

        def place(row: int) -> str:
            part = int(np.searchsorted(edges, row, side="right")) - 1
            [number] = shards[part].numbers(positions[part][row - edges[part]][None]).tolist()
            return place_of(corpora[shards[part].info.corpus], number)

        return cls(parts, weights, lambda rows: list(map(place, rows)))

    def __len__(self) -> int:
        return len(self.source_lengths)

    @property
    def weights(self) -> npt.NDArray[np.float64]:
        """How often each row occurs in an epoch."""
        weights: npt.NDArray[np.float64] = np.repeat(*self._weights)
        return weights

    @property
    def expected_pairs(self) -> float:
        """How many pairs these rows contribute to an epoch, on average."""
        return float(np.dot(*self._weights))

    def weighted(self, weights: npt.NDArray[np.float64]) -> "EncodedCorpus":
        """The same rows with another weight for each part, if it has one weight for each part."""
        found = copy(self)
        found._weights = weights, self._weights[1]
        return found

    def fetch(self, rows: Sequence[int] | Indices) -> tuple[Rows, Rows]:
        """Source and target ids (int32) of the given rows, in the given order."""
        wanted = np.asarray(rows, np.int64)
        owners = np.searchsorted(self._edges, wanted, side="right") - 1
        order = np.argsort(owners, kind="stable")  # groups the rows by the part that has their ids
        edges = [0, *(np.flatnonzero(np.diff(owners[order])) + 1).tolist(), len(order)]
        sides = []
        for side, lengths in enumerate((self.source_lengths[wanted], self.target_lengths[wanted])):
            starts = self._starts[side][wanted].astype(np.int64)
            found = ranges(starts[order], lengths[order])  # where the ids are
            ends = np.concatenate([[0], np.cumsum(lengths[order], dtype=np.int64)])[edges].tolist()
            grouped = np.empty(len(found), np.int32)
            for (first, _), (start, stop) in zip(pairwise(edges), pairwise(ends), strict=True):
                if stop > start:
                    grouped[start:stop] = self._ids[side][owners[order[first]]][found[start:stop]]
            ids = np.empty_like(grouped)
            ids[ranges((np.cumsum(lengths, dtype=np.int64) - lengths)[order], lengths[order])] = grouped
            sides.append(Rows(ids, lengths))
        return sides[0], sides[1]

    @property
    def id_type(self) -> np.dtype[np.integer]:
        """The integer type of all ids."""
        return np.result_type(*(ids.dtype for sides in self._ids for ids in sides))

    def with_rows(self, sides: tuple[Rows, Rows]) -> "EncodedCorpus":
        """The same pairs with other source and target ids. Rows beyond `len(self)` are noise that is added to
        the corpus."""
        columns = ((side.ids, side.starts[:-1], side.lengths) for side in sides)
        ids, starts, lengths = zip(*columns, strict=True)
        count = len(lengths[0])

        def locate(rows: Sequence[int]) -> list[str]:
            return [self.locate([row])[0] if row < len(self) else "data.augment.noise" for row in rows]

        weights = np.append(self._weights[0], 1.0), np.append(self._weights[1], count - len(self))
        rows = StoredRows(np.arange(count, dtype=np.uint32), ids, starts, lengths)
        return EncodedCorpus([rows], weights, locate)


def _compact(indices: Ids) -> Ids:
    """The same numbers in four bytes each, if they fit."""
    return indices.astype(np.uint32) if indices.max(initial=0) < 2**32 else indices
