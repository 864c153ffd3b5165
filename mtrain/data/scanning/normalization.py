"""Counts the characters that the normalization of a tokenizer changes. A model never learns to write them."""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import count
from typing import NamedTuple
from unicodedata import category, decomposition

import numpy as np
import regex
from sentencepiece import SentencePieceNormalizer

from mtrain.tokenizer.code_points import code_points
from mtrain.tokenizer.learn import ESCAPES

_UNKNOWN, _KEPT, _CHANGED, _JOINS = range(4)  # kinds of characters
_CODE_POINTS = 0x110000
_LAST_COMPOSED = 0x1FFFF  # code point after which characters have no decomposition into two
_TEXTS = 500  # that are joined at a time; more would not fit into the processor's cache
_CLUSTER = regex.compile(r"\X")


class Change(NamedTuple):
    """A character, or a sequence that is one character to a reader, and what normalization makes of it."""

    before: str
    after: str


class ChangeCounter:
    """Counts the changes that a normalizer makes. ASCII characters and changes of case alone, which a
    normalizer that lowercases is chosen for, are not counted."""

    def __init__(self, normalizer: SentencePieceNormalizer):
        self._normalizer = normalizer
        self._lowercases = normalizer.Normalize("A") == "a"
        # By code point. Characters that join the preceding one may change together with it.
        self._kinds = np.full(_CODE_POINTS, _UNKNOWN, np.int8)
        self._kinds[:128] = _KEPT
        self._kinds[list(map(ord, ESCAPES))] = _KEPT  # decoding restores them

    def count(self, texts: Sequence[str]) -> Counter[Change]:
        """How often each change occurs in some texts."""
        others = [text for text in texts if not text.isascii()]
        sequences = Counter[str]()
        for start in range(0, len(others), _TEXTS):
            sequences.update(self._sequences(" ".join(["", *others[start : start + _TEXTS], ""])))
        found = Counter[Change]()
        for sequence, times in sequences.items():
            after = self._normalizer.Normalize(sequence)
            if self._differ(sequence, after):
                found[_without_common_start(sequence, after)] += times
        return found

    def _sequences(self, text: str) -> Iterator[str]:
        """The sequences of characters that may change, each of a character and those that join it."""
        codes = code_points(text)
        kinds = self._kinds.take(codes)
        if (unknown := kinds == _UNKNOWN).any():
            for code in set(codes[unknown].tolist()):
                self._kinds[code] = self._kind_of(chr(code))
            kinds = self._kinds.take(codes)
        joins = kinds == _JOINS
        starts = np.flatnonzero(((kinds[:-1] == _CHANGED) | joins[1:]) & ~joins[:-1])
        ends = starts + 1
        while (longer := joins[ends]).any():
            ends += longer
        return map(text.__getitem__, map(slice, starts.tolist(), ends.tolist()))

    def _kind_of(self, character: str) -> int:
        changes = self._differ(character, self._normalizer.Normalize(character))
        # After this syllable, vowels and final consonants of Hangul are joiners as well.
        is_joiner = _CLUSTER.fullmatch(f"가{character}")
        if is_joiner and (changes or not category(character).startswith("M") or character in _composing()):
            return _JOINS
        return _CHANGED if changes else _KEPT

    def _differ(self, before: str, after: str) -> bool:
        return before.casefold() != after.casefold() if self._lowercases else before != after


@cache
def _composing() -> frozenset[str]:
    """The marks that compose with a character before them. All others change nothing, such as the vowel signs
    of most Indic scripts, which are frequent."""
    parts = (decomposition(chr(code)).split() for code in range(_LAST_COMPOSED + 1))
    return frozenset(
        chr(int(part[1], 16)) for part in parts if len(part) == 2 and not part[0].startswith("<")
    )


def _without_common_start(before: str, after: str) -> Change:
    """The parts of two different texts that differ: a joiner is shown without the letter before it."""
    start = next(i for i in count() if before[i : i + 1] != after[i : i + 1])
    return Change(before[start:], after[start:])
