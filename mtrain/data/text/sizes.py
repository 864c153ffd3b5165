"""Counts characters, words and letters of many texts at once."""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import regex  # supports newer versions of Unicode than `unicodedata`

from mtrain.data.text.hashes import LETTERS
from mtrain.tokenizer.code_points import code_points

_TEXTS = 1000  # that are counted at a time; more would not fit into the processor's cache
_INVISIBLE = range(0xE0000, 0xE1000)  # code points of tags and of variants of Chinese characters
_ETHIOPIC_SPACE = "\u1361"
_BETWEEN_WORDS = regex.compile(rf"(?<=[\p{{L}}\p{{M}}]){_ETHIOPIC_SPACE}(?=\p{{L}})")
_OTHER, _LETTER, _DIGIT, _FORMAT, _SPACE = range(5)
_CATEGORIES = {  # of characters, by kind
    _LETTER: r"[\p{L}\p{M}\p{Nl}--\p{Me}]",  # Nl: numbers that are letters, such as the Chinese 0
    _DIGIT: r"\p{Nd}",
    _FORMAT: r"[\p{Cf}\p{Variation_Selector}]",  # without a glyph, such as the joiners of Persian and Sinhala
}
PerText = npt.NDArray[np.int64]  # a number for each text


class TextSizes(NamedTuple):
    """Sizes of some texts, none of which is blank."""

    characters: PerText  # without the spaces around the text
    visible: PerText  # characters that have a glyph
    words: PerText  # separated by spaces or Ethiopic wordspaces
    longest_word: PerText  # in characters
    letters: PerText  # with combining marks, such as the vowel signs of Hindi
    has_digits: npt.NDArray[np.bool_]


def measure(texts: Sequence[str]) -> TextSizes:
    """The sizes of some texts, none of which is blank or contains NUL."""
    parts = [_measure(texts[start : start + _TEXTS]) for start in range(0, len(texts), _TEXTS)]
    return TextSizes(*map(np.concatenate, zip(*parts or [_measure([])], strict=True)))


def _measure(texts: Sequence[str]) -> TextSizes:
    joined = "\0".join([*texts, ""])
    if _ETHIOPIC_SPACE in joined:
        joined = _BETWEEN_WORDS.sub(" ", joined)
    points = code_points(joined)
    kinds = _kinds().take(points, mode="clip")
    text_ends = np.flatnonzero(points == 0)[: len(texts)]
    text_starts = np.append(0, text_ends + 1)[: len(texts)]
    is_space = kinds == _SPACE  # also of the NUL that ends each text
    is_edge = is_space[1:] != is_space[:-1]
    edges = np.flatnonzero(np.append(not is_space[:1].all(), is_edge))  # starts and ends of words in turn
    word_starts, word_ends = edges[::2], edges[1::2]
    lengths = word_ends - word_starts
    first_words = np.searchsorted(word_starts, text_starts)
    last_words = np.append(first_words[1:], len(word_starts))[: len(texts)] - 1
    return TextSizes(
        word_ends[last_words] - word_starts[first_words],
        np.add.reduceat(lengths, first_words)
        - np.add.reduceat(kinds == _FORMAT, text_starts, dtype=np.int64),
        last_words - first_words + 1,
        np.maximum.reduceat(lengths, first_words),
        np.add.reduceat(kinds == _LETTER, text_starts, dtype=np.int64),
        np.bincount(np.searchsorted(text_ends, np.flatnonzero(kinds == _DIGIT)), minlength=len(texts)) > 0,
    )


@cache
def _kinds() -> npt.NDArray[np.uint8]:
    """The kind of each code point. The last one stands for all others, which are neither letters nor
    spaces."""
    kinds = np.full(_INVISIBLE.stop + 1, _OTHER, np.uint8)
    kinds[_INVISIBLE] = _FORMAT
    characters = "".join(map(chr, range(LETTERS)))
    for kind, category in _CATEGORIES.items():
        for run in regex.finditer(f"(?V1){category}+", characters):
            kinds[run.start() : run.end()] = kind
    kinds[[code for code, character in enumerate(characters) if character.isspace() or not code]] = _SPACE
    return kinds
