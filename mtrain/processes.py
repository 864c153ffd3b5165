"""Worker processes, and the messages that they exchange with their parent process.

A worker process is started with `subprocess` and reads tasks from a pipe. A message is a line of JSON that is
followed by bytes. `multiprocessing` and `concurrent.futures` would import the user's main module in it.
"""

import json
import logging
import os
import queue
import subprocess
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import IO, Any, NamedTuple, TypeVar

log = logging.getLogger(__name__)

Task = TypeVar("Task")
Result = TypeVar("Result")

# Run with -P, so that no file of the working directory is imported in place of a module.
_MAIN = (
    "import json, sys; sys.path[:] = json.loads(sys.stdin.buffer.readline()); "
    "from importlib import import_module; import_module(sys.argv[1]).serve()"
)
_AHEAD = 2  # tasks for each process that are prepared in advance


class WorkerEndedError(Exception):
    """The process has ended, or never started."""


class Message(NamedTuple):
    """What processes send each other."""

    header: dict[str, Any]  # for JSON
    contents: tuple[bytes, ...] = ()


class WorkerProcess:
    """The parent's side of a worker process."""

    def __init__(self, module: str, settings: Message, threads: int = 1):
        """Start a process that calls `serve()` of a module, which receives `settings` first. Its libraries
        use `threads` threads. Raises OSError if no process can be started."""
        if not sys.executable or getattr(sys, "frozen", False):
            raise OSError("this program is not run by a Python interpreter")
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", _MAIN, module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            start_new_session=True,  # only the parent handles Ctrl-C
        )
        assert self.process.stdin is not None
        with suppress(OSError):  # noticed at the first task
            self.process.stdin.write(json.dumps(sys.path).encode() + b"\n")
            send(self.process.stdin, settings)

    def call(self, task: Message) -> Message:
        """Send a task, and wait for the answer. Raises WorkerEndedError."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            send(self.process.stdin, task)
            return receive(self.process.stdout)
        except (OSError, ValueError, EOFError) as error:
            raise WorkerEndedError from error

    def kill(self) -> None:
        """End the process, and close the pipes."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with suppress(OSError):  # unread data cannot be flushed
                pipe.close()


def count_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class WorkerPool:
    """Worker processes that share tasks. They end when the pool is closed or garbage-collected, and when this
    process ends."""

    def __init__(self, module: str, settings: Message, count: int):
        """Start `count` processes. The arguments are those of `WorkerProcess`."""
        self._count = count
        self._free: queue.SimpleQueue[WorkerProcess | None] = queue.SimpleQueue()
        self._processes: list[WorkerProcess] = []
        self._end = weakref.finalize(self, _kill_all, os.getpid(), self._processes)
        for _ in range(count):
            try:
                self._processes.append(WorkerProcess(module, settings))
                self._free.put(self._processes[-1])
            except OSError as error:  # too many processes, for example
                log.warning("cannot start a worker process: %s", error)
                self._free.put(None)

    def map(
        self,
        tasks: Iterable[Task],
        remote: Callable[[WorkerProcess, Task], Result],
        local: Callable[[Task], Result],
    ) -> Iterator[tuple[Task, Result]]:
        """Yield each task and its result, in order. A task is given to `remote` with a free process, or to
        `local` if that process could not be started or has ended. Raises what they raise."""

        def run(task: Task) -> Result:
            process = self._free.get()
            try:
                if process is not None:
                    return remote(process, task)
            except WorkerEndedError:
                log.warning("a worker process failed; its work continues in the main process")
                process = None
            finally:
                self._free.put(process)
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

    def close(self) -> None:
        """End the processes."""
        self._end()


def _kill_all(pid: int, processes: list[WorkerProcess]) -> None:
    if os.getpid() == pid:  # not in a fork
        for process in processes:
            process.kill()


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


def serve(prepare: Callable[[Message], Callable[[Message], Message]]) -> None:
    """The worker process: answer tasks until the pipe is closed. `prepare` is given the settings, and returns
    the function that answers a task."""
    tasks, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # nothing else must write to the pipe
    with suppress(OSError, EOFError):  # the parent has ended
        answer = prepare(receive(tasks))
        while True:
            send(answers, answer(receive(tasks)))
