"""Standard streams, logging, and checks of what the user typed."""

import io
import logging
import os
import re
import shlex
import shutil
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from copy import copy
from pathlib import Path
from typing import IO

from mtrain.cli.console.message_start import clear_bars, rank_prefix
from mtrain.distributed.launch import read_launch
from mtrain.errors import DataError, UsageError
from mtrain.invisible_characters import ISOLATES, escape_control_characters, isolate

log = logging.getLogger(__name__)
STARTED = time.monotonic()  # this module is loaded when the process starts


def make_streams_usable() -> None:
    """Replace closed standard streams, wait for slow ones, and write UTF-8 regardless of the locale.

    A closed stdout is replaced with a read-only stream, so that losing results is an error. A stream in
    non-blocking mode would lose the lines that come late. The mode belongs to the open file, which a parent
    process may share.
    """
    for name, mode in (("stdin", "r"), ("stdout", "r"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: PTH123, SIM115  (open until the process ends)
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        with suppress(OSError, AttributeError):  # no file, or Windows with an older Python
            os.set_blocking(stream.fileno(), True)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # `require_unicode` reports what was not UTF-8
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")


def discard_output() -> None:
    """Discard what could not be written to stdout. Python would try again at exit, and exit with code 120."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def start_logging(quiet: bool, debug: bool) -> None:
    """Write log messages to stderr without breaking progress bars; with `quiet`, only warnings and errors,
    which is all that ranks other than 0 write."""
    from tqdm import tqdm

    quiet = quiet or bool(read_launch().rank)

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            kind = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
            if isinstance(args := record.args, tuple):  # names and sentences, among others
                record = copy(record)
                record.args = tuple(
                    shown_in_line(str(arg)) if isinstance(arg, str | Path) else arg for arg in args
                )
            message = escape_control_characters(self.format(record), f"\n{ISOLATES}")
            text = rank_prefix() + kind + message
            text = text if getattr(record, "as_is", False) else wrap(text, sys.stderr)
            with suppress(OSError):  # a closed stderr must not stop a long run
                tqdm.write(clear_bars() + text, file=sys.stderr)

    logger = logging.getLogger("mtrain")
    logger.handlers = [Handler()]
    logger.setLevel(logging.DEBUG if debug else logging.WARNING if quiet else logging.INFO)
    if quiet or not sys.stderr.isatty():
        os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"


def shown_in_line(text: str) -> str:
    """Text in a line of other text on stderr, with control characters escaped; on a terminal, right-to-left
    text is isolated."""
    shown = escape_control_characters(text)
    return isolate(shown) if sys.stderr.isatty() else shown


def print_to_stderr(text: str) -> None:
    """Print text on stderr, with control characters escaped."""
    print(escape_control_characters(text), file=sys.stderr)


def use_command(model: str, classifies: bool, languages: tuple[str, str] | None = None) -> str:
    """The command that uses a model, to translate between `languages` if it must be told them."""
    folder = shlex.quote(model)
    if classifies:
        return f"mtrain score {folder} --classifier --tsv pairs.tsv -o scored.tsv"
    options = " --from {} --to {}".format(*languages) if languages else ""
    return f"mtrain translate {folder}{options} 'Hello.'"


def suggest(done: str, *commands: str) -> None:
    """Log what to do next, unless the command took less than a second. Commands are not wrapped, so that
    they can be copied; several have lines of their own."""
    if time.monotonic() - STARTED >= 1:
        text = f" {commands[0]}" if len(commands) == 1 else "".join(f"\n  {command}" for command in commands)
        log.info("%s:%s", done, text, extra={"as_is": True})


def wrap(text: str, stream: IO[str]) -> str:
    """Text for a stream: on a terminal, lines are wrapped between words, and aligned with the last column if
    they are rows of a table."""
    if not stream.isatty():
        return text
    width = columns_of(stream) - 1
    return "\n".join(_wrap_line(line, width) for line in text.split("\n"))


def columns_of(stream: IO[str]) -> int:
    """The width of a terminal."""
    with suppress(OSError):
        if columns := os.get_terminal_size(stream.fileno()).columns:
            return columns
    return shutil.get_terminal_size().columns


def _wrap_line(line: str, width: int) -> str:
    table = re.match(r".*\S {2,}(?=\S)", line)
    indent = len(table[0]) if table else 2 + len(line) - len(line.lstrip())
    if len(line) <= width or indent > width - 20:
        return line
    words = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
    first, rest = (table[0], line[len(table[0]) :]) if table else ("", line)
    words.initial_indent, words.subsequent_indent = first, " " * indent
    return words.fill(rest) if table else "\n".join(words.wrap(rest))


def require_unicode(text: str) -> str:
    """Typed text. Raises DataError if it was not UTF-8: Python decodes its bytes as lone surrogates."""
    if any("\ud800" <= c <= "\udfff" for c in text):
        raise DataError(f"{text}: not valid UTF-8")
    return text


def typed_input(text: Sequence[str] | None, input_file: Path | None) -> tuple[list[str], Path | None]:
    """The lines of TEXT and, if there is none, the file to read; a TEXT of `-` stands for stdin. Raises
    UsageError if both are given, DataError for text that is not UTF-8."""
    if text and input_file:
        raise UsageError("TEXT and --input were both given; give one of them")
    if text == ["-"]:
        return [], Path("-")
    for each in text or []:
        if _names_file(each):
            log.warning("%s is translated as text, but is a file; to read its lines, give -i %s", each, each)
    texts = [require_unicode(each).replace("\r\n", "\n").removesuffix("\n") for each in text or []]
    return [line for each in texts for line in each.split("\n")], input_file


def _names_file(text: str) -> bool:
    """Whether a text without spaces is the path of a file."""
    with suppress(OSError, ValueError):
        return " " not in text and Path(text).is_file()
    return False


def require_file(path: Path | None) -> None:
    """Raise DataError if an input file is missing or a folder. None and `-`, stdin, are always accepted."""
    if path is not None and str(path) != "-" and (path.is_dir() or not path.exists()):
        raise DataError(f"{path}: {'a folder, not a file' if path.is_dir() else 'no such file'}")


def require_files(paths: Iterable[Path], command: str) -> None:
    """Raise UsageError if one of the input files of a command is `-`, stdin, which it cannot read, and
    DataError if one is missing or a folder."""
    for path in paths:
        if str(path) == "-":
            raise UsageError(f"{command} cannot read from stdin; give files")
        require_file(path)


def read_lines(path: Path) -> Iterator[str]:
    """Read the lines of a file, or of stdin for `-`. Raises DataError at the first that is not valid text."""
    from mtrain.data.reading.lines import lines_of, raise_errors
    from mtrain.data.reading.lines import read_lines as lines_of_file

    on_stdin = str(path) == "-"
    yield from decode_stdin(lines_of(sys.stdin.buffer)) if on_stdin else raise_errors(lines_of_file(path))


def decode_stdin(lines: Iterable[bytes]) -> Iterator[str]:
    """The lines of stdin as text. Raises DataError at the first that is not valid text."""
    from mtrain.data.reading.lines import decode_lines, raise_errors

    try:
        yield from raise_errors(decode_lines(lines, "<stdin>"))
    except OSError as error:
        raise DataError(f"<stdin>: cannot read: {error.strerror}") from None
