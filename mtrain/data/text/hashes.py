"""Hashes of texts, which find texts that are repeated, and of numbers, which draw pairs at random."""

import hashlib
from collections.abc import Sequence
from functools import cache

import numpy as np
import numpy.typing as npt
import regex
from xxhash import xxh3_64_intdigest

from mtrain.tokenizer.code_points import CodePoints, code_points
from mtrain.tokenizer.rows import Ids

Hashes = npt.NDArray[np.uint64]
MIX = np.uint64(0x9E3779B97F4A7C15)  # spreads numbers that differ in few bits
LETTERS = 0x40000  # code points, after which Unicode has no letters
_SPACE = ord(" ")
_SEVERAL = 2**32 - 1  # not a code point
_MARKS = regex.compile(r"(?V1)[[\p{Mn}\p{Mc}]--\p{Variation_Selector}]+")  # of letters, such as vowel signs
_TEXTS = 1000  # that are normalized at a time; more would not fit into the processor's cache


def hash_texts(texts: Sequence[str]) -> Hashes:
    """A hash of each text, the same in every process."""
    return np.fromiter(map(xxh3_64_intdigest, map(str.encode, texts)), np.uint64, len(texts))


def hash_pairs(sources: Hashes, targets: Hashes) -> Hashes:
    """A hash of each pair, from the hashes of its source and target."""
    return sources * MIX + targets


def hash_normalized(texts: Sequence[str]) -> Hashes:
    """A hash of the words of each text, without case, spaces and punctuation. A text without words is hashed
    as it is."""
    hashes: list[int] = []
    for start in range(0, len(texts), _TEXTS):
        some = texts[start : start + _TEXTS]
        codes = _words_and_spaces("\0".join([*some, ""]))
        is_space = codes == _SPACE
        codes = codes[~(is_space & np.append(False, is_space[:-1]))]  # of several spaces, the first one stays
        ends = np.flatnonzero(codes == 0)
        starts = np.append(0, ends[:-1] + 1)
        starts, ends = starts + (codes[starts] == _SPACE), ends - (codes[ends - 1] == _SPACE)
        words, size = codes.tobytes(), codes.itemsize
        for text, first, end in zip(some, (starts * size).tolist(), (ends * size).tolist(), strict=True):
            hashes.append(xxh3_64_intdigest(words[first:end] if first < end else text.encode()))
    return np.array(hashes, np.uint64)


def _words_and_spaces(text: str) -> CodePoints:
    """The code points of a text without case, with spaces in place of what is not part of a word."""
    points = code_points(text)
    codes = _replacements().take(points, mode="clip")
    if (several := codes == _SEVERAL).any():
        for character in map(chr, np.unique(points[several]).tolist()):
            text = text.replace(character, character.casefold())
        codes = _replacements().take(code_points(text), mode="clip")
    return codes


@cache
def _replacements() -> CodePoints:
    """The code point that replaces each one: itself, without case, if that is NUL or part of a word (as the
    regular expression `\\w` defines it, or a mark of a letter), otherwise a space. It is `_SEVERAL` if a
    character without case is several, such as "ss" for "ß". The last one stands for all others, which are no
    letters."""
    codes = np.full(LETTERS + 1, _SPACE, np.uint32)
    characters = "".join(map(chr, range(LETTERS)))
    for run in _MARKS.finditer(characters):
        codes[run.start() : run.end()] = range(*run.span())
    for code, folded in enumerate(map(str.casefold, characters)):
        if len(folded) > 1:
            codes[code] = _SEVERAL
        elif folded.isalnum() or folded in "_\0":
            codes[code] = ord(folded)
    return codes


def hash_numbers(numbers: Ids, key: str) -> Hashes:
    """A hash of the key and each number (SplitMix64)."""
    start = np.frombuffer(hashlib.blake2b(key.encode(), digest_size=8).digest(), np.uint64)
    with np.errstate(over="ignore"):
        x = numbers.astype(np.uint64) * MIX + start
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return x ^ (x >> np.uint64(31))


def unique(hashes: Hashes) -> Hashes:
    """The distinct hashes, sorted."""
    hashes = np.sort(hashes)  # several times as fast as np.unique
    distinct: Hashes = hashes[np.append(True, hashes[1:] != hashes[:-1])[: len(hashes)]]
    return distinct


def contains(others: Hashes, hashes: Hashes) -> npt.NDArray[np.bool_]:
    """Whether each hash is among `others`, which are sorted. If these are few, several times as fast as
    `np.isin`."""
    if not len(others):
        return np.zeros(len(hashes), np.bool_)
    found: npt.NDArray[np.bool_] = others.take(np.searchsorted(others, hashes), mode="clip") == hashes
    return found


def common(hashes: Hashes, others: Hashes) -> Hashes:
    """The hashes that are among `others`, which are sorted."""
    found: Hashes = hashes[contains(others, hashes)]
    return found
