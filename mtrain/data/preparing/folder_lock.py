"""Locks a data folder while it is written. A complete data folder is only read, and needs no lock."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from mtrain.data.pairs.rejections import REJECTIONS
from mtrain.data.reading.digests import SOURCES
from mtrain.data.store.folder import CHECK, SHARD_NAME, SUMMARY, TOKENIZER, VALIDATION, DataFolder
from mtrain.errors import StorageError, UsageError
from mtrain.storage.atomic import recover
from mtrain.storage.locks import owner_file, wait_for_lock

log = logging.getLogger(__name__)

LOCK = ".lock"  # the file that is locked while the folder is written
_FILES = (SUMMARY, VALIDATION, SOURCES, CHECK, REJECTIONS)  # and shards, and the folder of the tokenizer
_LEFTOVERS = [f".{name}.*tmp" for name in (*_FILES, "shard-*.safetensors")]


@contextmanager
def locked_unless_complete(folder: DataFolder) -> Iterator[None]:
    """Lock a data folder as `locked_data_folder` does, unless it is complete already, or once another
    process has completed it: then it need not be writable."""
    with ExitStack() as stack:
        if reason := folder.why_incomplete():
            if (folder.path / SUMMARY).exists():  # otherwise it is a new folder
                log.info("data: %s", reason)
            stack.enter_context(locked_data_folder(folder, reason))
            folder.reload()  # another process may have completed it, while this one waited for the lock
            if folder.why_incomplete() is None:
                stack.close()
        yield


@contextmanager
def locked_data_folder(folder: DataFolder, reason: str | None = None) -> Iterator[None]:
    """Create a data folder, lock it against other processes, and clean up after a crash. While another
    process holds the lock, wait. A thread may lock a folder again.

    Raises UsageError if a shared folder contains files that mtrain did not write and would overwrite;
    StorageError, which gives the `reason` for writing, if the folder cannot be written.
    """
    path = folder.path
    with ExitStack() as stack:
        try:
            _require_no_foreign_files(folder)
            path.mkdir(parents=True, exist_ok=True)
            stack.enter_context(wait_for_lock(path / LOCK))
            leftovers = [file for pattern in _LEFTOVERS for file in path.glob(pattern)]
            for file in leftovers:
                file.unlink(missing_ok=True)
            recover(path / TOKENIZER)
        except OSError as error:
            cannot = f"{path}: cannot write: {error.strerror}"
            raise StorageError(f"{cannot} ({reason})" if reason else cannot) from error
        yield


def _require_no_foreign_files(folder: DataFolder) -> None:
    """Raise UsageError if a shared folder contains files that mtrain did not write and would overwrite."""
    path = folder.path
    if not folder.shared or not path.exists() or owner_file(path / LOCK).exists() or folder.summary:
        return
    names = (file.name for file in path.iterdir())
    if foreign := sorted(
        name for name in names if name in (*_FILES, TOKENIZER) or SHARD_NAME.fullmatch(name)
    ):
        raise UsageError(
            f"{path}: is not a data folder, and would be overwritten ({foreign[0]}); give another data.folder"
        )
