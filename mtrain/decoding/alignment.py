"""Word alignments out of attention. Letters in shapes: see `mtrain.model`."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Alignment = tuple[tuple[int, int], ...]  # (source word, target word), both from 0


def align(
    attention: npt.NDArray[np.floating], source_starts: Sequence[bool], target_starts: Sequence[bool]
) -> Alignment:
    """The source word that each target word looks at most, its pieces taken together.

    `attention` (T, S) is from target to source pieces, of which the further ones, such as EOS, do not count.
    `source_starts` and `target_starts` say which pieces begin a word; the first of each does.
    """
    if not source_starts or not target_starts:
        return ()
    source, target = np.cumsum(source_starts) - 1, np.cumsum(target_starts) - 1  # which word a piece is of
    words = np.zeros((target[-1] + 1, source[-1] + 1))
    np.add.at(words, (target[:, None], source[None]), attention[: len(target), : len(source)])
    return tuple((int(best), word) for word, best in enumerate(words.argmax(axis=1)))
