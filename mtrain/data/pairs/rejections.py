"""Which training pairs the filters reject: a code of one byte for each pair of all training corpora.

The codes are collected in the first pass over the text; see `filters.py`. They are written to the data
folder, so that the pass that encodes the pairs, and one that resumes it, reject the same ones without
filtering again.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mtrain.config.sections.filters import RULES
from mtrain.errors import DataError, ModelError
from mtrain.storage.atomic import replacing
from mtrain.storage.manifest import reading

REJECTIONS = "rejections.bin"  # in the data folder
REASONS = ("bad", "empty", *RULES)  # bad: unreadable; empty: a side is blank
BAD, EMPTY, DUPLICATE = (REASONS.index(reason) + 1 for reason in ("bad", "empty", "duplicates"))
Codes = npt.NDArray[np.uint8]  # of pairs: 0 if one is kept, otherwise 1 + the index of the reason in REASONS
_CHUNK = 2**22  # codes that are counted at a time, as integers of 8 bytes


class Rejections(NamedTuple):
    """The codes of the pairs of all training corpora, one corpus after another."""

    codes: Codes  # mapped from a file
    sizes: Sequence[int]  # pairs in each corpus, including unreadable ones

    def of_pairs(self, corpus: int, first: int, end: int) -> Codes:
        """The codes of the pairs `first` to `end` (exclusive; numbers count from 1) of a corpus."""
        start = sum(self.sizes[:corpus]) - 1
        return self.codes[start + first : start + end]

    def counts(self) -> dict[str, int]:
        """How many pairs are rejected for each reason."""
        counts = np.zeros(len(REASONS) + 1, np.int64)
        for start in range(0, len(self.codes), _CHUNK):
            counts += np.bincount(self.codes[start : start + _CHUNK], minlength=len(counts))
        return {reason: int(count) for reason, count in zip(REASONS, counts[1:], strict=True) if count}

    def describe(self) -> dict[str, Any]:
        """The arguments of `read_rejections` that identify these codes, for JSON."""
        return {"sizes": list(self.sizes), "sha256": hashlib.sha256(self.codes.data).hexdigest()}

    def write(self, folder: Path) -> None:
        """Write the codes to a data folder. Raises StorageError."""
        with replacing(folder / REJECTIONS) as temporary, temporary.open("wb") as out:
            out.write(self.codes.data)


def format_counts(counts: dict[str, int]) -> str:
    """The number of pairs for each reason, as text."""
    return ", ".join(f"{count:,} {reason}" for reason, count in counts.items())


def no_pair_left(dropped: dict[str, int]) -> DataError:
    """The error if no training pair is left, with the number of pairs that were dropped for each reason."""
    reasons = format_counts(dropped) or "none, the corpora are empty"
    return DataError(f"no training pair is left; dropped: {reasons}")


def read_rejections(folder: Path, sizes: Sequence[int], sha256: str) -> Rejections:
    """The codes in a data folder. Raises ModelError if they are missing or damaged; StorageError if they
    cannot be read."""
    file = folder / REJECTIONS
    with reading(file):
        codes: Codes = np.memmap(file, np.uint8, "r") if file.stat().st_size else np.empty(0, np.uint8)
        rejections = Rejections(codes, sizes)
        if len(codes) != sum(sizes) or rejections.describe()["sha256"] != sha256:
            raise ModelError(f"{file}: damaged (it does not match its SHA-256)")
    return rejections
