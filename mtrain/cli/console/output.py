"""Where results go: stdout, a device or a pipe, or a file that is replaced when it is complete."""

import io
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import IO, Any, cast

from mtrain.cli.console.terminal import discard_output
from mtrain.data import COMPRESSION
from mtrain.errors import StorageError, UsageError, cannot_write
from mtrain.invisible_characters import escape_control_characters, isolate

# Suffixes of compressed files that cannot be written. `.tar` is not one of them, as it is a language code;
# `.tgz` is one, although it is a language code, too.
_UNSUPPORTED = {".7z", ".bz2", ".gzip", ".lz", ".lz4", ".lzma", ".tgz", ".xz", ".z", ".zip", ".zstd"}
FLUSH_EVERY = 0.2  # seconds: the reader of a pipe sees results soon


def is_stdout(path: Path) -> bool:
    """Whether a path, such as - or /dev/stdout, is where stdout goes."""
    if str(path) == "-":
        return True
    try:
        return os.path.samestat(os.fstat(1), path.stat())
    except OSError:
        return False


def is_stream(path: Path | None) -> bool:
    """Whether results go to stdout, a device or a pipe, rather than to a file."""
    return path is None or is_stdout(path) or (path.exists() and not path.is_file())


def is_on_screen(path: Path | None) -> bool:
    """Whether results go to a terminal, where a progress bar would be in the way."""
    return (path is None or is_stdout(path)) and sys.stdout.isatty()


def require_writable(path: Path | None, inputs: Sequence[Path | None]) -> None:
    """Check an output file before any work. Raises StorageError if its folder is missing or it is a folder,
    UsageError if it is also one of the `inputs` or stdin, or if its compression is not supported."""
    if path is None:
        return
    if path.suffix not in COMPRESSION and path.suffix.lower() in {*_UNSUPPORTED, *COMPRESSION}:
        wanted = "a name that ends in .gz or .zst, or has no compression suffix"
        raise UsageError(f"{path}: cannot write {path.suffix} files; give {wanted}")
    if not path.resolve().parent.is_dir():
        raise StorageError(f"{path}: cannot write: no such folder")
    if path.is_dir():
        raise StorageError(f"{path}: cannot write: a folder, not a file")
    if is_stream(path):
        return
    # A file would be replaced, so its own permissions do not matter to the system, but to its owner.
    if not os.access(path.resolve().parent, os.W_OK | os.X_OK) or (
        path.exists() and not os.access(path, os.W_OK)
    ):
        raise StorageError(f"{path}: cannot write: no permission")
    read = [file.stat() for file in inputs if file is not None and str(file) != "-"]
    with suppress(OSError):  # stdin may be closed
        read.append(os.fstat(0))
    if path.exists() and any(os.path.samestat(path.stat(), other) for other in read):
        raise UsageError(f"{path}: this file is also an input; give another file")


@contextmanager
def open_stdout(columns: bool = False) -> Iterator[IO[str]]:
    """Open stdout. It is not an error if its reader exits early, as `head` does. Control characters that are
    written to a terminal are escaped; for `columns`, see `shown_on`."""
    try:
        yield shown_on(sys.stdout, columns)
        sys.stdout.flush()
    except BrokenPipeError:
        discard_output()


def print_to_stdout(text: object) -> None:
    """Print a line, or several, on stdout, as `open_stdout` does."""
    with open_stdout() as out:
        print(text, file=out)


@contextmanager
def open_output(path: Path | None, columns: bool = False) -> Iterator[IO[str]]:
    """Open stdout, a device or a pipe, or a file, which is replaced if the block succeeds; for `columns`, see
    `shown_on`.

    Output to a path that ends in .gz or .zst is compressed. Raises StorageError if writing fails.
    """
    if path is None or is_stdout(path):
        with open_stdout(columns) as stream:
            yield stream
        return
    from mtrain.storage.atomic import replacing

    if path.suffix in COMPRESSION:
        import pyarrow  # noqa: F401  # now: a stop signal during an import leaves temporary files
    place: AbstractContextManager[Path] = nullcontext(path) if is_stream(path) else replacing(path)
    try:
        with place as written, _opened(written, path) as stream:
            yield shown_on(stream, columns)
    except BrokenPipeError:  # of stdout, which the block may write to as well
        raise
    except OSError as error:
        raise cannot_write(path, error) from None


class _Terminal:
    """Writes text to a terminal, with control characters escaped, except for line feeds and tabs. With
    `columns`, which tabs separate, right-to-left text is isolated."""

    def __init__(self, stream: IO[str], columns: bool):
        self._stream, self._columns = stream, columns

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> None:
        shown = escape_control_characters(text, "\n\t")
        if self._columns:
            shown = re.sub(r"[^\t\n]+(?=\t)|(?<=\t)[^\t\n]+", lambda column: isolate(column[0]), shown)
        self._stream.write(shown)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)


def shown_on(stream: IO[str], columns: bool = False) -> IO[str]:
    """The stream itself or, if it is a terminal, one that escapes control characters. If text is written in
    `columns`, such as a translation and its score, the terminal shows each in its own direction."""
    return cast(IO[str], _Terminal(stream, columns)) if stream.isatty() else stream


def write_lines(lines: Iterable[str], out: IO[str], flush_every: float = FLUSH_EVERY) -> None:
    """Write lines as they arrive, and flush the output with the first one after `flush_every` seconds."""
    flushed = time.monotonic()
    for line in lines:
        out.write(line)
        if time.monotonic() - flushed >= flush_every:
            out.flush()
            flushed = time.monotonic()


class _OutputFile(io.FileIO):
    """A file, a device or a named pipe. If the reader of a pipe exits, results are lost: an error, unlike
    with stdout."""

    def __init__(self, written: Path, path: Path):
        """`written` is the file, and `path` the name that errors give it."""
        super().__init__(written, "wb")
        self._path = path

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            # If two files are open, `open_output` would name the one that was opened last.
            raise cannot_write(self._path, error) from None


@contextmanager
def _opened(written: Path, path: Path) -> Iterator[IO[str]]:
    """The file `written`, opened for UTF-8 text, and compressed if the suffix of `path` says so."""
    compression = COMPRESSION.get(path.suffix)
    with io.BufferedWriter(_OutputFile(written, path)) as raw:
        stream: IO[bytes] = raw
        if compression is not None:
            import pyarrow as pa

            stream = pa.output_stream(raw, compression=compression)
        with io.TextIOWrapper(stream, encoding="utf-8", newline="\n") as text:
            yield text
