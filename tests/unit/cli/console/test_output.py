"""Outputs: streams, and files that appear only when they are complete."""

import gzip
import logging
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from mtrain.cli.console.output import open_output, require_writable, shown_on, write_lines
from mtrain.cli.console.terminal import start_logging
from mtrain.errors import StorageError
from tests.support.faults.processes import run_in_child

ARABIC = "هل يعمل iPhone؟"


def test_right_to_left_text_is_isolated_in_lines_of_a_terminal_with_other_text(monkeypatch, capsys):
    """Never in a line of its own, which may be copied, nor in files and pipes."""
    monkeypatch.setenv("TERM", "dumb")
    text = f"{ARABIC}\t-0.5\t0-0\n{ARABIC}\nHello\t-1\n"
    for is_terminal in (False, True):
        isolated = f"\u2068{ARABIC}\u2069" if is_terminal else ARABIC
        for stream in (sys.stdout, sys.stderr):
            monkeypatch.setattr(stream, "isatty", lambda is_terminal=is_terminal: is_terminal)
        start_logging(quiet=False, debug=False)
        logging.getLogger("mtrain.test").info("%s: %s (%d)", Path("x.ar"), ARABIC, 3)
        shown_on(sys.stdout, columns=True).write(text)
        assert capsys.readouterr() == (text.replace(ARABIC, isolated, 1), f"x.ar: {isolated} (3)\n")
    logging.getLogger("mtrain.test").info("%s: %s", "a\x1b\u2068", "b")  # the marks of others are escaped
    shown_on(sys.stdout, columns=True).write("\u2068b\tc\n")
    shown_on(sys.stdout).write(f"{ARABIC}\t{ARABIC}\n")
    assert capsys.readouterr() == (f"\\u2068b\tc\n{ARABIC}\t{ARABIC}\n", "a\\x1b\\u2068: b\n")


def test_each_line_is_visible_before_the_next_one_is_made(tmp_path):
    visible = []

    def lines():
        for line in ("a\n", "b\n"):
            yield line
            visible.append((tmp_path / "out").read_text())

    with (tmp_path / "out").open("w") as out:
        write_lines(lines(), out, flush_every=0)
    assert visible == ["a\n", "a\nb\n"]


@pytest.mark.parametrize("name", ["out", "out.gz"])
def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path, name):
    (tmp_path / name).write_text("old")
    with pytest.raises(KeyboardInterrupt), open_output(tmp_path / name) as out:
        out.write("new\n")
        raise KeyboardInterrupt
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [(name, "old")]


@pytest.mark.parametrize("mode", [0o555, 0o444])
def test_files_and_folders_that_may_not_be_written_are_refused_at_once(tmp_path, monkeypatch, mode):
    """Also a file that could be replaced, because its folder may be written."""
    file = tmp_path / "out.txt"
    file.write_text("mine")
    refused = tmp_path if mode == 0o555 else file
    allowed = os.access  # the superuser may write everything
    monkeypatch.setattr(os, "access", lambda path, mode: path != refused and allowed(path, mode))
    with pytest.raises(StorageError, match=r"out\.txt: cannot write: no permission"):
        require_writable(file, [])


def test_a_link_to_a_file_stays_a_link(tmp_path):
    (tmp_path / "file.gz").write_text("old")
    (tmp_path / "link.gz").symlink_to("file.gz")
    with open_output(tmp_path / "link.gz") as out:
        out.write("new\n")
    assert (tmp_path / "link.gz").is_symlink()
    assert gzip.decompress((tmp_path / "file.gz").read_bytes()) == b"new\n"


def test_a_reader_of_stdout_that_exits_is_not_an_error_of_another_output(tmp_path):
    code = f"""if True:
        from pathlib import Path
        from mtrain.cli.console.output import open_output
        with open_output(None) as out, open_output(Path({str(tmp_path / "other")!r})) as other:
            other.write("one\\n")
            while True:
                out.write("line\\n" * 1000)
    """
    job = [sys.executable, "-c", code]
    with subprocess.Popen(job, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "line\n"
        process.stdout.close()
        assert process.wait(60) == 0 and process.stderr is not None and process.stderr.read() == ""


@pytest.mark.parametrize("name", ["pipe", "pipe.gz"])
def test_a_reader_of_another_pipe_that_exits_is_a_storage_error(tmp_path, name):
    """Otherwise, results would be lost without a message."""
    os.mkfifo(tmp_path / name)
    with (
        subprocess.Popen(["head", "-c", "10", tmp_path / name], stdout=subprocess.DEVNULL),
        pytest.raises(StorageError, match=rf"{name}: cannot write: Broken pipe"),
        open_output(tmp_path / name) as out,
    ):
        for _ in range(1000):
            out.write(os.urandom(1000).hex())


@pytest.mark.parametrize("name", ["full", "full.gz", "full.zst"])
def test_a_full_device_is_a_storage_error(tmp_path, name):
    (tmp_path / name).symlink_to("/dev/full")
    with (
        pytest.raises(StorageError, match=rf"{name}: cannot write: No space left on device"),
        open_output(tmp_path / name) as out,
    ):
        out.write("new\n")


def test_of_two_outputs_the_one_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "full").symlink_to("/dev/full")
    with (
        pytest.raises(StorageError, match="full: cannot write: No space left on device"),
        open_output(tmp_path / "full") as out,
        open_output(tmp_path / "other") as other,
    ):
        other.write("written\n")
        out.write("lost" * 100_000)


@pytest.mark.parametrize("name", ["out", "out.gz"])
def test_a_file_that_grows_too_large_is_a_storage_error_and_is_removed(tmp_path: Path, name):
    def write() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        message = f"^{tmp_path / name}: cannot write: File too large"
        with pytest.raises(StorageError, match=message), open_output(tmp_path / name) as out:
            out.write(os.urandom(100_000).hex())

    assert run_in_child(write) == 0
    assert not list(tmp_path.iterdir())
