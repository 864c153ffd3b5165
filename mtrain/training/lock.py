"""One process at a time in a run folder."""

import errno
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mtrain.errors import StorageError, UsageError

log = logging.getLogger(__name__)


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Hold a run folder, which exists, until the block or the process ends, however it ends.

    Raises UsageError naming the process that holds it already. File systems without locks get a warning.
    """
    file = run_dir / ".lock"
    try:
        stream = file.open("a+", encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{run_dir}: cannot write: {error.strerror}") from None
    with stream:
        try:
            import fcntl

            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (ImportError, OSError) as error:
            if isinstance(error, OSError) and error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                stream.seek(0)
                holder = stream.read().strip() or "another process"
                raise UsageError(f"{run_dir}: {holder} works here; wait, or give another --run-dir") from None
            log.warning("%s: cannot be locked; see to it that only one process works here", run_dir)
        stream.truncate(0)
        stream.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        stream.flush()
        yield
