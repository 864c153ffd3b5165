"""Cuts a file of lines, plain or compressed, into blocks of lines, without decoding them."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from mtrain.data import COMPRESSION
from mtrain.data.reading.lines import BUFFER, Digests, cannot_read, cut_long_lines, open_bytes
from mtrain.errors import DataError

_BLANK = b" \r\n"  # the characters of blank lines


class LineBlocks:
    """Cuts a file into blocks of lines, without decoding them."""

    def __init__(
        self, path: Path, stream: io.BufferedReader, lines: int = 0, offset: int = 0, records: bool = False
    ):
        """`stream` has the contents of the file after the given number of lines and bytes. With `records`,
        blank lines at the end of the file do not count, as in TSV and JSONL."""
        self._path, self._stream = path, stream
        self._records = records
        self._rest = b""  # what was read, but not returned yet
        self._is_in_line = False  # whether what was read ends inside a line
        self.lines, self.offset = lines, offset  # read so far, in lines and bytes

    def take(self, count: int) -> bytes:
        """The next `count` lines with their ends, or all that are left. Lines longer than MAX_LINE are cut to
        MAX_LINE + 1 bytes. Raises DataError if the file cannot be read, as the other methods do."""
        return b"".join(cut_long_lines(self._advance(count)))

    def skip(self, count: int) -> int:
        """Skip what `take` returns, and return its size in bytes in the file."""
        return sum(map(len, self._advance(count)))

    def _advance(self, count: int) -> Iterator[bytes]:
        """The next `count` lines, in parts of any size."""
        missing, last = count, b"\n"
        while missing and (part := self._rest or self._read()):
            self._rest = b""
            ends = np.frombuffer(part, np.uint8) == ord("\n")
            found = int(np.count_nonzero(ends))  # several times as fast as `bytes.count`
            if found >= missing:
                end = int(np.flatnonzero(ends)[missing - 1]) + 1
                part, self._rest = part[:end], part[end:]
                found = missing
            missing -= found
            self.offset += len(part)
            last = part
            yield part
        self.lines += count - missing + (not last.endswith(b"\n"))

    def _read(self) -> bytes:
        """Some of the bytes that follow: none only at the end. With `records`, reads more while they end with
        whitespace, up to 2 * BUFFER, so that blank lines at the end of the file can be dropped."""
        part = self._read_file()
        while self._records and part and part[-1] in _BLANK and len(part) < 2 * BUFFER:
            if not (following := self._read_file()):
                part = self._without_blank_end(part)
                break
            part += following
        self._is_in_line = bool(part) and not part.endswith(b"\n")
        return part

    def _without_blank_end(self, part: bytes) -> bytes:
        """The last bytes of a file without the blank lines after the end of the last other line."""
        text = part.rstrip(_BLANK)
        if not text and not self._is_in_line:
            return b""
        return part[: part.find(b"\n", len(text)) + 1 or None]

    def _read_file(self) -> bytes:
        try:
            return self._stream.read1(BUFFER)
        except (OSError, ValueError) as error:
            # If two files are read together, `open_blocks` would name the one that was opened last.
            raise cannot_read(self._path, error) from None

    def peek(self) -> bytes:
        """Some of the bytes that follow: none only at the end."""
        self._rest = self._rest or self._read()
        return self._rest

    def count_all(self) -> int:
        """The number of lines of the whole file, which is read to its end."""
        while self.skip(2**16):
            pass
        return self.lines


@contextmanager
def open_blocks(
    path: Path, digests: Digests | None = None, lines: int = 0, offset: int = 0, records: bool = False
) -> Iterator[LineBlocks]:
    """The lines of a plain, `.gz` or `.zst` file after the first `lines`, which have `offset` decompressed
    bytes, in blocks. `digests` receives the SHA-256 of the file when all of it has been read. `records` is as
    in `LineBlocks`.

    Raises DataError if the file cannot be read.
    """
    with open_bytes(path, None if offset else digests, offset) as stream:
        yield LineBlocks(path, stream, lines, offset, records)


def is_seekable(path: Path) -> bool:
    """Whether any part of a file can be read without what is before it."""
    return path.suffix not in COMPRESSION and path.is_file()


def read_range(path: Path, start: int, size: int) -> bytes:
    """Some bytes of a plain file; lines that are too long are cut. Raises DataError if the file cannot be
    read, or has become shorter."""
    with open_bytes(path, offset=start) as stream:
        return b"".join(cut_long_lines(_read_parts(path, stream, size)))


def _read_parts(path: Path, stream: io.BufferedReader, size: int) -> Iterator[bytes]:
    while size and (part := stream.read1(min(size, BUFFER))):
        size -= len(part)
        yield part
    if size:
        raise DataError(f"{path}: changed while it was read; run again")
