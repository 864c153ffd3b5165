"""BPE-dropout: Provilkov et al., "BPE-Dropout", ACL 2020, algorithm 1.

All words with the same number of characters are processed at the same time, with NumPy.
"""

from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np

from mtrain.tokenizer.rows import Floats, Indices, Rows

_NONE = np.iinfo(np.int64).max  # instead of the number of a merge, if there is none


class BpeSampler:
    """Merges the characters of words again, skipping merges at random."""

    def __init__(self, names: Sequence[str], scores: Floats, learned: Sequence[int], dropout: float):
        """`names` and `scores` cover all pieces, by id. `learned` has the ids of the pieces to use,
        whose scores are the negative ranks of merges. A merge is skipped with the probability `dropout`."""
        self._dropout = dropout
        by_name = {names[i]: i for i in learned}
        spelled = [[by_name.get(character, -1) for character in name] for name in names]
        # The ids of the characters of each piece; -1 if a character has no piece.
        self._characters = Rows(np.array([*chain(*spelled)], np.int64), np.array([*map(len, spelled)]))
        # Merges are numbered in the order of their ranks; merges into the same piece have the same number.
        self._merged = np.array(sorted(learned, key=lambda i: -scores[i]), np.int64)
        numbers = {names[i]: number for number, i in enumerate(self._merged.tolist())}
        pairs = sorted(
            (by_name[name[:cut]] << 32 | by_name[name[cut:]], number)
            for name, number in numbers.items()
            for cut in range(1, len(name))
            if name[:cut] in by_name and name[cut:] in by_name
        )
        # The last entry is greater than all pairs.
        self._pairs, self._numbers = np.array([*pairs, (_NONE, _NONE)], np.int64).T.copy()

    def __call__(self, words: Rows, generator: np.random.Generator) -> Rows:
        """New segmentations of words, which are rows of pieces."""
        characters = self._characters.take(words.ids).ids
        ends = np.cumsum(self._characters.lengths[words.ids])[words.starts[1:] - 1]
        spelled = Rows(characters, np.diff(ends, prepend=0))
        parts, places = [words], np.arange(len(ends))  # unless all characters of a word have pieces
        merged = 0
        is_known = np.minimum.reduceat(characters, spelled.starts[:-1]) >= 0
        for length in np.unique(spelled.lengths):
            of_length = np.flatnonzero(is_known & (spelled.lengths == length))
            pieces = spelled.take(of_length).ids.astype(np.int64).reshape(-1, length)
            for rows, ids in self._merge(pieces, generator):
                places[of_length[rows]] = len(ends) + merged + np.arange(len(rows))
                merged += len(rows)
                parts.append(Rows(ids.ravel().astype(words.ids.dtype), np.full(len(ids), ids.shape[1])))
        return Rows.join(parts).take(places)

    def _merge(self, pieces: Indices, generator: np.random.Generator) -> Iterator[tuple[Indices, Indices]]:
        """Merge the characters of words (words, characters). Yields some words, and their
        pieces (words, pieces)."""
        words = np.arange(len(pieces))
        merges = self._find(pieces[:, :-1], pieces[:, 1:])  # of each piece with the next one
        while pieces.shape[1] > 1:
            kept = merges.copy()
            exist = np.flatnonzero(merges != _NONE)
            kept.flat[exist[generator.random(len(exist)) < self._dropout]] = _NONE
            place = kept.argmin(1)
            number = kept[np.arange(len(words)), place]
            goes_on = number != _NONE
            yield words[~goes_on], pieces[~goes_on]
            words = words[goes_on]
            pieces, merges = self._apply(pieces[goes_on], merges[goes_on], place[goes_on], number[goes_on])
        yield words, pieces

    def _apply(
        self, pieces: Indices, merges: Indices, place: Indices, number: Indices
    ) -> tuple[Indices, Indices]:
        """Merge the piece at `place` of each word with the next one."""
        rows, columns = np.arange(len(pieces)), np.arange(pieces.shape[1] - 1)
        pieces = np.take_along_axis(pieces, columns + (columns > place[:, None]), 1)
        pieces[rows, place] = self._merged[number]
        columns = columns[:-1]
        merges = np.take_along_axis(merges, columns + (columns >= place[:, None]), 1)
        for left in (place - 1, place):
            exists = (left >= 0) & (left < len(columns))
            row, left = rows[exists], left[exists]
            merges[row, left] = self._find(pieces[row, left], pieces[row, left + 1])
        return pieces, merges

    def _find(self, left: Indices, right: Indices) -> Indices:
        """The number of the merge of two pieces."""
        keys = left << 32 | right
        found = np.searchsorted(self._pairs, keys)
        return np.where(self._pairs[found] == keys, self._numbers[found], _NONE)
