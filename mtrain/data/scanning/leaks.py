"""Finds the pairs of the validation and test sets that are also training pairs, by hashes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mtrain.data import Pair
from mtrain.data.text.hashes import Hashes, contains, hash_normalized, hash_pairs, hash_texts, unique
from mtrain.storage.temporary import TemporaryStream

NO_HASHES: Hashes = np.empty(0, np.uint64)
_CHUNK = 2**20  # pairs whose hashes are read at a time


class PairHashes(NamedTuple):
    """Hashes of pairs, of their sources, and of their normalized sources."""

    pairs: Hashes
    sources: Hashes
    normalized: Hashes


def hash_all(sources: Sequence[str], targets: Sequence[str], normalized: bool = True) -> PairHashes:
    """The hashes of some pairs; optionally without the hashes of normalized sources."""
    exact = hash_texts(sources)
    pairs = hash_pairs(exact, hash_texts(targets))
    return PairHashes(pairs, exact, hash_normalized(sources) if normalized else NO_HASHES)


@dataclass
class Leak:
    """How many pairs of a validation or test set are also in the training corpus."""

    pairs: int = 0  # same source and target
    sources: int = 0  # same source
    normalized: int = 0  # same source, ignoring case, spaces and punctuation


class LeakFinder:
    """Collects the hashes that training pairs have in common with validation and test pairs."""

    def __init__(self, sets: Mapping[str, Iterable[Pair]], holds_out: bool, folder: Path | None):
        """`sets` are the validation and test sets. If validation pairs are held out of training, which will
        be known at the end, the hashes of all training sources are written to a temporary file in `folder`.
        """
        self._sets = {name: _hash_set(pairs) for name, pairs in sets.items()}
        self._found = [set[int](), set[int](), set[int]()]  # of pairs, sources and normalized sources
        self._sources = TemporaryStream(folder) if holds_out else None

    def evaluation_hashes(self) -> PairHashes:
        """The sorted hashes of all validation and test sets."""
        columns = zip(*self._sets.values(), strict=True)
        return PairHashes(*[unique(np.concatenate(column)) for column in columns] or [NO_HASHES] * 3)

    def add(self, hashes: PairHashes, overlap: PairHashes) -> None:
        """Add the `hashes` of some training pairs. `overlap` are the hashes among them that are also in
        `evaluation_hashes`. Raises StorageError."""
        for found, new in zip(self._found, overlap, strict=True):
            found.update(new.tolist())
        if self._sources is not None:
            self._sources.write(np.stack([hashes.sources, hashes.normalized], axis=1).tobytes())

    def leaks(self, held_out: Sequence[Pair]) -> tuple[dict[str, Leak], int | None]:
        """The leak of each set and, if validation pairs are held out, of these into the pairs that remain for
        training, which have other sources, and the number of those. To be called once, at the end. Raises
        StorageError."""
        leaks = {name: _count_leaked(hashes, self._found) for name, hashes in self._sets.items()}
        if self._sources is None:
            return leaks, None
        validation, found = _hash_set(held_out), set[int]()
        own = PairHashes(*map(unique, validation))
        hashes, remaining = self._sources.as_array(np.uint64).reshape(-1, 2), 0
        for start in range(0, len(hashes), _CHUNK):
            sources, normalized = hashes[start : start + _CHUNK].T
            is_other = ~contains(own.sources, sources)
            remaining += int(np.count_nonzero(is_other))
            leaked = contains(own.normalized, normalized) & is_other
            found.update(normalized[leaked].tolist())
        return {"validation": _count_leaked(validation, [set(), set(), found]), **leaks}, remaining


def _hash_set(pairs: Iterable[Pair]) -> PairHashes:
    """The hashes of the pairs of a validation or test set."""
    pairs = list(pairs)
    return hash_all([pair.source for pair in pairs], [pair.target for pair in pairs])


def _count_leaked(hashes: PairHashes, found: Sequence[set[int]]) -> Leak:
    """How many pairs of a set are among the hashes found in training."""
    both = zip(hashes, found, strict=True)
    return Leak(*(sum(key in others for key in column.tolist()) for column, others in both))
