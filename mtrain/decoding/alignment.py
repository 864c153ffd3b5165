"""Word alignments from cross-attention.

Words are separated by white space, as `str.split` does. In scripts that are written without spaces, each
character is a word.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import regex

from mtrain.data.text.writing_systems import CHARACTER, UNSPACED

Alignment = tuple[tuple[int, int], ...]  # (source word, target word), counted from 0
Words = tuple[int, int]  # of a token: the index of its first word, and of the word after its last word
NO_WORDS: Words = (-1, -1)
FloatMatrix = npt.NDArray[np.floating]

# Characters without width, such as the spaces of Khmer (U+200B), are part of the word before them.
# `str.split` treats \x1c to \x1f as spaces, but `\s` of `regex` does not.
_WORD = regex.compile(rf"(?=[{UNSPACED}]){CHARACTER}\p{{Cf}}*|[^\s\x1c-\x1f{UNSPACED}]+")


def word_spans(text: str) -> list[tuple[int, int]]:
    """Where each word of a text begins and ends."""
    return [word.span() for word in _WORD.finditer(text)]


def words_at(text: str, positions: Sequence[int]) -> list[Words]:
    """The words of each token of a text; tokens begin at `positions`. These are the word at or after the
    position (or the last word), and the words that begin before the next position. A token at position -1
    has `NO_WORDS`."""
    spans = word_spans(text)
    if not spans:
        return [NO_WORDS] * len(positions)
    begins = [begin for begin, _ in spans]
    ends = [end for _, end in spans]
    found = []
    for position, following in pairwise([*positions, len(text)]):
        first = min(bisect_right(ends, position), len(spans) - 1)
        words = first, max(first + 1, bisect_left(begins, following))
        found.append(NO_WORDS if position < 0 else words)
    return found


def align(attention: FloatMatrix, source: Sequence[Words], target: Sequence[Words]) -> Alignment:
    """Align each target word to the source word that it attends to most.

    The weight of a source word is the largest weight of its tokens, and weights are summed over the tokens of
    the target word. So long source words have no advantage. The Bergamot engine aligns tokens, and does not
    favor long words either.

    `attention` (T, S) is from target to source tokens; tokens after the last word, such as EOS, are ignored.
    `source` and `target` are the words of each token. Words of the same token have the same alignments.
    Target words that attend most to source tokens outside of words are not aligned.
    """
    if not source or not target:
        return ()
    columns, rows = np.array(source)[:, 0], np.array(target)[:, 0]
    # Last row and column: tokens outside of words.
    largest, words = np.zeros((len(rows), columns.max() + 2)), np.zeros((rows.max() + 2, columns.max() + 2))
    tokens = np.arange(len(rows))[:, None]
    np.maximum.at(largest, (tokens, columns), attention[: len(rows), : len(columns)])
    np.add.at(words, rows, largest)
    if columns.min() >= 0:
        words[:, -1] = -1
    best, none = words.argmax(axis=1), words.shape[1] - 1
    of_source = _by_first(source)
    links = ((of_source[best[word]], same) for word, same in _by_first(target).items() if best[word] != none)
    return tuple((i, j) for sources, targets in links for j in targets for i in sources)


def _by_first(tokens: Sequence[Words]) -> dict[int, range]:
    """The words of the tokens that share a first word, by that word; they end before the first word of the
    next tokens."""
    last = dict(sorted(tokens))  # of several tokens with the same first word, the longest one
    last.pop(NO_WORDS[0], None)
    bounds = pairwise([*last, max(last.values(), default=0)])
    return {first: range(first, min(last[first], following)) for first, following in bounds}
