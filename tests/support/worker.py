"""A module for worker processes, which do what their tasks say."""

import os
import signal
import sys
import time
from pathlib import Path

from mtrain.errors import DataError
from mtrain.worker_messages import Answer, Message, Receive
from mtrain.worker_messages import serve as serve_tasks

while (gate := os.environ.get("TEST_GATE")) and not Path(gate).exists():  # as if importing took long
    time.sleep(0.01)


def serve() -> None:
    """The worker process."""
    serve_tasks(_prepare)


def _prepare(receive: Receive) -> Answer:
    settings = receive()
    if file := settings.header.get("read"):
        Path(file).read_bytes()

    def answer(task: Message) -> Message:
        action, value = task.header["action"], task.header["value"]
        if action == "refuse":
            raise DataError(f"refused: {value}")
        if action == "divide":
            return Message({"result": 1 // value})
        if action == "exit":
            sys.exit(value)
        if action == "end once":  # the file says whether that was before
            kill_unless_exists(Path(value))
        if action == "be killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if action == "compute":  # for some seconds
            end = time.process_time() + value
            while time.process_time() < end:
                pass
        return Message({"result": value, "pid": os.getpid()}, (b"".join(settings.contents),))

    return answer


def kill_unless_exists(file: Path) -> None:
    """Create a file, and kill this process, unless the file exists."""
    if not file.exists():
        file.touch()
        os.kill(os.getpid(), signal.SIGKILL)
