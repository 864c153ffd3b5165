"""Changes of the rows of a window, for each epoch anew, such as subword sampling.

A change is made in blocks of rows and depends only on the seed, the epoch, the window and the rows. Its
result is stored in temporary files, so that memory does not depend on the size of a window.
"""

import random
from collections.abc import Callable, Generator
from concurrent.futures import CancelledError
from contextlib import closing
from pathlib import Path

import numpy as np

from mtrain.data.store.shards import EncodedCorpus
from mtrain.storage.temporary import TemporaryStream
from mtrain.tokenizer.rows import Rows, Sides

BLOCK = 10_000  # rows that are changed at a time
Key = tuple[int, ...]  # the epoch or, if it has several windows, the epoch and the window
Blocks = Generator[Sides, None, None]


def never() -> bool:
    """For work that is not cancelled."""
    return False


def raise_if_cancelled(cancelled: Callable[[], bool]) -> None:
    """Raise CancelledError if `cancelled` returns true."""
    if cancelled():
        raise CancelledError


# Yields the new rows of a corpus, a block at a time, unless a function returns true: then they are no longer
# needed.
Rewrite = Callable[[EncodedCorpus, Key, Callable[[], bool]], Blocks]


def replace_rows(
    corpus: EncodedCorpus, blocks: Blocks, folder: Path, cancelled: Callable[[], bool] = never
) -> EncodedCorpus:
    """A corpus with the rows of `blocks` in place of its own, in the same order. Further rows are added to
    it. The ids are written to temporary files in `folder`.

    Raises StorageError if they cannot be written; CancelledError if `cancelled` returns true.
    """
    lengths = [np.empty((2, 0), np.int32)]
    files = TemporaryStream(folder), TemporaryStream(folder)
    with closing(blocks):
        for block in blocks:
            raise_if_cancelled(cancelled)
            lengths.append(np.stack([side.lengths for side in block], dtype=np.int32))
            for file, side in zip(files, block, strict=True):
                file.write(side.ids.astype(corpus.id_type).tobytes())
    of_sides = zip(files, np.concatenate(lengths, axis=1), strict=True)
    source, target = (Rows(file.as_array(corpus.id_type), of_side) for file, of_side in of_sides)
    return corpus.with_rows((source, target))


def make_generator(*parts: object) -> random.Random:
    """Random numbers that depend on some values."""
    return random.Random(" ".join(map(str, parts)))
