"""Worker processes that encode blocks of pairs.

They are started with `subprocess` and receive their tasks through a pipe, as JSON and bytes, and answer with
JSON and safetensors. `multiprocessing` and `concurrent.futures` would import the user's main module in them.
"""

import json
import logging
import os
import queue
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import IO, Any, NamedTuple

from safetensors.numpy import load, save

from mtrain.data.corpus import Block, Position, RawBlock
from mtrain.data.encoder import EncodedBlock, Encoder
from mtrain.data.shards import Rows
from mtrain.errors import DataError

log = logging.getLogger(__name__)

# Run with -P, so that no file of the working directory is imported in place of a module.
_MAIN = (
    "import json, sys; sys.path[:] = json.loads(sys.stdin.buffer.readline()); "
    "from mtrain.data.encoder_process import serve; serve()"
)
_AHEAD = 2  # blocks for each process that are read in advance


class Task(NamedTuple):
    """A block to encode; None after the last block of a shard."""

    shard: int  # index, from 0
    corpus: int  # index, from 0
    raw: RawBlock | None


Encoded = tuple[Task, EncodedBlock | None]


def encode_all(encoder: Encoder, tasks: Iterable[Task], workers: int) -> Iterator[Encoded]:
    """Encode blocks in order, with `workers` processes if these are several. Raises what encoding raises."""
    if workers == 1:
        yield from ((task, task.raw and encoder.encode(task.raw, task.corpus)) for task in tasks)
        return
    with _processes(encoder, workers) as free, ThreadPoolExecutor(workers) as threads:
        pending: deque[tuple[Task, Future[EncodedBlock | None]]] = deque()
        try:
            for task in tasks:
                pending.append((task, threads.submit(_encode, encoder, free, task)))
                if len(pending) > _AHEAD * workers:
                    done, future = pending.popleft()
                    yield done, future.result()
            while pending:
                done, future = pending.popleft()
                yield done, future.result()
        finally:
            for _, future in pending:
                future.cancel()


def _encode(
    encoder: Encoder, free: "queue.SimpleQueue[subprocess.Popen[bytes] | None]", task: Task
) -> EncodedBlock | None:
    """Encode a block in a free process, or in this one if that process has failed."""
    if task.raw is None:
        return None
    process = free.get()
    try:
        if process is not None:
            return _call(process, encoder, task.raw, task.corpus)
    except (OSError, EOFError):
        log.warning("a worker process failed; encoding continues in the main process")
        process = None
    finally:
        free.put(process)
    return encoder.encode(task.raw, task.corpus)


def _call(process: "subprocess.Popen[bytes]", encoder: Encoder, raw: RawBlock, corpus: int) -> EncodedBlock:
    """Encode a block in a process. Raises DataError as `Encoder.encode` does; OSError or EOFError if the
    process has ended."""
    assert process.stdin is not None and process.stdout is not None
    task = {"corpus": corpus, "first": raw.first, "end": raw.end}
    if raw.lines:
        _send(process.stdin, task, *raw.lines)
    else:  # rows of a table may contain values that JSON cannot represent
        block = encoder.parse(raw, corpus)
        texts = {"sources": block.sources, "targets": block.targets, "numbers": [*block.numbers]}
        _send(process.stdin, {**task, **texts, "errors": {n: str(e) for n, e in block.errors.items()}})
    answer, contents = _receive(process.stdout)
    if "error" in answer:
        raise DataError(answer["error"])
    arrays = load(contents[0])
    sides = (Rows(arrays[f"{name}"], arrays[f"{name}_length"]) for name in ("source", "target"))
    return EncodedBlock(
        (next(sides), next(sides)), arrays["number"], answer["dropped"], answer["pairs"], raw.end
    )


def _send(pipe: IO[bytes], header: dict[str, Any], *contents: bytes) -> None:
    pipe.write(json.dumps({**header, "sizes": list(map(len, contents))}).encode() + b"\n")
    for content in contents:
        pipe.write(content)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> tuple[dict[str, Any], tuple[bytes, ...]]:
    """A header and its contents. Raises EOFError if the other process has ended."""
    if not (line := pipe.readline()).endswith(b"\n"):
        raise EOFError
    header: dict[str, Any] = json.loads(line)
    contents = tuple(pipe.read(size) for size in header["sizes"])
    if [len(content) for content in contents] != header["sizes"]:
        raise EOFError
    return header, contents


@contextmanager
def _processes(encoder: Encoder, count: int) -> Iterator["queue.SimpleQueue[subprocess.Popen[bytes] | None]"]:
    """Start worker processes, and end them at the end of the block. None stands for a process that cannot be
    started."""
    free: queue.SimpleQueue[subprocess.Popen[bytes] | None] = queue.SimpleQueue()
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            try:
                processes.append(start(encoder))
                free.put(processes[-1])
            except OSError as error:  # too many processes, for example
                log.warning("cannot start a worker process: %s", error)
                free.put(None)
        yield free
    finally:
        for process in processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with suppress(OSError):  # unread data cannot be flushed
                    assert pipe is not None
                    pipe.close()


def start(encoder: Encoder) -> "subprocess.Popen[bytes]":
    """Start a worker process. Raises OSError if that fails."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", _MAIN],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,  # only the parent handles Ctrl-C
    )
    assert process.stdin is not None
    with suppress(OSError):  # noticed at the first task
        process.stdin.write(json.dumps(sys.path).encode() + b"\n")
        _send(process.stdin, encoder.settings())
    return process


def serve() -> None:
    """The worker process: encode blocks until the pipe is closed."""
    tasks, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # nothing else must write to the pipe
    with suppress(OSError, EOFError):  # the parent has ended
        encoder = Encoder.with_settings(_receive(tasks)[0])
        while True:
            header, lines = _receive(tasks)
            try:
                block = _encode_task(encoder, header, lines)
            except DataError as error:
                _send(answers, {"error": str(error)})
                continue
            sides = zip(("source", "target"), block.sides, strict=True)
            arrays = {
                name: array
                for key, side in sides
                for name, array in ((key, side.ids), (f"{key}_length", side.lengths))
            }
            _send(
                answers,
                {"dropped": block.dropped, "pairs": block.pairs},
                save({**arrays, "number": block.numbers}),
            )


def _encode_task(encoder: Encoder, task: dict[str, Any], lines: tuple[bytes, ...]) -> EncodedBlock:
    end = Position(task["end"][0], tuple(task["end"][1]))
    if lines:
        return encoder.encode(RawBlock(task["first"], end, lines), task["corpus"])
    errors = {int(number): DataError(message) for number, message in task["errors"].items()}
    block = Block(task["sources"], task["targets"], task["numbers"], errors)
    return encoder.encode_block(block, end)
