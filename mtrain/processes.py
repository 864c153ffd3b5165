"""Worker processes, and the messages that they exchange with their parent process.

A worker process is started with `subprocess` and reads tasks from a pipe. A message is a line of JSON that is
followed by bytes. `multiprocessing` and `concurrent.futures` would import the user's main module in it.
"""

import json
import logging
import os
import queue
import signal
import subprocess
import sys
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import IO, Any, Generic, NamedTuple, TypeVar

from mtrain import errors

log = logging.getLogger(__name__)

Task = TypeVar("Task")
Result = TypeVar("Result")

# Run with -P, so that no file of the working directory is imported in place of a module.
_MAIN = (
    "import json, sys; sys.path[:] = json.loads(sys.stdin.buffer.readline()); "
    "from importlib import import_module; import_module(sys.argv[1]).serve()"
)
# Makes glibc reuse large blocks of memory, as `mtrain.device.keep_freed_memory` does, which imports PyTorch.
_REUSE_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1)}
_AHEAD = 2  # tasks for each process that are prepared in advance
_PATIENCE = 5.0  # seconds that a process whose pipe is closed may still take to end


class WorkerEndedError(Exception):
    """A worker process has ended. The message says how: "was killed by SIGKILL", for example."""

    def __init__(self, code: int):
        """`code` is the exit code of the process, or minus the number of the signal that killed it."""
        super().__init__(_describe_end(code))
        self.code = code


def _describe_end(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    name = next((each.name for each in signal.Signals if each == -code), f"signal {-code}")
    return f"was killed by {name}" + ", perhaps because memory ran out" * (name == "SIGKILL")


class Message(NamedTuple):
    """What processes send each other."""

    header: dict[str, Any]  # for JSON
    contents: tuple[bytes, ...] = ()


Receive = Callable[[], Message]
Answer = Callable[[Message], Message]


class WorkerProcess:
    """The parent's side of a worker process."""

    def __init__(self, module: str, threads: int = 1):
        """Start a process that calls `serve()` of a module. Its libraries use `threads` threads. Raises
        OSError if no process can be started."""
        if not sys.executable or getattr(sys, "frozen", False):
            raise OSError("this program is not run by a Python interpreter")
        self.ready = False  # whether `prepare` is done
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", _MAIN, module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**_REUSE_MEMORY, **os.environ, "OMP_NUM_THREADS": str(threads)},
            start_new_session=True,  # only the parent handles Ctrl-C
        )

    def prepare(self, settings: Iterable[Message]) -> None:
        """Send the messages that the process needs before its first task, and wait until it is ready. Raises
        what `call` raises."""
        with self._noticing_end():
            self._stdin.write(json.dumps(sys.path).encode() + b"\n")
            for message in settings:
                send(self._stdin, message)
            self._receive()
        self.ready = True

    def call(self, task: Message) -> Message:
        """Send a task, and wait for the answer. Raises the exception that the process has raised, or
        WorkerEndedError."""
        with self._noticing_end():
            send(self._stdin, task)
            return self._receive()

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

    @property
    def _stdin(self) -> IO[bytes]:
        assert self.process.stdin is not None
        return self.process.stdin

    @property
    def _stdout(self) -> IO[bytes]:
        assert self.process.stdout is not None
        return self.process.stdout

    def _receive(self) -> Message:
        answer = receive(self._stdout)
        if "error" in answer.header:
            raise _to_exception(**answer.header)
        return answer

    @contextmanager
    def _noticing_end(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, EOFError) as error:
            raise WorkerEndedError(self.kill(_PATIENCE)) from error


def count_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# ------------------------------------------------------------------------------------------ several processes


@dataclass
class _Slot:
    """A place for a worker process in a pool."""

    process: WorkerProcess | None  # None if it could not be started, or has ended
    replaced: bool = False  # whether this is not the first process


