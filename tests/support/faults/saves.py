"""Kills, full disks and failing writes at every file operation of a save, and at every size of a file."""

import errno
import os
import resource
import shutil
import signal
from collections.abc import Callable, Container
from pathlib import Path

import pytest

from mtrain.checkpoint.checkpoint import checkpoint_folders
from mtrain.checkpoint.model_folder import load_model
from mtrain.errors import ModelError
from tests.support.faults.file_operations import Operation, is_save, on_file_operation
from tests.support.faults.processes import Counters, run_in_child
from tests.support.faults.runs import (
    CHECKPOINT_EVERY,
    Outcome,
    contents_of,
    count_valid_checkpoints,
    result_of,
    train,
)


class Killed(BaseException):
    """Simulates SIGKILL in the process of the test: no code of mtrain catches it."""


def save_in_background(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a thread write checkpoints, as on a GPU."""
    monkeypatch.setattr("mtrain.training.trainer.saves_in_background", lambda learner: True)


@pytest.fixture(params=["at once", "in the background"])
def saving(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints are written as on a CPU, and as on a GPU."""
    if request.param != "at once":
        save_in_background(monkeypatch)


def no_space(*_: object) -> None:
    """Fail as on a full disk."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def fail_writes(file_name: str, numbers: Container[int]) -> tuple[Callable[[Operation], None], list[Path]]:
    """A handler that fails some writes of tensors to files of a name, after writing half a file, and the
    list of all attempts. `numbers` name the attempts that fail, from 1."""
    attempts: list[Path] = []

    def handle(operation: Operation) -> None:
        if operation.name == "write tensors" and operation.path.name == file_name:
            attempts.append(operation.path)
            if len(attempts) in numbers:
                operation.path.write_bytes(b"half")
                no_space()

    return handle, attempts


def kill_at_each_operation(folder: Path, start: Path) -> Outcome:
    """SIGKILL at each file operation of a save in turn."""

    def fail(number: int, target: int, _: Operation) -> None:
        if number == target:
            os.kill(os.getpid(), signal.SIGKILL)

    return _at_each_operation(folder, start, fail, "killed at each file operation of a save", {-9})


def fill_disk_at_each_operation(folder: Path, start: Path) -> Outcome:
    """A disk that is full from one file operation of a save on: the old checkpoint stays, exit code 6."""

    def fail(number: int, target: int, operation: Operation) -> None:
        if operation.needs_space and number >= target:
            no_space()

    return _at_each_operation(folder, start, fail, "disk full from each file operation on", {0, 6})


def fail_each_operation(folder: Path, start: Path) -> Outcome:
    """A single file operation of a save that fails: the save is repeated, and the run succeeds."""

    def fail(number: int, target: int, operation: Operation) -> None:
        if operation.needs_space and number == target:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    return _at_each_operation(folder, start, fail, "one file operation of a save fails", {0})


def _at_each_operation(
    folder: Path, start: Path, fail: Callable[[int, int, Operation], None], fault: str, exit_codes: set[int]
) -> Outcome:
    """Inject a fault at operation after operation of the second save of a run, then resume the run, which
    must end as if nothing had happened."""
    counters, tries, lost, corrupt = Counters(), 0, 0, 0
    end = 2 * CHECKPOINT_EVERY
    whole = Path(shutil.copytree(start, folder / "whole"))
    assert run_in_child(lambda: train(whole, end)) == 0
    expected = result_of(whole)
    old = checkpoint_folders(start)[-1]

    def work(run: Path, target: int) -> None:
        def handle(operation: Operation) -> None:
            if is_save(operation, run):
                counters.operations += 1
                fail(counters.operations - 1, target, operation)

        with on_file_operation(handle):
            train(run, end)

    while True:
        counters.clear()
        run = Path(shutil.copytree(start, folder / "operations"))
        code = run_in_child(lambda: work(run, tries))  # noqa: B023
        if counters.operations <= tries:
            break  # the save has fewer operations
        tries += 1
        try:
            first = checkpoint_folders(run)[0]
            changed = first.name == old.name and contents_of(first) != contents_of(old)
            lost += count_valid_checkpoints(run) == 0 or changed
        except ModelError:
            corrupt += 1
        lost += code not in exit_codes
        lost += run_in_child(lambda: load_model(run)) != 0  # noqa: B023
        lost += run_in_child(lambda: train(run, end)) != 0 or result_of(run) != expected  # noqa: B023
        shutil.rmtree(run)
    shutil.rmtree(run)
    shutil.rmtree(whole)
    return Outcome(fault, tries, lost, corrupt)


def limit_file_sizes(folder: Path, start: Path, tries: int) -> Outcome:
    """Let no file of a save grow beyond a size that is too small for it, then resume the run."""
    lost = corrupt = 0
    old = checkpoint_folders(start)[-1]
    largest = max(file.stat().st_size for file in old.iterdir())
    for number in range(tries):
        run = Path(shutil.copytree(start, folder / "full"))
        code = run_in_child(lambda: _train_within(run, largest * number // tries))  # noqa: B023
        try:
            [first, *_] = checkpoint_folders(run)
            kept = count_valid_checkpoints(run) > 0 and contents_of(first) == contents_of(old)
            lost += not kept or code != 6
        except (ModelError, OSError, ValueError):
            corrupt += 1
        lost += run_in_child(lambda: train(run, 2 * CHECKPOINT_EVERY)) != 0  # noqa: B023
        shutil.rmtree(run)
    return Outcome("disk full at each size of a file", tries, lost, corrupt)


def _train_within(run: Path, size: int) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # then a write beyond the limit fails with an error

    def handle(operation: Operation) -> None:
        limit = size if is_save(operation, run) else resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

    with on_file_operation(handle):
        train(run, 2 * CHECKPOINT_EVERY)
