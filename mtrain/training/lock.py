"""One process at a time in a run folder."""

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mtrain.errors import StorageError, UsageError
from mtrain.storage import lock

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
            if not lock(stream):
                stream.seek(0)
                holder = stream.read().strip() or "another process"
                raise UsageError(f"{run_dir}: {holder} works here; wait, or give another --run-dir")
        except (ImportError, OSError):
            log.warning("%s: cannot be locked; see to it that only one process works here", run_dir)
        stream.truncate(0)
        stream.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        stream.flush()
        yield
