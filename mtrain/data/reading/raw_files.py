"""The raw files of the corpora of a config: their hashes, and whether they change while they are read."""

import time
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import chain, zip_longest
from pathlib import Path

from mtrain.config.corpora import Corpus, Holdout
from mtrain.config.data import DataConfig
from mtrain.data.reading.corpus import content_hash
from mtrain.data.reading.digests import read_digests, require_unchanged, stamps_of, write_digests
from mtrain.data.reading.files import existing_files, files_of
from mtrain.data.reading.lines import Digests


class RawFiles:
    """The files of the training and validation corpora of a config, as they are when this object is made."""

    def __init__(
        self, data: DataConfig, data_folders: Sequence[Path] = (), missing: Sequence[str | None] = ()
    ):
        """Files whose SHA-256 is recorded in one of `data_folders` are not read to hash them. `missing` are
        the content hashes of the training and validation corpora whose files are missing, and None for the
        others."""
        self.data = data
        # First the time and the stamps, so that every later change of a file is noticed.
        self._started = time.time_ns()
        self._files = [(corpus, existing_files(corpus)) for corpus in train_and_validation(data)]
        self._stamps = stamps_of(chain.from_iterable(files for _, files in self._files))
        # Of all files hashed so far.
        self.digests: Digests = {}
        for folder in data_folders:
            self.digests |= read_digests(folder)
        self._missing = missing

    @cached_property
    def content_hashes(self) -> list[str]:
        """The content hash of each training corpus, then of each validation corpus. Files in `digests` are
        not read."""
        corpora = zip_longest(train_and_validation(self.data), self._missing)
        return [known or content_hash(corpus, self.digests) for corpus, known in corpora]

    @property
    def training_hashes(self) -> list[str]:
        """The content hash of each training corpus."""
        return self.content_hashes[: len(self.data.train)]

    def require_unchanged(self, corpora: Iterable[Corpus]) -> None:
        """Raise DataError if a file of these training or validation corpora has changed since this object was
        made, or no longer exists, so that its hash may not be the hash of the text that was read."""
        for corpus in corpora:
            # A pattern may match fewer files now.
            before = chain.from_iterable(files for known, files in self._files if known == corpus)
            require_unchanged(dict.fromkeys((*before, *files_of(corpus))), self._stamps)

    def record_digests(self, folder: Path) -> None:
        """Record the SHA-256 of the files that were hashed in a data folder; see `write_digests`."""
        write_digests(folder, self.digests, self._stamps, self._started)


def train_and_validation(data: DataConfig) -> list[Corpus]:
    """The training corpora, then the validation corpora."""
    return data.train + ([] if isinstance(data.validation, Holdout) else data.validation)
