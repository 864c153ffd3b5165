"""Finds repeated items in bounded memory."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from mtrain.data.text.hashes import Hashes, contains, unique
from mtrain.tokenizer.rows import Indices

_SPACE = 2**64
_PART = 4_000_000  # keys, about, among which repeated ones are looked for at a time
_CHUNK = 2**20  # keys that are read at a time


def find_repeated(keys: Hashes, codes: npt.NDArray[np.uint8]) -> Iterator[Indices]:
    """Yield the indices of the keys that repeat an earlier one, each once, in groups. Only keys with code 0
    count; the codes at indices that were yielded may be changed.

    Keys are hashes of 64 bits. The arrays may be mapped from files, which are read once for each `_PART`
    keys. Memory takes about 40 bytes for each key of a part, however often keys are repeated.
    """
    parts = max(1, -(-len(keys) // _PART))
    for i in range(parts):  # keys in the same range of hashes
        lowest, highest = (np.uint64(key) for key in (i * _SPACE // parts, (i + 1) * _SPACE // parts - 1))
        first_indices, first_keys = [np.empty(0, np.int64)], [keys[:0]]  # of the first ones in their chunks
        for start in range(0, len(keys), _CHUNK):
            chunk = keys[start : start + _CHUNK]
            in_range = (chunk >= lowest) & (chunk <= highest) & (codes[start : start + _CHUNK] == 0)
            indices = np.flatnonzero(in_range) + start
            found = chunk[in_range]
            is_repeat = _repeats(found)
            yield indices[is_repeat]
            first_indices.append(indices[~is_repeat])
            first_keys.append(found[~is_repeat])
        yield np.concatenate(first_indices)[_repeats(np.concatenate(first_keys))]


def _repeats(keys: Hashes) -> npt.NDArray[np.bool_]:
    """Which keys repeat an earlier one."""
    ordered = np.sort(keys)
    repeated = unique(ordered[1:][ordered[1:] == ordered[:-1]])
    several = np.flatnonzero(contains(repeated, keys))  # whose keys are not unique
    several = several[np.argsort(keys[several], kind="stable")]
    is_repeat = np.zeros(len(keys), np.bool_)
    is_repeat[several[1:][keys[several[1:]] == keys[several[:-1]]]] = True
    return is_repeat
