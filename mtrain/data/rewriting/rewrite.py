"""Changes of the rows of a window, for each epoch anew, such as subword sampling.

A change is made in blocks of rows and depends only on the seed, the epoch, the window and the rows. Its
result is stored in temporary files, so that memory does not depend on the size of a window.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

import numpy as np

from mtrain.data.rewriting.throttle import Pace
from mtrain.data.store.encoded import EncodedCorpus
from mtrain.errors import StorageError
from mtrain.tokenizer.rows import Ids, Rows
from mtrain.tokenizer.tokenizer import Tokenizer

BLOCK = 10_000  # rows that are changed at a time
Sides = tuple[Rows, Rows]  # source, target
Key = tuple[int, ...]  # the epoch or, if it has several windows, the epoch and the window
Rewrite = Callable[[EncodedCorpus, Key, Pace], EncodedCorpus]


class ScratchStorage:
    """Temporary files for token ids."""

    def __init__(self, tokenizer: Tokenizer, folder: Path):
        largest = max(tokenizer.source_vocab_size, tokenizer.target_vocab_size)
        self._dtype = np.dtype(np.uint16 if largest <= 2**16 else np.int32)
        self._folder = folder

    def replace_rows(self, corpus: EncodedCorpus, blocks: Iterable[Sides], pace: Pace) -> EncodedCorpus:
        """A corpus with the rows of `blocks` in place of its own, in the same order. Further rows are added
        to it. Raises StorageError if they cannot be written; CancelledError if they are no longer needed."""
        try:
            # The files have no names; their space is freed when the corpus is garbage-collected.
            with TemporaryFile(dir=self._folder) as source, TemporaryFile(dir=self._folder) as target:
                files, lengths = (source, target), [np.empty((2, 0), np.int32)]
                for block in blocks:
                    pace.require_needed()
                    lengths.append(np.stack([side.lengths for side in block], dtype=np.int32))
                    for file, side in zip(files, block, strict=True):
                        file.write(side.ids.astype(self._dtype).tobytes())
                of_source, of_target = np.concatenate(lengths, axis=1)
                return corpus.with_ids((self._map(source), self._map(target)), (of_source, of_target))
        except OSError as error:
            raise StorageError(f"{self._folder}: cannot write: {error.strerror or error}") from error

    def _map(self, file: IO[bytes]) -> Ids:
        file.flush()
        return np.memmap(file, self._dtype, "r")
