"""Word alignments from cross-attention. Words are separated by whitespace, as `str.split` does."""

import re
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Alignment = tuple[tuple[int, int], ...]  # (source word, target word), counted from 0
FloatMatrix = npt.NDArray[np.floating]


def words_at(text: str, positions: Sequence[int]) -> list[int]:
    """The index of the word at or after each position of a text, or of the last word; -1 without words, and
    for the position -1."""
    ends = [word.end() for word in re.finditer(r"\S+", text)]
    return [-1 if i < 0 else min(bisect_right(ends, i), len(ends) - 1) for i in positions]


def align(attention: FloatMatrix, source: Sequence[int], target: Sequence[int]) -> Alignment:
    """Align each target word to the source word that it attends to most, summed over tokens.

    `attention` (T, S) is from target to source tokens; tokens after the last word, such as EOS, are ignored.
    `source` and `target` are the index of each token's word; -1 for none. Target words that attend most to
    source tokens outside of words are not aligned.
    """
    columns, rows = np.array(source, dtype=np.int64), np.array(target, dtype=np.int64)
    if not len(columns) or not len(rows):
        return ()
    words = np.zeros((rows.max() + 2, columns.max() + 2))  # last row and column: tokens outside of words
    np.add.at(words, (rows[:, None], columns[None]), attention[: len(rows), : len(columns)])
    if columns.min() >= 0:
        words[:, -1] = -1
    best, none = words.argmax(axis=1), words.shape[1] - 1
    return tuple((int(best[word]), int(word)) for word in np.unique(rows[rows >= 0]) if best[word] != none)
