"""Worker processes, and pools of them that share tasks.

A worker process is started with `subprocess`, and reads tasks from a pipe (see `messages.py`).
`multiprocessing` and `concurrent.futures` would import the user's main module in it.
"""

import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from mtrain.processes.cores import openmp_settings
from mtrain.processes.messages import receive, send, skip_to_start
from mtrain.processes.stop_signals import STOP_SIGNALS

log = logging.getLogger(__name__)

Task = TypeVar("Task")
Result = TypeVar("Result")
# Called in a worker process, returns the function that does each task there. It is pickled, so it must call a
# function or class of a module.
Prepare = partial[Any]

# Run with -P, so that no file of the working directory is imported in place of a module. Stop signals are
# ignored: batch systems send them to all processes of a job, but the parent decides when its workers end.
_MAIN = (
    f"import signal; [signal.signal(n, signal.SIG_IGN) for n in {[*map(int, STOP_SIGNALS)]}]; "
    "import sys; sys.path[:] = sys.argv[1:]; from mtrain.processes.messages import serve; serve()"
)
# Makes glibc reuse large blocks of memory, as `mtrain.device.keep_freed_memory` does, which imports PyTorch.
_REUSE_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1)}
_POLL = 0.2  # seconds between calls of `check`
_AHEAD = 2  # tasks for each process that are prepared in advance
SILENCE = 30.0  # seconds after which a process that neither answers nor computes is reported
_PATIENCE = 5.0  # seconds that a process whose pipe is closed may still take to end


class WorkerEndedError(Exception):
    """A worker process has ended. The message says how: "was killed by SIGKILL", for example."""

    def __init__(self, code: int):
        """`code` is the exit code of the process, or minus the number of the signal that killed it."""
        super().__init__(describe_end(code))
        self.code = code


def describe_end(code: int) -> str:
    """How a process ended that has an exit code, or minus the number of the signal that killed it."""
    if code >= 0:
        return f"ended with exit code {code}"
    name = next((each.name for each in signal.Signals if each == -code), f"signal {-code}")
    return f"was killed by {name}" + ", perhaps because memory ran out" * (name == "SIGKILL")


@contextmanager
def reporting_silence(pid: int, name: str) -> Iterator[None]:
    """Log a warning while the block waits for a process that has neither answered nor computed for `SILENCE`
    seconds: such a process was stopped or is itself waiting. Only on Linux: other systems do not report the
    CPU time of a process this way."""
    answered = threading.Event()
    threading.Thread(target=_report_silence, args=(answered, pid, name), daemon=True).start()
    try:
        yield
    finally:
        answered.set()


def _report_silence(answered: threading.Event, pid: int, name: str) -> None:
    used, patience = _computing_time(pid), SILENCE
    active = time.monotonic()
    while used and not answered.wait(SILENCE / 10):
        before, used = used, _computing_time(pid)
        now = time.monotonic()
        if used != before:
            active = now
        elif now - active >= patience:
            message = "%s (process %d) has not answered or computed for %.0f s; still waiting for it"
            log.warning(message, name, pid, now - active)
            patience *= 10


