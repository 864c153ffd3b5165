"""Processes to be killed, forked from one that has imported everything and run nothing."""

import mmap
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import datasets  # noqa: F401  (these two are imported here once, not in each process)
import torch
import torch._dynamo

from mtrain.errors import MtrainError

TIMEOUT = 120  # seconds, of a process that nobody kills


class Ended(NamedTuple):
    """How a process ended and what it took."""

    code: int  # exit code, or minus the signal
    cpu: float  # seconds
    memory: int  # bytes at most


def begin(work: Callable[[], object], stderr: Path | None = None) -> int:
    """Run `work` in a forked process whose number this returns; its exit code is mtrain's."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            null = os.open(os.devnull, os.O_RDWR)
            told = os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) if stderr else null
            os.dup2(null, 1)
            os.dup2(told, 2)
            torch.set_num_threads(1)
            work()
            code = 0
        except MtrainError as error:
            code = error.exit_code
        except BaseException:
            if stderr:
                import traceback

                traceback.print_exc()
        finally:
            os._exit(code)
    return child


def ended(child: int) -> Ended | None:
    """How a process has ended; None if it goes on."""
    done, status, used = os.wait4(child, os.WNOHANG)
    if not done:
        return None
    return Ended(os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime, used.ru_maxrss * 1024)


def wait_until(child: int, reached: Callable[[], bool], timeout: float = TIMEOUT) -> Ended | None:
    """Wait until something holds, then None; or how a process ended before, by SIGALRM after `timeout`."""
    end = time.monotonic() + timeout
    while not (found := ended(child)) and not reached():
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return Ended(-signal.SIGALRM, timeout, 0)
        time.sleep(0.0005)
    return found


def wait(child: int, timeout: float = TIMEOUT) -> Ended:
    """Wait for a process to end."""
    found = wait_until(child, lambda: False, timeout)
    assert found is not None
    return found


def in_child(work: Callable[[], object]) -> int:
    """Run `work` in a process of its own to its end, and return its exit code."""
    return wait(begin(work)).code


class Marks:
    """Numbers that a process leaves for the one that forked it, also when it is killed."""

    def __init__(self) -> None:
        self._numbers = memoryview(mmap.mmap(-1, 4096)).cast("q")

    step, new_steps, saving, operations, saves, save_nanoseconds, train_nanoseconds = (
        property(
            lambda self, i=i: self._numbers[i], lambda self, value, i=i: self._numbers.__setitem__(i, value)
        )
        for i in range(7)
    )  # step: the one it is at; new_steps: that it has done; operations: file operations inside saves

    def clear(self) -> None:
        """Set all to 0."""
        for i in range(7):
            self._numbers[i] = 0
