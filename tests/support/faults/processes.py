"""Child processes that a test can kill, forked from one that has imported everything and computed nothing."""

import importlib
import mmap
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mtrain.errors import MtrainError

TIMEOUT = 120  # seconds for a process that is not killed
# What every training run imports. No child should spend time on it.
IMPORTS = ("mtrain.cli.app", "torch._dynamo", "torch.utils.tensorboard")


class ProcessEnd(NamedTuple):
    """How a process ended and what it used."""

    exit_code: int  # negative: the number of the signal that ended it
    cpu_seconds: float
    peak_bytes: int  # resident memory


def start(work: Callable[[], object], stderr: Path | None = None) -> int:
    """Run `work` in a forked process and return its process id. Errors of mtrain set its exit code."""
    for module in IMPORTS:
        importlib.import_module(module)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            null = os.open(os.devnull, os.O_RDWR)
            errors = os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) if stderr else null
            os.dup2(null, 1)
            os.dup2(errors, 2)
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


def poll(child: int) -> ProcessEnd | None:
    """How a process ended; None while it runs."""
    done, status, used = os.wait4(child, os.WNOHANG)
    if not done:
        return None
    return ProcessEnd(os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime, used.ru_maxrss * 1024)


def wait_until(
    child: int, condition: Callable[[], bool], timeout: float = TIMEOUT, every: float = 0.0005
) -> ProcessEnd | None:
    """Wait until `condition` holds, which is tested `every` so many seconds, and return None, or return how
    the process ended before that.

    After `timeout` seconds the process is killed and reported as ended by SIGALRM.
    """
    deadline = time.monotonic() + timeout
    while not (end := poll(child)) and not condition():
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return ProcessEnd(-signal.SIGALRM, timeout, 0)
        time.sleep(every)
    return end


def wait(child: int, timeout: float = TIMEOUT) -> ProcessEnd:
    """Wait for a process to end."""
    end = wait_until(child, lambda: False, timeout, every=0.005)
    assert end is not None
    return end


def run_in_child(work: Callable[[], object]) -> int:
    """Run `work` in a forked process and return its exit code."""
    return wait(start(work)).exit_code


def _counter(index: int) -> Any:
    """A property of `Counters`."""
    return property(
        lambda self: self._values[index], lambda self, value: self._values.__setitem__(index, value)
    )


class Counters:
    """Integers in memory that a process shares with its parent; they survive a kill."""

    def __init__(self) -> None:
        self._values = memoryview(mmap.mmap(-1, 4096)).cast("q")

    # step: number of the current step; new_steps: steps that this process has finished; step_nanoseconds: the
    # time they took; operations: file operations of saves
    step, new_steps, step_nanoseconds, operations = map(_counter, range(4))

    def clear(self) -> None:
        """Set all to 0."""
        for i in range(4):
            self._values[i] = 0
