"""A hook that runs before every operation that changes the disk."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch

# Python's audit events for operations on a path, with the position of their argument `dir_fd`.
EVENTS = {"os.mkdir": 2, "os.rename": 2, "os.remove": 1, "os.rmdir": 1}
REMOVALS = ("os.remove", "os.rmdir")


class Operation(NamedTuple):
    """An operation on the disk that is about to happen."""

    name: str  # an audit event, "open", "os.fsync" or "write tensors"
    path: Path

    @property
    def needs_space(self) -> bool:
        """Whether it fails on a full disk."""
        return self.name not in REMOVALS


Handler = Callable[[Operation], None]
_handlers: list[Handler] = []


@contextmanager
def on_file_operation(handler: Handler) -> Iterator[None]:
    """Within the block, call `handler` before each operation of this process that changes the disk.

    These are opening a file to write, making, renaming and removing files and folders, flushing a file, and
    writing tensors with safetensors, for which Python has no audit event.
    """
    _install()
    module: Any = safetensors.torch
    fsync, serialize = os.fsync, module.serialize_file

    def flush(descriptor: int) -> None:
        handler(Operation("os.fsync", Path(f"/proc/self/fd/{descriptor}").readlink()))
        fsync(descriptor)

    def write(tensors: Any, filename: Any, *arguments: Any, **keywords: Any) -> None:
        handler(Operation("write tensors", Path(filename)))
        serialize(tensors, filename, *arguments, **keywords)

    _handlers.append(handler)
    os.fsync, module.serialize_file = flush, write
    try:
        yield
    finally:
        _handlers.remove(handler)
        os.fsync, module.serialize_file = fsync, serialize


@cache
def _install() -> None:
    """Python cannot remove an audit hook, so one hook serves all handlers."""
    sys.addaudithook(_audit)


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not _handlers or not (event in EVENTS or event == "open") or isinstance(arguments[0], int):
        return
    path = Path(os.fsdecode(arguments[0]))
    if event == "open":
        if not arguments[2] & (os.O_WRONLY | os.O_RDWR):
            return
    elif (folder := arguments[EVENTS[event]]) >= 0:
        path = Path(f"/proc/self/fd/{folder}").readlink() / path
    for handler in tuple(_handlers):  # a handler may remove itself
        handler(Operation(event, path))


def is_save(operation: Operation, run_dir: Path) -> bool:
    """Whether an operation is part of saving a checkpoint of a run or of publishing its best weights."""
    if not operation.path.is_relative_to(run_dir):
        return False
    place = operation.path.relative_to(run_dir).parts[:1]
    return place != () and place[0] in ("checkpoints", "model", ".model.tmp", ".model.old")
