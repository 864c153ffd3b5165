"""A module for worker processes, which do what their tasks say."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from mtrain.errors import DataError

while (gate := os.environ.get("TEST_GATE")) and not Path(gate).exists():  # as if importing took long
    time.sleep(0.01)


class Action(NamedTuple):
    """What a process does."""

    name: str
    value: Any


def prepare(read: str = "", settings: bytes = b"") -> Callable[[Action], Any]:
    """Makes the function that does an action in a worker process. Reads the file `read` first."""
    if read:
        Path(read).read_bytes()

    def act(task: Action) -> Any:
        action, value = task
        if action == "refuse":
            raise DataError(f"refused: {value}")
        if action == "divide":
            return 1 // value
        if action == "exit":
            sys.exit(value)
        if action == "end once":  # the file says whether that was before
            kill_unless_exists(Path(value))
        if action == "be killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if action == "be killed while answering":
            return [b"x" * 2**20, Deadly()]
        if action == "compute":  # for some seconds
            end = time.process_time() + value
            while time.process_time() < end:
                pass
        if action == "variable":
            return os.environ.get(value)
        return {"pid": os.getpid(), "settings": settings}.get(action, value)

    return act


class Deadly:
    """Kills the process that pickles it."""

    def __reduce__(self) -> str:
        os.kill(os.getpid(), signal.SIGKILL)
        return ""


def kill_unless_exists(file: Path) -> None:
    """Create a file, and kill this process, unless the file exists."""
    if not file.exists():
        file.touch()
        os.kill(os.getpid(), signal.SIGKILL)
