"""The command line, run in the process of the test, or in a forked one that has its own standard streams."""

import io
import math
import os
import pty
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NoReturn

import pytest
import yaml

from mtrain.cli import main
from mtrain.cli.console import terminal
from mtrain.processes.stop_signals import STOP_SIGNALS

CLOSED = -1  # in place of a file descriptor


@pytest.fixture
def mtrain(capsys, monkeypatch):
    """Run a command in this process; returns its exit code, stdout and stderr."""

    monkeypatch.setattr(terminal, "STARTED", -math.inf)  # commands of over a second suggest the next one
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)  # `main` replaces it

    def run(*arguments: object) -> tuple[int, str, str]:
        handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        with handling(handlers), pytest.raises(SystemExit) as stop:  # `main` replaces them until the end
            main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        code = stop.value.code
        assert isinstance(code, int)
        return code, out, err

    return run


@contextmanager
def handling(handlers: Mapping[int, Any]) -> Iterator[None]:
    """A context manager that handles signals, by number, and restores the handlers at the exit."""
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.fixture
def stdin(monkeypatch):
    """Set the contents of standard input."""

    def give(contents: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(contents), encoding="utf-8"))

    return give


def run_forked(
    *arguments: object, stdin: int | None = None, stdout: int | None = None, stderr: int | None = None
) -> tuple[int, str, str]:
    """Run a command in a forked process; returns its exit code, stdout and stderr.

    Streams may be file descriptors or CLOSED. By default, stdin is empty and the output is returned. This
    takes a fraction of the time that a new interpreter takes to import PyTorch.
    """
    with Path(os.devnull).open() as empty, TemporaryFile() as out, TemporaryFile() as err:
        streams = zip((stdin, stdout, stderr), (empty, out, err), strict=True)
        child = start_forked(
            *arguments, streams=[file.fileno() if fd is None else fd for fd, file in streams]
        )
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        out.seek(0)
        err.seek(0)
        return code, out.read().decode(), err.read().decode()


def run_at_terminal(*arguments: object) -> tuple[int, str]:
    """Run a command in a forked process whose standard streams are a terminal; returns its exit code and what
    the terminal receives."""
    screen, terminal = pty.openpty()
    child = start_forked(*arguments, streams=[terminal] * 3)
    os.close(terminal)
    shown = b""
    with suppress(OSError):  # at the end
        while received := os.read(screen, 4096):
            shown += received
    os.close(screen)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), shown.decode()


def start_forked(*arguments: object, streams: list[int]) -> int:
    """Run a command in a forked process that has no other open files than `streams`; returns its id."""
    child = os.fork()
    if child == 0:
        try:
            for number, descriptor in enumerate(streams):
                os.close(number) if descriptor == CLOSED else os.dup2(descriptor, number)
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))
            # A shell starts background processes, of which the tests may be one, with SIGINT ignored.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            _run_like_an_interpreter([str(argument) for argument in arguments])
        finally:
            os._exit(99)
    return child


def _run_like_an_interpreter(arguments: list[str]) -> NoReturn:
    """Open the standard streams as Python does when it starts, and flush them as it does when it ends.

    SIGINT interrupts, even if these tests were started in the background, where a shell ignores it.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            buffering = 1 if name == "stderr" else -1  # 1: line by line
            stream = open(number, mode, buffering, encoding="utf-8", closefd=False)  # noqa: SIM115
        except OSError:
            stream = None
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    try:
        main(arguments)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 98
    try:
        if sys.stdout is not None and not sys.stdout.closed:
            sys.stdout.flush()
    except OSError:
        os.write(2, b"Exception ignored in: <stdout>\n")
        code = 120
    os._exit(code)


def changed(file: Path, section: str, **values) -> Path:
    """Change keys of a section of a config file."""
    raw = yaml.safe_load(file.read_text())
    raw[section] = {**raw.get(section, {}), **values}
    file.write_text(yaml.safe_dump(raw))
    return file


def one_line(err: str) -> str:
    """`err`, which must be a single error message."""
    assert err.startswith("error: ") and err.count("\n") == 1, err
    return err
