"""Word alignments from cross-attention."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Alignment = tuple[tuple[int, int], ...]  # (source word, target word), counted from 0
Floats = npt.NDArray[np.float64] | npt.NDArray[np.float32]


def align(attention: Floats, source_starts: Sequence[bool], target_starts: Sequence[bool]) -> Alignment:
    """Align each target word to the source word that it attends to most, summed over tokens.

    `attention` (T, S) is from target to source tokens; tokens after the last word, such as EOS, are ignored.
    `source_starts` and `target_starts` mark the tokens that begin a word; the first token always does.
    """
    if not source_starts or not target_starts:
        return ()
    source, target = np.cumsum(source_starts) - 1, np.cumsum(target_starts) - 1  # the word of each token
    words = np.zeros((target[-1] + 1, source[-1] + 1))
    np.add.at(words, (target[:, None], source[None]), attention[: len(target), : len(source)])
    return tuple((int(best), word) for word, best in enumerate(words.argmax(axis=1)))