def _computing_time(pid: int) -> list[str]:
    """The computing time of a process, in the units of the system; empty if it is not known."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    except OSError:  # not on Linux, or the process has ended
        return []


class WorkerProcess:
    """The parent's side of a worker process."""

    def __init__(self, threads: int = 1):
        """Start a process whose libraries use `threads` threads. Raises OSError if no process can be
        started."""
        if not sys.executable or getattr(sys, "frozen", False):
            raise OSError("this program is not run by a Python interpreter")
        self.ready = False  # whether `prepare` is done
        self.is_replacement = False  # whether it replaces a process of a pool that has ended
        self.name = "a worker process"
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", _MAIN, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=openmp_settings(os.environ) | _REUSE_MEMORY | {**os.environ, "OMP_NUM_THREADS": str(threads)},
            # So that only the parent handles Ctrl-C. Not a session of its own: Linux divides time equally
            # among sessions, whatever the priorities (`nice`) of their processes.
            process_group=0,
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self._stdin, self._stdout = self.process.stdin, self.process.stdout

    def prepare(self, prepare: Prepare) -> None:
        """Let the process call `prepare`, and wait until it is ready for tasks. Raises the errors of
        `call`."""
        self.name = f"the worker process of {prepare.func.__module__.removeprefix('mtrain.')}"
        self.call(prepare)
        self.ready = True

    def call(self, task: object) -> Any:
        """Send a task, and wait for its result. Raises the exception that the process has raised, or
        WorkerEndedError."""
        try:
            with reporting_silence(self.process.pid, self.name):
                send(self._stdin, task)
                if not self.ready:
                    skip_to_start(self._stdout)
                result, error = receive(self._stdout)
        except (OSError, ValueError, EOFError) as ended:
            raise WorkerEndedError(self.kill(_PATIENCE)) from ended
        except BaseException:  # of a signal handler, for example: the next task would get this result
            self.kill()
            raise
        if error is not None:
            raise error
        return result

    def kill(self, patience: float = 0.0) -> int:
        """Kill the process, unless it ends within `patience` seconds, and close the pipes. Returns its exit
        code, or minus the number of the signal that ended it."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(patience)
        self.process.kill()
        code = self.process.wait()
        for pipe in (self._stdin, self._stdout):
            with suppress(OSError):  # unread data cannot be flushed
                pipe.close()
        return code


# ------------------------------------------------------------------------------------------ several processes


class WorkerPool:
    """Worker processes that share tasks. They end when the pool is closed or garbage-collected, and when this
    process ends."""

    def __init__(self, prepare: Prepare, count: int):
        """Start `count` processes, each of which calls `prepare`."""
        self._prepare, self.count = prepare, count
        self._processes: list[WorkerProcess] = []
        self._end = weakref.finalize(self, _kill_all, os.getpid(), self._processes)
        # Idle processes, and None in place of each one that has ended or could not be started.
        self._free: queue.SimpleQueue[WorkerProcess | None] = queue.SimpleQueue()
        for _ in range(count):  # none is waited for, so that all import their modules at the same time
            self._free.put(self._start())

    def _start(self, is_replacement: bool = False) -> WorkerProcess | None:
        try:
            self._processes.append(process := WorkerProcess())
        except OSError as error:  # too many processes, for example
            log.warning("cannot start a worker process: %s", error)
            return None
        process.is_replacement = is_replacement
        return process

    def map(
        self,
        tasks: Iterable[Task],
        remote: Callable[[WorkerProcess, Task], Result],
        local: Callable[[Task], Result],
        check: Callable[[], object] = lambda: None,
    ) -> Iterator[tuple[Task, Result]]:
        """Yield each task and its result, in order. A task is given to `remote` with a free process. A
        process that ends is replaced once; after that, or if a process cannot be started, its tasks are given
        to `local`. Exceptions of both are propagated.

        `check` is called while waiting for a result. After a KeyboardInterrupt or a CancelledError, which
        it may raise, the pool is closed: a process that is stopped would never end its task."""

        def run(task: Task) -> Result:
            process = self._free.get()
            try:
                while process is not None:
                    try:
                        if not process.ready:
                            process.prepare(self._prepare)
                        return remote(process, task)
                    except WorkerEndedError as error:
                        if not self._end.alive:  # `close` has ended it
                            raise
                        process = self._replacement(process, error)
            finally:
                self._free.put(process)
            return local(task)

        pending: deque[tuple[Task, Future[Result]]] = deque()
        with ThreadPoolExecutor(self.count) as threads:
            try:
                upcoming = ((task, threads.submit(run, task)) for task in tasks)
                pending.extend(islice(upcoming, _AHEAD * self.count))
                while pending:
                    pending.extend(islice(upcoming, 1))
                    task, future = pending.popleft()
                    while not wait([future], _POLL).done:
                        check()
                    yield task, future.result()
            except (KeyboardInterrupt, CancelledError):
                self.close()
                raise
            finally:
                for _, future in pending:
                    future.cancel()

    def _replacement(self, process: WorkerProcess, error: WorkerEndedError) -> WorkerProcess | None:
        """Another process in place of one that has ended, unless that was a replacement itself."""
        plan = "its work continues in the main process" if process.is_replacement else "starting another one"
        log.warning("a worker process %s; %s", error, plan)
        return None if process.is_replacement else self._start(is_replacement=True)

    def close(self) -> None:
        """End the processes."""
        self._end()


def _kill_all(pid: int, processes: list[WorkerProcess]) -> None:
    if os.getpid() == pid:  # not in a fork
        for process in processes:
            process.kill()


def map_tasks(
    work: Callable[[Task], Result], prepare: Prepare, tasks: Iterable[Task], workers: int
) -> Iterator[tuple[Task, Result]]:
    """Yield each task and its result, in order. The tasks are done by `workers` processes, which call
    `prepare`, or with `work` in this process if `workers` is 1. Raises the errors of `work`."""
    if workers == 1:
        yield from ((task, work(task)) for task in tasks)
        return
    with closing(WorkerPool(prepare, workers)) as pool:
        yield from pool.map(tasks, WorkerProcess.call, work)
