"""Messages between a process and its worker processes, and the worker's side of them.

A message is a pickled object. Unpickling can run any code, so mtrain pickles nothing else: these bytes come
through a pipe from a process of the same command, never from a file or the network.
"""

import os
import pickle
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any, NamedTuple

import mtrain.errors as errors


class Answer(NamedTuple):
    """What a worker process answers."""

    result: Any
    error: Exception | None = None  # instead of a result


def send(pipe: IO[bytes], message: object) -> None:
    """Write a message. Raises OSError."""
    pickle.dump(message, pipe, protocol=5)  # copies one large array at a time, not the whole message
    pipe.flush()


def receive(pipe: IO[bytes]) -> Any:
    """Read a message. Raises EOFError if the other process has ended."""
    try:
        return pickle.load(pipe)
    except pickle.UnpicklingError as error:  # the message is incomplete
        raise EOFError from error


def serve() -> None:
    """The worker process: answer messages until the pipe is closed. The first one is a function, whose result
    is the function that is called with each of the others. The parent raises the errors of both."""
    messages, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # nothing else must write to the pipe
    with suppress(EOFError, BrokenPipeError):  # the parent has ended, or closed the pipes
        work, error = _answer(receive(messages))
        send(answers, Answer(None, error))
        if error is not None:
            sys.exit(1)
        while True:
            send(answers, _answer(work, receive(messages)))


def _answer(function: Callable[..., Any], *arguments: object) -> Answer:
    try:
        return Answer(function(*arguments))
    except Exception as error:
        return Answer(None, _portable(error))


def _portable(error: Exception) -> Exception:
    """The error, or one with its message that any process can unpickle, and with its traceback as a note."""
    if type(error).__module__ == errors.__name__:
        return error
    message = str(error) or type(error).__name__
    if isinstance(error, MemoryError):
        return MemoryError(message)
    unexpected = RuntimeError(message)
    unexpected.add_note(f"In a worker process:\n{traceback.format_exc()}")
    return unexpected
