"""File locks, so that only one process at a time writes to a file or folder."""

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from mtrain.errors import UsageError, cannot_write
from mtrain.regular_files import read_file, require_plausible

log = logging.getLogger(__name__)


def try_lock(file: Path) -> FileLock | None:
    """Lock `file`, which is created if it does not exist; return None if it is locked already.

    The operating system releases the lock when the process ends, however it ends. File systems that do not
    support locks cause a warning. Raises OSError if the file cannot be created.
    """
    _create(file)
    lock = FileLock(file, fallback_to_soft=False)  # a soft lock would remain when a process is killed
    return lock if _acquire(lock, file, wait=False) else None


@contextmanager
def only_writer(path: Path, what: str, alternative: str) -> Iterator[None]:
    """Let only one process at a time write an output: a file or folder, as `what` says. The lock file beside
    it is removed at the end. Raises UsageError if another process is writing it; the message names the
    `alternative`. Raises StorageError if the lock file cannot be created."""
    file = path.with_name(f".{path.name}.lock")
    try:
        lock = try_lock(file)
    except OSError as error:
        raise cannot_write(path, error) from error
    if lock is None:
        raise UsageError(f"{path}: another process is writing this {what}; wait, or give {alternative}")
    try:
        yield
    finally:
        with suppress(OSError):
            file.unlink()  # safe: FileLock detects that a file was removed after it was opened
        lock.release()


@contextmanager
def wait_for_lock(file: Path) -> Iterator[None]:
    """Lock `file` as `try_lock` does, but wait while another process holds the lock, which is logged. The
    thread that holds the lock may take it again."""
    _create(file)
    lock = FileLock(file, is_singleton=True, fallback_to_soft=False)
    if not _acquire(lock, file, wait=False):
        log.info("%s: in use by %s; waiting", file.parent, owner_of(file))
        _acquire(lock, file, wait=True)
    try:
        record_owner(file)
        yield
    finally:
        lock.release()


def _create(file: Path) -> None:
    """Create a file without changing its modification time. Raises OSError if that fails, or if something
    else is there, such as a pipe, which would block."""
    with suppress(FileNotFoundError):
        require_plausible(file)
    file.open("ab").close()


def _acquire(lock: FileLock, file: Path, wait: bool) -> bool:
    """Whether the lock is held now, or the file system does not support locks."""
    try:
        lock.acquire(timeout=-1 if wait else 0, poll_interval=0.2)
    except Timeout:
        return False
    except (OSError, NotImplementedError):
        log.warning("%s: cannot be locked; make sure that only one process writes here", file)
    return True


def record_owner(file: Path) -> None:
    """Write the name of this process beside a file that it has locked."""
    with suppress(OSError):  # the lock holds even if the disk is full
        text = f"process {os.getpid()} on {socket.gethostname()}\n"
        owner_file(file).unlink(missing_ok=True)  # it might be a link to another file, or a pipe
        owner_file(file).write_text(text, encoding="utf-8")


def owner_of(file: Path) -> str:
    """The process that holds a lock, or `another process` if it is not known."""
    with suppress(OSError):
        name = read_file(owner_file(file), 1000).decode("utf-8", "replace").strip()
        return name or "another process"
    return "another process"


def owner_file(file: Path) -> Path:
    """The file that names the process that locked `file`. It remains when the lock is released."""
    return file.with_name(f"{file.name}-owner")
