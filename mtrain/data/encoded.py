"""The encoded training pairs, as rows of token ids, and their new segmentations with subword sampling."""

import logging
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mtrain.config.corpora import Corpus
from mtrain.config.data import DataConfig
from mtrain.data.corpus_files import place_of
from mtrain.data.shards import Ids, Rows, Shard, ranges
from mtrain.errors import StorageError
from mtrain.tokenizer.sampling import make_resegment
from mtrain.tokenizer.tokenizer import Tokenizer

log = logging.getLogger(__name__)

BLOCK = 10_000  # rows that are segmented at a time
Lists = tuple[list[int], list[int]]  # the ids of a pair
# Its arguments are the rows of a block, the epoch and the number of the block.
ResegmentBlock = Callable[[list[Lists], int, int], list[Lists]]


class _Part(NamedTuple):
    """Consecutive rows of a corpus, whose ids are in the same two arrays."""

    ids: tuple[Ids, Ids]  # source, target
    starts: tuple[Ids, Ids]  # of each row in `ids`
    lengths: tuple[Ids, Ids]  # of each row


class EncodedCorpus:
    """Token ids of the training pairs, memory-mapped. Each side of a row ends in EOS; lengths include it.

    `weights[i]` is how often row i occurs in an epoch. In memory, a row takes 28 bytes.
    """

    def __init__(
        self,
        parts: Iterable[_Part],
        weights: npt.NDArray[np.float64],
        places: Callable[[Sequence[int]], list[str]],
        scratch: Path | None = None,
        resegment: ResegmentBlock | None = None,
    ):
        """`places` returns the locations of rows as `file:line`. New segmentations are written to temporary
        files in `scratch`."""
        self.weights, self.places = weights, places
        self._scratch, self._resegment = scratch, resegment
        self._ids, self._starts, lengths = [], [], []
        for part in parts:
            self._ids.append(part.ids)
            self._starts.append((_compact(part.starts[0]), _compact(part.starts[1])))
            lengths.append([side.astype(np.int32) for side in part.lengths])
        self._edges = np.cumsum([0, *(len(source) for source, _ in lengths)])  # first row of each part
        self.source_lengths, self.target_lengths = map(np.concatenate, zip(*lengths, strict=True))

    @classmethod
    def open(
        cls,
        shards: Sequence[Shard],
        corpora: Sequence[Corpus],
        buckets: Sequence[int],
        scratch: Path | None = None,
        resegment: ResegmentBlock | None = None,
    ) -> "EncodedCorpus":
        """The rows of some buckets of all shards, in the order of their pairs in the corpora."""
        chosen = [_compact(shard.rows(buckets)) for shard in shards]
        counts = [len(rows) for rows in chosen]
        weights = np.repeat([corpora[shard.info.corpus].weight for shard in shards], counts)
        edges = np.cumsum([0, *counts])

        def place(row: int) -> str:
            part = int(np.searchsorted(edges, row, side="right")) - 1
            [number] = shards[part].numbers(chosen[part][row - edges[part]][None]).tolist()
            return place_of(corpora[shards[part].info.corpus], number)

        parts = (_part_of(shard, rows) for shard, rows in zip(shards, chosen, strict=True))
        return cls(parts, weights, lambda rows: list(map(place, rows)), scratch, resegment)

    def __len__(self) -> int:
        return len(self.source_lengths)

    def fetch(self, rows: Sequence[int]) -> tuple[pa.ListArray, pa.ListArray]:
        """Source and target ids of the given rows, in the given order."""
        wanted = np.asarray(rows, np.int64)
        owners = np.searchsorted(self._edges, wanted, side="right") - 1
        sides = []
        for side, lengths in enumerate((self.source_lengths[wanted], self.target_lengths[wanted])):
            offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
            ids = np.empty(offsets[-1], np.int32)
            for owner in np.unique(owners).tolist():
                mine = np.flatnonzero(owners == owner)
                starts = self._starts[owner][side][wanted[mine] - self._edges[owner]].astype(np.int64)
                found = self._ids[owner][side][ranges(starts, lengths[mine])]
                ids[ranges(offsets[mine], lengths[mine])] = found
            sides.append(pa.ListArray.from_arrays(offsets.astype(np.int32), ids))
        return sides[0], sides[1]

    def epoch(self, number: int) -> "EncodedCorpus":
        """The corpus of epoch `number` (from 0): this one or, with subword sampling, its rows with new
        segmentations, which depend only on the epoch and the seed. Raises StorageError if they cannot be
        written."""
        if self._resegment is None:
            return self
        try:
            # The files have no names; their space is freed when the corpus is garbage-collected.
            with TemporaryFile(dir=self._scratch) as source, TemporaryFile(dir=self._scratch) as target:
                files, lengths = (source, target), np.empty((2, len(self)), np.int32)
                for block, start in enumerate(range(0, len(self), BLOCK)):
                    old = self.fetch(range(start, min(start + BLOCK, len(self))))
                    lists = list(zip(*(side.to_pylist() for side in old), strict=True))
                    new = self._resegment(lists, number, block)
                    for side, file in enumerate(files):
                        rows = [pair[side] for pair in new]
                        lengths[side, start : start + len(rows)] = list(map(len, rows))
                        file.write(np.concatenate(rows, dtype=np.int32).tobytes())
                for file in files:
                    file.flush()
                sides = [Rows(np.memmap(file, np.int32, "r"), lengths[i]) for i, file in enumerate(files)]
            part = _Part(
                (sides[0].ids, sides[1].ids),
                (sides[0].starts[:-1], sides[1].starts[:-1]),
                (lengths[0], lengths[1]),
            )
            return EncodedCorpus([part], self.weights, self.places)
        except OSError as error:
            raise StorageError(f"{self._scratch}: cannot write: {error.strerror or error}") from error


def _part_of(shard: Shard, rows: Ids) -> _Part:
    sides = shard.side("source"), shard.side("target")
    starts = sides[0].starts[rows], sides[1].starts[rows]
    return _Part((sides[0].ids, sides[1].ids), starts, (sides[0].lengths[rows], sides[1].lengths[rows]))


def _compact(indices: Ids) -> Ids:
    """The same numbers in four bytes each, if they fit."""
    return indices.astype(np.uint32) if indices.max(initial=0) < 2**32 else indices


def make_block_resegmenter(data: DataConfig, tokenizer: Tokenizer, seed: int) -> ResegmentBlock | None:
    """A function that samples new segmentations of a block, or None without subword sampling. The
    segmentations depend only on (seed, epoch, block).

    A pair that would become too long keeps its segmentation, so every epoch has the same rows.
    """
    if data.subword_sampling is None:
        return None
    source = target = make_resegment(tokenizer.source, data.subword_sampling)
    if tokenizer.target is not tokenizer.source:
        target = make_resegment(tokenizer.target, data.subword_sampling)

    def resegment(block: list[Lists], epoch: int, number: int) -> list[Lists]:
        generator, rows = random.Random(f"{seed} {epoch} {number}"), []
        for old in block:
            new = source(old[0], generator), target(old[1], generator)
            rows.append(new if max(map(len, new)) <= data.max_length else old)
        return rows

    return resegment
