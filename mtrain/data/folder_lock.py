"""Locks a data folder while it is written. A complete data folder is only read, and needs no lock."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from mtrain.data.data_folder import SHARD_NAME, TOKENIZER
from mtrain.data.shards import shard_file
from mtrain.data.sources import SOURCES
from mtrain.data.summary import SUMMARY, VALIDATION, read_summary
from mtrain.errors import ModelError, StorageError, UsageError
from mtrain.storage.atomic import recover
from mtrain.storage.locks import wait_for_lock

LOCK = ".lock"  # the file that is locked while the folder is written
_LEFTOVERS = [f".{name}.tmp" for name in (SUMMARY, VALIDATION, SOURCES, "shard-*.safetensors")]


def is_begun(folder: Path) -> bool:
    """Whether encoding into a data folder was begun, so that the data has been checked."""
    return (folder / SUMMARY).exists()


def is_complete(folder: Path) -> bool:
    """Whether a data folder has everything that its summary describes. Shards are not read."""
    with suppress(ModelError, OSError):
        summary = read_summary(folder)
        sizes = [entry["size"] for entry in summary.get("shards", ())]
        found = [shard_file(folder, index).stat().st_size for index in range(len(sizes))]
        return bool(summary.get("complete")) and found == sizes
    return False


@contextmanager
def locked_data_folder(folder: Path, shared: bool) -> Iterator[None]:
    """Create a data folder, lock it against other processes, and clean up after a crash. While another
    process holds the lock, wait. A thread may lock a folder again.

    Raises UsageError if a `shared` folder contains files that mtrain did not write and would overwrite;
    StorageError if the folder cannot be written.
    """
    with ExitStack() as stack:
        try:
            _require_own(folder, shared)
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(wait_for_lock(folder / LOCK))
            for file in [found for pattern in _LEFTOVERS for found in folder.glob(pattern)]:
                file.unlink(missing_ok=True)
            recover(folder / TOKENIZER)
        except OSError as error:
            raise StorageError(f"{folder}: cannot write: {error.strerror}") from error
        yield


@contextmanager
def locked_unless_complete(folder: Path, shared: bool) -> Iterator[None]:
    """Lock a data folder as `locked_data_folder` does, unless it is complete already, or once another
    process has completed it: then it need not be writable."""
    with ExitStack() as stack:
        if not is_complete(folder):
            stack.enter_context(locked_data_folder(folder, shared))
            if is_complete(folder):
                stack.close()
        yield


def _require_own(folder: Path, shared: bool) -> None:
    """Raise UsageError if a shared folder contains files that mtrain did not write and would overwrite."""
    if not shared or not folder.exists() or (folder / LOCK).exists():
        return
    with suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        if json.loads((folder / SUMMARY).read_bytes())["fingerprint"]:
            return
    names = {SUMMARY, VALIDATION, TOKENIZER, SOURCES}
    found = (file.name for file in folder.iterdir())
    if foreign := sorted(name for name in found if name in names or SHARD_NAME.fullmatch(name)):
        raise UsageError(
            f"{folder}: is not a data folder, and would be overwritten ({foreign[0]}); "
            "give another data.folder"
        )
