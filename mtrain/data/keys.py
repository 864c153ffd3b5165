"""Hashes of texts, which find texts that are repeated."""

from collections.abc import Sequence
from functools import cache

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

Keys = npt.NDArray[np.uint64]
MIX = np.uint64(0x9E3779B97F4A7C15)  # spreads keys that differ in few bits
_LETTERS = 0x40000  # code points, after which Unicode has no letters
_SPACE = ord(" ")


def hash_texts(texts: Sequence[str]) -> Keys:
    """A hash of each text, the same in every process."""
    return np.fromiter(map(xxh3_64_intdigest, map(str.encode, texts)), np.uint64, len(texts))


def hash_pairs(sources: Keys, targets: Keys) -> Keys:
    """A hash of each pair, from those of its source and target."""
    return sources * MIX + targets


def normalize(texts: Sequence[str]) -> list[str]:
    """Each text as its words, without case, spaces and punctuation. Texts without words stay as they are."""
    if not texts:
        return []
    codes = np.frombuffer("\0".join(texts).casefold().encode("utf-32-le"), np.uint32)
    codes = _words_and_spaces().take(codes, mode="clip")
    is_space = codes == _SPACE
    repeated = np.append(is_space[:-1] & is_space[1:], False)[: len(codes)]
    words = codes[~repeated].tobytes().decode("utf-32-le").split("\0")
    return [word or text for word, text in zip(map(str.strip, words), texts, strict=True)]


@cache
def _words_and_spaces() -> npt.NDArray[np.uint32]:
    """The code point that replaces each one: itself if it is part of a word (as the regular expression `\\w`
    defines it) or NUL, otherwise a space. The last one stands for all others, which are no letters."""
    characters = map(chr, range(_LETTERS))
    is_word = np.fromiter((each.isalnum() or each in "_\0" for each in characters), np.bool_, _LETTERS)
    return np.append(np.where(is_word, np.arange(_LETTERS), _SPACE), _SPACE).astype(np.uint32)


def unique(keys: Keys) -> Keys:
    """The distinct keys, sorted."""
    keys = np.sort(keys)  # several times as fast as np.unique
    distinct: Keys = keys[np.append(True, keys[1:] != keys[:-1])[: len(keys)]]
    return distinct


def common(keys: Keys, wanted: Keys) -> Keys:
    """The keys that are among the `wanted` ones, which are sorted."""
    if not len(wanted):
        return wanted
    found: Keys = keys[wanted.take(np.searchsorted(wanted, keys), mode="clip") == keys]
    return found
