"""Several ranks of a command, as torchrun starts them, but forked from one process, which takes less time."""

import importlib
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mtrain.cli import main
from mtrain.cli.console import terminal
from mtrain.config.yaml_io import to_yaml
from mtrain.distributed.many_ranks import joined_ranks
from mtrain.distributed.ranks import Ranks
from tests.support.faults.processes import ProcessEnd, start, wait
from tests.support.faults.runs import make_run_config

STORE = "MTRAIN_TEST_STORE"  # variable in the environment of ranks: the process of their store


@contextmanager
def started_ranks(count: int, work: Callable[[], object], logs: Path | None = None) -> Iterator[list[int]]:
    """Run `work` in `count` processes; yields their ids. What each writes to stderr is in `logs/rank-N`."""
    importlib.import_module("torch.distributed.fsdp")  # so that no rank spends time on importing it
    with _store() as (port, store):
        children = [
            start(lambda: _as_rank(rank, count, port, store, work), logs and logs / f"rank-{rank}")  # noqa: B023
            for rank in range(count)
        ]
        try:
            yield children
        finally:
            for child in children:
                _end(child)


def run_ranks(count: int, work: Callable[[], object], logs: Path | None = None) -> list[ProcessEnd]:
    """Run `work` in `count` processes, and return how they ended."""
    with started_ranks(count, work, logs) as children:
        return [wait(child) for child in children]


def exit_codes(ends: list[ProcessEnd]) -> list[int]:
    """The exit codes of some ranks."""
    return [end.exit_code for end in ends]


def read_logs(folder: Path) -> list[str]:
    """What each rank has written to stderr."""
    return [file.read_text() for file in sorted(folder.glob("rank-*"))]


def joined(work: Callable[[Ranks], Any]) -> Callable[[], Any]:
    """A function that connects the ranks on the CPU, and calls `work` with them."""

    def run() -> Any:
        with joined_ranks("cpu") as ranks:
            return work(ranks)

    return run


def command(*arguments: object) -> Callable[[], None]:
    """A function that runs a command of mtrain, and ends the process with its exit code."""

    def run() -> None:
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as end:
            sys.stderr.flush()
            os._exit(end.code if isinstance(end.code, int) else 98)

    return run


def fit_command(run: Path, steps: int, *more: object) -> Callable[[], None]:
    """A function that trains in a run folder until `steps`, with the config of `make_run_config`."""
    file, own = run.with_suffix(".yaml"), run.with_suffix(f".{os.getpid()}")
    own.write_text(to_yaml(make_run_config(run, steps), exclude_unset=True))
    own.replace(file)  # at once, because several ranks may write and read it
    return command("fit", file, "--device", "cpu", "--quiet", *more)


def copy_prepared(run: Path, new: Path) -> Path:
    """Give a new run folder the tokenizer and the encoded data of another run, so that no rank spends time on
    them."""
    for name in ("tokenizer", "data"):
        shutil.copytree(run / name, new / name)
    shutil.copy(run / "config.yaml", new)
    return new


def _as_rank(rank: int, count: int, port: int, store: int, work: Callable[[], object]) -> None:
    numbers = {"RANK": rank, "WORLD_SIZE": count, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": count}
    place = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    place[STORE] = store
    os.environ.update({key: str(value) for key, value in {**numbers, **place}.items()})
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115
    terminal.start_logging(quiet=True, debug=False)
    work()


@contextmanager
def _store() -> Iterator[tuple[int, int]]:
    """The port and the process of a key-value store that outlives the ranks, as torchrun's does."""
    reading, writing = os.pipe()

    def serve() -> None:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            "localhost", 0, is_master=True, timeout=timedelta(minutes=1), wait_for_workers=False
        )
        os.write(writing, str(store.port).encode())
        signal.pause()

    child = start(serve)
    try:
        yield int(os.read(reading, 99)), child
    finally:
        os.close(reading)
        os.close(writing)
        _end(child)


def _end(child: int) -> None:
    """Kill a process unless it has ended and was waited for."""
    try:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    except (ProcessLookupError, ChildProcessError):
        pass
