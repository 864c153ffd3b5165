"""Changes of the rows of a window, for each epoch anew, such as subword sampling.

A change is made in blocks of rows and depends only on the seed, the epoch, the window and the rows. Its
result is stored in temporary files, so that memory does not depend on the size of a window.
"""

import random
from collections.abc import Callable, Generator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

import numpy as np

from mtrain.data.rewriting.throttle import Throttle
from mtrain.data.store.encoded import EncodedCorpus
from mtrain.errors import StorageError
from mtrain.tokenizer.rows import Ids, Rows

BLOCK = 10_000  # rows that are changed at a time
Sides = tuple[Rows, Rows]  # source, target
Key = tuple[int, ...]  # the epoch or, if it has several windows, the epoch and the window
Blocks = Generator[Sides, None, None]
# Yields the new rows of a corpus a block at a time, each when the throttle allows it.
Rewrite = Callable[[EncodedCorpus, Key, Throttle], Blocks]


def replace_rows(corpus: EncodedCorpus, blocks: Blocks, folder: Path, throttle: Throttle) -> EncodedCorpus:
    """A corpus with the rows of `blocks` in place of its own, in the same order. Further rows are added to
    it. The ids are written to temporary files in `folder`.

    Raises StorageError if they cannot be written; CancelledError if they are no longer needed.
    """
    lengths = [np.empty((2, 0), np.int32)]
    try:
        # The files have no names; their space is freed when the corpus is garbage-collected.
        with TemporaryFile(dir=folder) as source, TemporaryFile(dir=folder) as target, closing(blocks):
            for block in blocks:
                throttle.require_needed()
                lengths.append(np.stack([side.lengths for side in block], dtype=np.int32))
                for file, side in zip((source, target), block, strict=True):
                    file.write(side.ids.astype(corpus.id_type).tobytes())
            of_source, of_target = np.concatenate(lengths, axis=1)
            new = Rows(_map(source, corpus), of_source), Rows(_map(target, corpus), of_target)
            return corpus.with_rows(new)
    except OSError as error:
        raise StorageError(f"{folder}: cannot write: {error.strerror or error}") from error


def make_generator(*parts: object) -> random.Random:
    """Random numbers that depend on some values."""
    return random.Random(" ".join(map(str, parts)))


def _map(file: IO[bytes], corpus: EncodedCorpus) -> Ids:
    file.flush()
    return np.memmap(file, corpus.id_type, "r")
