"""The raw files of a config: their SHA-256, and whether they change while they are read.

Data folders record the hashes, so that unchanged files are not hashed again.
"""

import hashlib
import json
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import chain, zip_longest
from pathlib import Path

from mtrain.config.sections.corpora import Corpus, Holdout, HubCorpus, ToyCorpus
from mtrain.config.sections.data import DataConfig
from mtrain.data.reading.files import existing_files, files_of, load_dataset, toy_pairs
from mtrain.data.reading.lines import Digests
from mtrain.errors import DataError, StorageError
from mtrain.regular_files import read_file
from mtrain.storage.atomic import write_atomically

SOURCES = "sources.json"  # in the data folder


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
        self._stamps = {file: _stamp(file) for _, files in self._files for file in files}
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

    def require_unchanged(self, corpora: Iterable[Corpus]) -> None:
        """Raise DataError if a file of these training or validation corpora has changed since this object was
        made, or no longer exists, so that its hash may not be the hash of the text that was read."""
        for corpus in corpora:
            # A pattern may match fewer files now.
            before = chain.from_iterable(files for known, files in self._files if known == corpus)
            for file in dict.fromkeys((*before, *files_of(corpus))):
                if _stamp(file) != self._stamps.get(file):
                    raise DataError(f"{file}: changed while it was read; run again")

    def record_digests(self, folder: Path) -> None:
        """Record the SHA-256 of the files that were hashed in a data folder, unless all are recorded or the
        folder is not writable. Only files whose stamp is unchanged, and older than this object, are recorded:
        they certainly contain what was hashed."""
        with suppress(OSError, StorageError):
            stable = {
                file: digest
                for file, digest in self.digests.items()
                if (stamp := _stamp(file))
                and stamp == self._stamps.get(file)
                and max(stamp[1:]) < self._started
            }
            if stable.items() <= read_digests(folder).items():
                return
            entries = {
                str(file): {"stamp": self._stamps[file], "sha256": digest.hex()}
                for file, digest in stable.items()
            }
            folder.mkdir(exist_ok=True)
            write_atomically(folder / SOURCES, json.dumps(entries, indent=1) + "\n")


def train_and_validation(data: DataConfig) -> list[Corpus]:
    """The training corpora, then the validation corpora."""
    return data.train + ([] if isinstance(data.validation, Holdout) else data.validation)


def content_hash(corpus: Corpus, digests: Digests | None = None) -> str:
    """SHA-256 of the contents of a corpus, without modification times. Files in `digests` are not read; the
    others are added to it."""
    digests = {} if digests is None else digests
    digest, files = hashlib.sha256(), files_of(corpus)
    if isinstance(corpus, HubCorpus) and not files:
        digest.update(load_dataset(corpus)._fingerprint.encode())
    elif isinstance(corpus, ToyCorpus):
        digest.update(json.dumps(toy_pairs(corpus.toy)).encode())
    for file in files:
        if file not in digests:
            with file.open("rb") as stream:
                digests[file] = hashlib.file_digest(stream, "sha256").digest()
        digest.update(digests[file])
    return digest.hexdigest()


def read_digests(folder: Path) -> Digests:
    """The recorded SHA-256 of the files whose size and times have not changed since."""
    digests: Digests = {}
    with suppress(OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
        for name, entry in json.loads(read_file(folder / SOURCES)).items():
            if (stamp := _stamp(Path(name))) and stamp == entry["stamp"]:
                digests[Path(name)] = bytes.fromhex(entry["sha256"])
    return digests


def _stamp(file: Path) -> list[int] | None:
    """What changes if a file is written: its size, its modification time, and the time of its last change,
    which cannot be set (on Windows, of its creation). None if the file is missing."""
    with suppress(OSError):
        status = file.stat()
        return [status.st_size, status.st_mtime_ns, status.st_ctime_ns]
    return None
