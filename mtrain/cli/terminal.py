"""Where lines come from and go to: files, pipes, a prompt, and the log on stderr."""

import io
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from mtrain.errors import DataError, StorageError, UsageError


def make_streams_usable() -> None:
    """Let stdin, stdout and stderr exist, closed or not, and take any text. What is written to a stdout that
    was closed is lost, so that fails as on a full disk: it is there for reading only."""
    for name, mode in (("stdin", "r"), ("stdout", "r"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: PTH123, SIM115  (for as long as we live)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # `require_unicode` tells what was not UTF-8
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")


def require_unicode(text: str) -> str:
    """The text. Raises DataError if what was typed was not UTF-8: Python puts lone surrogates for it."""
    if any("\ud800" <= c <= "\udfff" for c in text):
        raise DataError(f"{text}: not valid UTF-8")
    return text


def require_file(path: Path) -> None:
    """Raise DataError if a file, unless it is `-`, is missing or a folder, before any work is done."""
    if str(path) != "-" and (path.is_dir() or not path.exists()):
        raise DataError(f"{path}: {'a folder, not a file' if path.is_dir() else 'no such file'}")


def is_stdout(path: Path) -> bool:
    """Whether a path is what stdout goes to, as /dev/stdout is."""
    try:
        return os.path.samestat(os.fstat(1), path.stat())
    except OSError:
        return False


def require_other_file(written: Path, read: Sequence[Path | None]) -> None:
    """Raise UsageError if a file to be replaced is one of those, or the stdin, that are read to write it."""
    if not written.is_file() or is_stdout(written):
        return
    place = written.stat()
    inputs = [path.stat() for path in read if path is not None and str(path) != "-"]
    with suppress(OSError):  # stdin may be closed
        inputs.append(os.fstat(0))
    if any(os.path.samestat(place, other) for other in inputs):
        raise UsageError(f"-o {written}: is read here, too; give another file")


def input_lines(path: Path) -> Iterator[str]:
    """Lines of a file, or of stdin for `-`. Raises DataError at the first that is not clean text."""
    from mtrain.data.corpus import clean, decode_lines, read_lines

    try:
        yield from clean(decode_lines(sys.stdin.buffer, "<stdin>") if str(path) == "-" else read_lines(path))
    except OSError as error:
        raise DataError(f"<stdin>: cannot read: {error.strerror}") from None


@contextmanager
def output(device: Path | None = None) -> Iterator[IO[str]]:
    """stdout, or a device or pipe; that whoever read stdout has gone is no failure."""
    if device is not None:
        try:
            with device.open("w", encoding="utf-8", newline="\n") as stream:
                yield stream
        except OSError as error:
            raise StorageError(f"{device}: cannot write: {error.strerror}") from None
        return
    try:
        yield sys.stdout
        sys.stdout.flush()
    except BrokenPipeError:
        # Python must not flush to them at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def require_folder_of(file: Path) -> None:
    """Raise StorageError if a file cannot be made for want of a folder, before any work is done."""
    if not file.resolve().parent.is_dir():
        raise StorageError(f"{file}: cannot write: no such folder")
    if file.is_dir():
        raise StorageError(f"{file}: cannot write: a folder, not a file")


def log_to_stderr(quiet: bool, debug: bool) -> None:
    """Send log messages to stderr, around any progress bar; `quiet` leaves out all but warnings."""
    from tqdm import tqdm

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            prefix = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
            with suppress(OSError):  # a log that nobody can read any more must not stop a long run
                tqdm.write(prefix + visible(self.format(record)), file=sys.stderr)

    logger = logging.getLogger("mtrain")
    logger.handlers = [Handler()]
    logger.setLevel(logging.DEBUG if debug else logging.WARNING if quiet else logging.INFO)
    if quiet or not sys.stderr.isatty():
        os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"


def visible(text: str) -> str:
    """Text from files may hold control characters; a terminal must not obey them."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
