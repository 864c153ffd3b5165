"""Kills and full disks at each file operation of a save, and at every size that a file may grow to."""

import errno
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from mtrain.checkpoint import checkpoint
from mtrain.checkpoint.checkpoint import checkpoint_folders
from mtrain.checkpoint.model_folder import load_model
from mtrain.errors import ModelError
from mtrain.training import loop
from tortures.children import Marks, in_child
from tortures.training import EVERY, Outcome, fit, result_of, sound

Strike = Callable[[int, bool], None]  # number of the operation, from 0, and whether it takes room on the disk
_CHANGES = ("os.mkdir", "os.rename")
_REMOVALS = ("os.remove", "os.rmdir")


def strike_at(marks: Marks, strike: Strike) -> None:
    """Call `strike` before each file operation inside a save: opening to write, making, renaming, removing,
    flushing, and writing tensors, which no audit event tells of."""

    def operation(event: str, arguments: tuple[object, ...]) -> None:
        writes = event == "open" and int(arguments[2]) & (os.O_WRONLY | os.O_RDWR)  # type: ignore[call-overload]
        if marks.saving and (writes or event in _CHANGES + _REMOVALS):
            marks.operations += 1
            strike(marks.operations - 1, event not in _REMOVALS)

    def told(name: str, real: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            operation("os.mkdir", ())  # it takes room as that does
            return real(*arguments)

        return call

    os.fsync = told("os.fsync", os.fsync)  # type: ignore[assignment]
    checkpoint.save_file = told("write", checkpoint.save_file)  # type: ignore[assignment]
    sys.addaudithook(operation)


def _at_each_operation(
    folder: Path, start: Path, strike: Callable[[int, int, bool], None], fault: str, once: bool
) -> Outcome:
    """Strike at operation after operation of the second save of a run; then it must go on to the same end."""
    marks, tries, lost, corrupt = Marks(), 0, 0, 0
    whole = Path(shutil.copytree(start, folder / "whole-save"))
    assert in_child(lambda: fit(whole, 2 * EVERY)) == 0
    expected = result_of(whole)
    before = _files(checkpoint_folders(start)[-1])

    def work(run: Path, number: int) -> None:
        strike_at(marks, lambda at, grows: strike(number, at, grows))
        fit(run, 2 * EVERY, marks)

    while True:
        marks.clear()
        run = Path(shutil.copytree(start, folder / "operations"))
        code = in_child(lambda: work(run, tries))  # noqa: B023
        if marks.operations <= tries:
            break  # the save has no such operation
        tries += 1
        try:
            old = checkpoint_folders(run)[0]
            lost += sound(run) == 0 or (old.name == before[0] and _files(old) != before)
        except ModelError:
            corrupt += 1
        lost += code not in ((0,) if once else (0, 6, -signal.SIGKILL))
        lost += in_child(lambda: load_model(run)) != 0  # noqa: B023
        lost += in_child(lambda: fit(run, 2 * EVERY)) != 0 or result_of(run) != expected  # noqa: B023
        shutil.rmtree(run)
    shutil.rmtree(run)
    shutil.rmtree(whole)
    return Outcome(fault, tries, lost, corrupt)


def _files(folder: Path) -> tuple[str, dict[str, bytes]]:
    return folder.name, {path.name: path.read_bytes() for path in folder.iterdir()}


def kills_at_every_operation(folder: Path, start: Path) -> Outcome:
    """Die at each file operation of a save in turn."""

    def strike(number: int, at: int, _: bool) -> None:
        if at == number:
            os.kill(os.getpid(), signal.SIGKILL)

    return _at_each_operation(folder, start, strike, "killed at each file operation of a save", False)


def full_at_every_operation(folder: Path, start: Path) -> Outcome:
    """The disk is full from one operation of a save on: the old checkpoint stays, and the run ends with 6."""

    def strike(number: int, at: int, grows: bool) -> None:
        if grows and at >= number:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return _at_each_operation(folder, start, strike, "disk full from each file operation on", False)


def failures_at_every_operation(folder: Path, start: Path) -> Outcome:
    """One operation of a save fails: it is tried again, and nothing is to be seen."""

    def strike(number: int, at: int, grows: bool) -> None:
        if grows and at == number:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    return _at_each_operation(folder, start, strike, "one file operation of a save fails", True)


def full_disks(folder: Path, start: Path, tries: int) -> Outcome:
    """Let no file grow beyond a size, smaller than what a save writes, then let the run go on."""
    lost = corrupt = 0
    largest = max(file.stat().st_size for file in checkpoint_folders(start)[-1].iterdir())
    for number in range(tries):
        run = Path(shutil.copytree(start, folder / "full"))
        before = _files(checkpoint_folders(run)[-1])
        code = in_child(lambda: _fit_within(run, largest * number // tries))  # noqa: B023
        try:
            lost += sound(run) == 0 or code != 6 or _files(checkpoint_folders(run)[0]) != before
        except (ModelError, OSError):
            corrupt += 1
        lost += in_child(lambda: fit(run, 2 * EVERY)) != 0  # noqa: B023
        shutil.rmtree(run)
    return Outcome("disk full at each size of a file", tries, lost, corrupt)


def _fit_within(run: Path, size: int) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # then writing fails with an error
    real = loop.save_checkpoint

    def save(*arguments: object, **keywords: object) -> object:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        try:
            return real(*arguments, **keywords)  # type: ignore[arg-type]
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    loop.save_checkpoint = save  # type: ignore[assignment]
    fit(run, 2 * EVERY)
