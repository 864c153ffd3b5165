"""The command line, run in the process of the test."""

import io
import math
import signal
import sys
from pathlib import Path

import pytest
import yaml

from mtrain.cli import main, terminal


@pytest.fixture
def mtrain(capsys, monkeypatch):
    """Run a command in this process; returns its exit code, stdout and stderr."""

    monkeypatch.setattr(terminal, "STARTED", -math.inf)  # commands of over a second suggest the next one

    def run(*arguments: object) -> tuple[int, str, str]:
        handler = signal.getsignal(signal.SIGINT)  # `main` replaces it until the process ends
        with pytest.raises(SystemExit) as stop:
            main([str(argument) for argument in arguments])
        signal.signal(signal.SIGINT, handler)
        out, err = capsys.readouterr()
        code = stop.value.code
        assert isinstance(code, int)
        return code, out, err

    return run


@pytest.fixture
def stdin(monkeypatch):
    """Set the contents of standard input."""

    def give(contents: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(contents), encoding="utf-8"))

    return give


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
