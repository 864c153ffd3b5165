"""Messages between a process and its worker processes, and the worker's side of them.

A message is a pickled object. Unpickling can run any code, so mtrain pickles nothing else: these bytes come
through a pipe from a process of the same command, never from a file or the network. Whatever else the worker
process prints while Python starts, for example in `sitecustomize`, precedes the line START, and is skipped.
"""

import os
import pickle
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any

import mtrain.errors as errors

START = b"mtrain: the worker process has started\n"  # the first line that the parent reads


def send(pipe: IO[bytes], message: object) -> None:
    """Write a message. Raises OSError."""
    pickle.dump(message, pipe, protocol=5)  # copies one large array at a time, not the whole message
    pipe.flush()


def receive(pipe: IO[bytes]) -> Any:
    """Read a message. Raises EOFError if the other process has ended; ValueError if this process cannot make
    the object, for example because mtrain has been updated meanwhile; and MtrainError if the files of the
    object, such as a tokenizer, are missing or damaged."""
    try:
        return pickle.load(pipe)
    except pickle.UnpicklingError as error:  # the message is incomplete
        raise EOFError from error
    except (ImportError, AttributeError, LookupError, TypeError) as error:
        raise ValueError(f"a message cannot be read: {error}") from error


def skip_to_start(pipe: IO[bytes]) -> None:
    """Read up to the line START. Raises EOFError if the worker process ends before it."""
    while not (line := pipe.readline()).endswith(START):
        if not line:
            raise EOFError


def serve() -> None:
    """The worker process: answer messages until the pipe is closed. The first one is a function, whose result
    is the function that is called with each of the others. The parent raises the errors of both."""
    messages, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # nothing else must write to the pipe
    with suppress(EOFError, BrokenPipeError):  # the parent has ended, or closed the pipes
        answers.write(START)
        work, error = _answer(lambda prepare: prepare(), messages)
        send(answers, (None, error))
        if error is not None:
            sys.exit(1)
        while True:
            send(answers, _answer(work, messages))


def _answer(function: Callable[[Any], Any], messages: IO[bytes]) -> tuple[Any, Exception | None]:
    """What the function returns or raises for the next message. Raises EOFError if there is none."""
    try:
        message = receive(messages)
    except (ValueError, MemoryError, errors.MtrainError) as error:
        return None, _portable(error)
    try:
        return function(message), None
    except Exception as error:
        return None, _portable(error)


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
