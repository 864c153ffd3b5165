"""File locks, so that only one process at a time writes to a file or folder."""

import logging
from pathlib import Path

from filelock import FileLock, Timeout

log = logging.getLogger(__name__)


def try_lock(file: Path) -> FileLock | None:
    """Lock `file`, which is created if it does not exist; return None if it is locked already.

    The operating system releases the lock when the process ends, however it ends. File systems that do not
    support locks cause a warning. Raises OSError if the file cannot be created.
    """
    file.open("ab").close()  # creates it without changing its modification time
    lock = FileLock(file)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return None
    except (OSError, NotImplementedError):
        log.warning("%s: cannot be locked; make sure that only one process writes here", file)
    return lock