class WorkerPool:
    """Worker processes that share tasks. They end when the pool is closed or garbage-collected, and when this
    process ends."""

    def __init__(self, module: str, settings: Message, count: int):
        """Start `count` processes. `module` is as in `WorkerProcess`; each process is given `settings`
        first."""
        self._module, self._settings, self._count = module, settings, count
        self._processes: list[WorkerProcess] = []
        self._end = weakref.finalize(self, _kill_all, os.getpid(), self._processes)
        self._free: queue.SimpleQueue[_Slot] = queue.SimpleQueue()
        for _ in range(count):  # none is waited for, so that all import their modules at the same time
            self._free.put(_Slot(self._start()))

    def _start(self) -> WorkerProcess | None:
        try:
            self._processes.append(process := WorkerProcess(self._module))
        except OSError as error:  # too many processes, for example
            log.warning("cannot start a worker process: %s", error)
            return None
        return process

    def map(
        self,
        tasks: Iterable[Task],
        remote: Callable[[WorkerProcess, Task], Result],
        local: Callable[[Task], Result],
    ) -> Iterator[tuple[Task, Result]]:
        """Yield each task and its result, in order. A task is given to `remote` with a free process. A
        process that ends is replaced once; after that, or if a process cannot be started, its tasks are given
        to `local`. Raises what they raise."""

        def run(task: Task) -> Result:
            slot = self._free.get()
            try:
                while slot.process is not None:
                    try:
                        if not slot.process.ready:
                            slot.process.prepare([self._settings])
                        return remote(slot.process, task)
                    except WorkerEndedError as error:
                        self._replace(slot, error)
            finally:
                self._free.put(slot)
            return local(task)

        pending: deque[tuple[Task, Future[Result]]] = deque()
        with ThreadPoolExecutor(self._count) as threads:
            try:
                for task in tasks:
                    pending.append((task, threads.submit(run, task)))
                    if len(pending) > _AHEAD * self._count:
                        done, future = pending.popleft()
                        yield done, future.result()
                while pending:
                    done, future = pending.popleft()
                    yield done, future.result()
            finally:
                for _, future in pending:
                    future.cancel()

    def _replace(self, slot: _Slot, error: WorkerEndedError) -> None:
        """Start another process in place of the one that has ended, unless it was a replacement itself."""
        plan = "its work continues in the main process" if slot.replaced else "starting another one"
        log.warning("a worker process %s; %s", error, plan)
        slot.process = None if slot.replaced else self._start()
        slot.replaced = True

    def close(self) -> None:
        """End the processes."""
        self._end()


def _kill_all(pid: int, processes: list[WorkerProcess]) -> None:
    if os.getpid() == pid:  # not in a fork
        for process in processes:
            process.kill()


class Job(NamedTuple, Generic[Task, Result]):
    """Work on tasks that this process or worker processes can do."""

    module: str  # whose `serve` does it in a worker process
    settings: Message  # that a worker process is given first
    pack: Callable[[Task], Message]  # makes a task a message to a worker process
    unpack: Callable[[Message], Result]  # makes its answer a result
    local: Callable[[Task], Result]  # does the work in this process


def map_tasks(job: Job[Task, Result], tasks: Iterable[Task], workers: int) -> Iterator[tuple[Task, Result]]:
    """Yield each task and its result, in order. The work is done by `workers` processes, or by this one if
    `workers` is 1. Raises what the work raises."""
    if workers == 1:
        yield from ((task, job.local(task)) for task in tasks)
        return

    def remote(process: WorkerProcess, task: Task) -> Result:
        return job.unpack(process.call(job.pack(task)))

    with closing(WorkerPool(job.module, job.settings, workers)) as pool:
        yield from pool.map(tasks, remote, job.local)


# --------------------------------------------------------------------------------------------------- messages


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
            parent.send(Message(_describe(error)))
            sys.exit(1)
        parent.send(Message({}))
        while True:
            task = parent.receive()
            try:
                result = answer(task)
            except Exception as error:
                result = Message(_describe(error))
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


def _describe(error: Exception) -> dict[str, str]:
    """An exception as the header of a message."""
    expected = isinstance(error, errors.MtrainError | MemoryError)
    details = "" if expected else traceback.format_exc()
    return {"error": str(error), "kind": type(error).__name__, "details": details}


def _to_exception(error: str, kind: str, details: str) -> Exception:
    """The exception that the header of a message describes; a RuntimeError if it was not expected."""
    unexpected = MemoryError if kind == "MemoryError" else RuntimeError
    exception: Exception = getattr(errors, kind, unexpected)(error or kind)
    if details:
        exception.add_note(f"In a worker process:\n{details}")
    return exception
