"""Messages between a process and its worker processes, and the worker's side of them.

A message is a line of JSON that is followed by bytes.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any, NamedTuple

import mtrain.errors as errors


class Message(NamedTuple):
    """What processes send each other."""

    header: dict[str, Any]  # for JSON
    contents: tuple[bytes, ...] = ()


Receive = Callable[[], Message]
Answer = Callable[[Message], Message]


def send(pipe: IO[bytes], message: Message) -> None:
    """Write a message. Raises OSError."""
    sizes = list(map(len, message.contents))
    pipe.write(json.dumps({**message.header, "sizes": sizes}).encode() + b"\n")
    for content in message.contents:
        pipe.write(content)
    pipe.flush()


def receive(pipe: IO[bytes]) -> Message:
    """Read a message. Raises EOFError if the other process has ended."""
    if not (line := pipe.readline()).endswith(b"\n"):
        raise EOFError
    header: dict[str, Any] = json.loads(line)
    sizes = header.pop("sizes")
    contents = tuple(pipe.read(size) for size in sizes)
    if list(map(len, contents)) != sizes:
        raise EOFError
    return Message(header, contents)


def serve(prepare: Callable[[Receive], Answer]) -> None:
    """The worker process: answer tasks until the pipe is closed. `prepare` is given a function that receives
    the settings, and returns the function that answers a task. The parent raises the errors of both."""
    parent = _Parent()
    with suppress(_ParentEndedError):
        try:
            answer = prepare(parent.receive)
        except Exception as error:
            parent.send(Message(_describe_error(error)))
            sys.exit(1)
        parent.send(Message({}))
        while True:
            task = parent.receive()
            try:
                result = answer(task)
            except Exception as error:
                result = Message(_describe_error(error))
            parent.send(result)


class _ParentEndedError(Exception):
    """The parent process has ended, or closed the pipes."""


class _Parent:
    """The worker's side of the pipes."""

    def __init__(self) -> None:
        self._tasks, self._answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # nothing else must write to the pipe

    def receive(self) -> Message:
        """The next message. Raises _ParentEndedError."""
        try:
            return receive(self._tasks)
        except (OSError, EOFError) as error:
            raise _ParentEndedError from error

    def send(self, message: Message) -> None:
        """Send a message. Raises _ParentEndedError."""
        try:
            send(self._answers, message)
        except OSError as error:
            raise _ParentEndedError from error


def _describe_error(error: Exception) -> dict[str, str]:
    """An exception as the header of a message."""
    expected = isinstance(error, errors.MtrainError | MemoryError)
    details = "" if expected else traceback.format_exc()
    return {"error": str(error), "kind": type(error).__name__, "details": details}


def to_exception(error: str, kind: str, details: str) -> Exception:
    """The exception that the header of a message describes; a RuntimeError if it was not expected."""
    unexpected = MemoryError if kind == "MemoryError" else RuntimeError
    exception: Exception = getattr(errors, kind, unexpected)(error or kind)
    if details:
        exception.add_note(f"In a worker process:\n{details}")
    return exception
