"""Which training pairs the filters reject: a code of one byte for each pair of all training corpora.

The codes are collected in the first pass over the text. They are written to the data folder, so that the pass
that encodes the pairs, and one that resumes it, reject the same ones without filtering again.
"""

import hashlib
from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mtrain.data.pairs.duplicates import find_repeated
from mtrain.data.pairs.filters import DUPLICATE, REASONS, Codes, FilteredBlock
from mtrain.data.text.hashes import Hashes
from mtrain.errors import ModelError, StorageError
from mtrain.storage.atomic import replacing
from mtrain.storage.temporary import TemporaryStream

REJECTIONS = "rejections.bin"  # in the data folder
_CHUNK = 2**22  # codes that are read at a time


class Rejections(NamedTuple):
    """The codes of the pairs of all training corpora, one corpus after another. 0: kept; otherwise one more
    than the index of the reason in REASONS."""

    codes: Codes  # mapped from a file
    sizes: Sequence[int]  # pairs in each corpus, including unreadable ones

    def of_pairs(self, corpus: int, first: int, end: int) -> Codes:
        """The codes of the pairs `first` to `end` (exclusive; numbers count from 1) of a corpus."""
        start = sum(self.sizes[:corpus]) - 1
        return self.codes[start + first : start + end]

    def counts(self) -> dict[str, int]:
        """How many pairs are rejected for each reason."""
        counts = np.zeros(len(REASONS) + 1, np.int64)
        for chunk in self._chunks():
            counts += np.bincount(chunk, minlength=len(counts))
        return {reason: int(count) for reason, count in zip(REASONS, counts[1:], strict=True) if count}

    def describe(self) -> dict[str, Any]:
        """The arguments of `read_rejections` that identify these codes, for JSON."""
        return {"sizes": list(self.sizes), "sha256": self._digest()}

    def write(self, folder: Path) -> None:
        """Write the codes to a data folder. Raises StorageError."""
        with replacing(folder / REJECTIONS) as temporary, temporary.open("wb") as out:
            for chunk in self._chunks():
                out.write(chunk.data)

    def _digest(self) -> str:
        digest = hashlib.sha256()
        for chunk in self._chunks():
            digest.update(chunk.data)
        return digest.hexdigest()

    def _chunks(self) -> Iterator[Codes]:
        return (self.codes[start : start + _CHUNK] for start in range(0, len(self.codes), _CHUNK))


def read_rejections(folder: Path, sizes: Sequence[int], sha256: str) -> Rejections:
    """The codes in a data folder. Raises ModelError if they are missing or damaged; StorageError if they
    cannot be read."""
    file = folder / REJECTIONS
    try:
        codes: Codes = np.memmap(file, np.uint8, "r") if file.stat().st_size else np.empty(0, np.uint8)
        rejections = Rejections(codes, sizes)
        if len(codes) != sum(sizes) or rejections.describe()["sha256"] != sha256:
            raise ModelError(f"{file}: damaged (it does not match its SHA-256)")
    except FileNotFoundError:
        raise ModelError(f"{file}: missing") from None
    except OSError as error:
        raise StorageError(f"{file}: cannot read: {error.strerror}") from error
    return rejections


class RejectionRecorder:
    """Collects the results of filtering all blocks of the training corpora, in order."""

    def __init__(self, folder: Path | None = None):
        """Temporary files are written to `folder`: a byte for each pair, and 8 more to find duplicates.
        Raises StorageError, as the other methods do."""
        self._codes, self._keys = TemporaryStream(folder), TemporaryStream(folder)
        self._sizes: list[int] = []

    def add(self, corpus: int, block: FilteredBlock) -> None:
        """Add the next block, which is of corpus number `corpus` (from 0)."""
        self._sizes += [0] * (corpus + 1 - len(self._sizes))
        self._sizes[corpus] += len(block.codes)
        self._codes.write(block.codes.tobytes())
        self._keys.write(block.keys.tobytes())

    def finish(self, corpora: int, unfiltered: Collection[int]) -> Rejections:
        """Find duplicates among the pairs that are not rejected yet, and return all codes. Duplicates in
        `unfiltered` corpora are kept."""
        sizes = self._sizes + [0] * (corpora - len(self._sizes))
        codes: Codes = self._codes.as_array(np.uint8)
        keys: Hashes = self._keys.as_array(np.uint64)
        ends = list(accumulate(sizes))
        if len(keys):
            for rows in find_repeated(keys, codes):
                corpus_of = np.searchsorted(ends, rows, side="right")
                codes[rows[~np.isin(corpus_of, list(unfiltered))]] = DUPLICATE
        return Rejections(codes, sizes)
