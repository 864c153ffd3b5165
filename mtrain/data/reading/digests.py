"""Remembers the SHA-256 of raw files, so that files that have not changed are not read again to hash them."""

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from mtrain.data.reading.lines import Digests
from mtrain.errors import DataError, StorageError
from mtrain.regular_files import read_file
from mtrain.storage.atomic import write_atomically

SOURCES = "sources.json"  # in the data folder
Stamps = dict[Path, list[int]]  # of files: what changes if a file is written


def read_digests(folder: Path) -> Digests:
    """The recorded SHA-256 of the files whose size and times have not changed since."""
    digests: Digests = {}
    with suppress(OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
        for name, entry in json.loads(read_file(folder / SOURCES)).items():
            with suppress(OSError):  # the file is missing
                if _stamp(Path(name)) == entry["stamp"]:
                    digests[Path(name)] = bytes.fromhex(entry["sha256"])
    return digests


def write_digests(folder: Path, digests: Digests, stamps: Stamps, since: int) -> None:
    """Record the SHA-256 of files, unless all are recorded or the folder is not writable.

    A file is only recorded if it has not changed since before it was hashed: its stamp must be the same as in
    `stamps`, and older than `since`, when these were taken (in nanoseconds).
    """
    with suppress(OSError, StorageError):
        stable = {
            file: digest
            for file, digest in digests.items()
            if stamps.get(file) == _stamp(file) and max(stamps[file][1:]) < since
        }
        if stable.items() <= read_digests(folder).items():
            return
        entries = {
            str(file): {"stamp": stamps[file], "sha256": digest.hex()} for file, digest in stable.items()
        }
        folder.mkdir(exist_ok=True)
        write_atomically(folder / SOURCES, json.dumps(entries, indent=1) + "\n")


def stamps_of(files: Iterable[Path]) -> Stamps:
    """The stamps of the files that exist."""
    stamps: Stamps = {}
    for file in files:
        with suppress(OSError):
            stamps[file] = _stamp(file)
    return stamps


def require_unchanged(files: Iterable[Path], stamps: Stamps) -> None:
    """Raise DataError if one of the files has changed since the stamps of all of them were taken."""
    files = list(files)
    now = stamps_of(files)
    for file in files:
        if now.get(file) != stamps.get(file):
            raise DataError(f"{file}: changed while it was encoded; run again")


def _stamp(file: Path) -> list[int]:
    """What changes if a file is written: its size, its modification time, and the time of its last change,
    which cannot be set (on Windows, of its creation)."""
    status = file.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns]
