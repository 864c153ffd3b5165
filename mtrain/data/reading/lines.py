"""Reads a file of lines, plain or compressed: in blocks of bytes, or as text.

Lines end at LF only (a CR before it is stripped); other Unicode line separators are part of the text. Text
is strict UTF-8 without NUL, in lines of at most `MAX_LINE` bytes. A line that is not valid text becomes a
DataError with `file:line` and the reason.
"""

import hashlib
import io
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar, cast

from mtrain.data import COMPRESSION, Pair
from mtrain.errors import DataError

MAX_LINE = 2**24  # bytes of a line without its end; the rest of a longer line is not kept in memory
_BUFFER = 2**18  # bytes
Digests = dict[Path, bytes]  # SHA-256 of files
_BLANK = b" \r\n"  # the characters of blank lines
_BOM = b"\xef\xbb\xbf"
_HEAD = 16  # bytes that tell the kind of a file
_NOT_TEXT = {  # by the pattern that the first bytes match
    rb"\x1f\x8b": "compressed with gzip; give it a name that ends in .gz",
    rb"\x28\xb5\x2f\xfd": "compressed with zstd; give it a name that ends in .zst",
    rb"BZh[1-9]1AY&SY": "compressed with bzip2; decompress it, or compress it with gzip or zstd",
    rb"\xfd7zXZ\0": "compressed with xz; decompress it, or compress it with gzip or zstd",
    rb"\x04\x22\x4d\x18|\x1f\x9d|7z\xbc\xaf": "compressed; decompress it, or use gzip or zstd",
    rb"\xff\xfe\0\0|\0\0\xfe\xff": "UTF-32; convert it: iconv -f UTF-32 -t UTF-8 OLD > NEW",
    rb"\xff\xfe|\xfe\xff": "UTF-16; convert it: iconv -f UTF-16 -t UTF-8 OLD > NEW",
    rb"PK\x03\x04": "a ZIP archive, not text",
    rb"PAR1\x15": "a Parquet file, not text",
}


class _HashingReader(io.RawIOBase):
    """Hashes the bytes of an unbuffered file while they are read, if wanted."""

    def __init__(self, file: io.FileIO, wanted: bool):
        self._file, self._wanted = file, wanted
        self.hash = hashlib.sha256()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._file.readinto(buffer) or 0
        if self._wanted:
            self.hash.update(memoryview(buffer)[:count])
        return count


@contextmanager
def _open_bytes(path: Path, digests: Digests | None = None, offset: int = 0) -> Iterator[io.BufferedReader]:
    """The decompressed contents of a plain, `.gz` or `.zst` file, from byte `offset` on. `digests` receives
    the SHA-256 of the file when it has been read from its start to its end. Raises DataError if the file
    cannot be read, or is not text."""
    try:
        with path.open("rb", buffering=0) as file:
            hashing = _HashingReader(file, digests is not None)
            # Not opened by pyarrow, which cannot open a named pipe.
            raw = io.BufferedReader(cast(Any, hashing), _BUFFER)
            if path.suffix not in COMPRESSION:
                if offset:
                    file.seek(offset)
                elif path.is_file():  # the writer of a pipe may wait until another one is open as well
                    _require_text(path, raw)
                yield raw
            elif path.is_file() and not path.stat().st_size:
                raise ValueError(f"empty, so not a {path.suffix} file")
            else:
                import pyarrow as pa  # takes long to import

                with pa.input_stream(raw, compression=COMPRESSION[path.suffix]) as plain:
                    stream = io.BufferedReader(cast(Any, plain), _BUFFER)
                    while offset and (skipped := stream.read(min(offset, _BUFFER))):
                        offset -= len(skipped)
                    yield stream
            if digests is not None:
                while rest := file.read(_BUFFER):  # what follows the compressed data
                    hashing.hash.update(rest)
                digests[path] = hashing.hash.digest()
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise _cannot_read(path, error) from None


def _require_text(path: Path, stream: io.BufferedReader) -> None:
    """Raise DataError if a stream begins like a file of a known kind that is not text."""
    head = stream.peek(_HEAD)
    for pattern, kind in _NOT_TEXT.items():
        if re.match(pattern, head):
            raise DataError(f"{path}: {kind}")


def _cannot_read(path: Path, error: OSError | ValueError) -> DataError:
    """The error to raise for a file that cannot be read."""
    reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else error
    return DataError(f"{path}: cannot read: {reason}")


class LineBlocks:
    """Cuts a file into blocks of lines, without decoding them."""

    def __init__(self, path: Path, stream: io.BufferedReader, lines: int, offset: int, records: bool):
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
        return b"".join(_cut_long_lines(self._advance(count)))

    def skip(self, count: int) -> int:
        """Skip what `take` returns, and return its size in bytes in the file."""
        return sum(map(len, self._advance(count)))

    def _advance(self, count: int) -> Iterator[bytes]:
        """The next `count` lines, in parts of any size."""
        import numpy as np  # takes long to import

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
        whitespace, up to 2 * _BUFFER, so that blank lines at the end of the file can be dropped."""
        part = self._read_file()
        while self._records and part and part[-1] in _BLANK and len(part) < 2 * _BUFFER:
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
            return self._stream.read1(_BUFFER)
        except (OSError, ValueError) as error:
            # If two files are read together, `open_blocks` would name the one that was opened last.
            raise _cannot_read(self._path, error) from None

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
    with _open_bytes(path, None if offset else digests, offset) as stream:
        yield LineBlocks(path, stream, lines, offset, records)


def is_seekable(path: Path) -> bool:
    """Whether any part of a file can be read without what is before it."""
    return path.suffix not in COMPRESSION and path.is_file()


def read_range(path: Path, start: int, size: int) -> bytes:
    """Some bytes of a plain file; lines that are too long are cut. Raises DataError if the file cannot be
    read, or has become shorter."""
    with _open_bytes(path, offset=start) as stream:
        return b"".join(_cut_long_lines(_read_parts(path, stream, size)))


def _read_parts(path: Path, stream: io.BufferedReader, size: int) -> Iterator[bytes]:
    while size and (part := stream.read1(min(size, _BUFFER))):
        size -= len(part)
        yield part
    if size:
        raise DataError(f"{path}: changed while it was read; run again")


def _cut_long_lines(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Cut each line in consecutive parts of a file, each shorter than MAX_LINE, to MAX_LINE + 1 bytes."""
    begun = 0  # bytes of the line that has begun
    for part in parts:
        end = part.find(b"\n")
        size = len(part) if end < 0 else end
        kept = min(size, max(0, MAX_LINE + 1 - begun))
        yield part if kept == size else part[:kept] + part[size:]
        begun = begun + size if end < 0 else len(part) - part.rfind(b"\n") - 1


def decode_block(block: bytes, name: str, first: int) -> list[str | DataError]:
    """The lines of a block, of which the first has number `first` (from 1) in the file `name`."""
    if not block:
        return []
    try:
        if b"\0" in block or len(block) > MAX_LINE:
            raise ValueError
        own = block.removeprefix(_BOM) if first == 1 else block  # a line even if nothing is left of it
        text = (own.replace(b"\r\n", b"\n") if b"\r" in own else own).decode()
    except ValueError:  # a line may not be valid
        return list(decode_lines(io.BytesIO(block), name, first))
    lines = cast(list[str | DataError], text.split("\n"))
    if text.endswith("\n"):
        lines.pop()
    return lines


def read_lines(path: Path) -> Iterator[str | DataError]:
    """Yield the lines of a plain, `.gz` or `.zst` file without line ends, and a DataError for each line that
    is not valid text. Raises DataError if the file cannot be read."""
    with _open_bytes(path) as stream:
        yield from decode_lines(lines_of(stream), str(path))


def lines_of(stream: IO[bytes]) -> Iterator[bytes]:
    """The lines of an open file with their ends; longer lines are cut after MAX_LINE + 2 bytes."""
    while line := stream.readline(MAX_LINE + 2):  # + 2 for CR LF
        yield line
        while len(line) == MAX_LINE + 2 and not line.endswith(b"\n"):
            line = stream.readline(MAX_LINE + 2)


def decode_lines(lines: Iterable[bytes], name: str, first: int = 1) -> Iterator[str | DataError]:
    """Like `read_lines`, for an iterable of lines that include their ends. The first one has number `first`.
    `name` identifies the lines in error messages."""
    for number, line in enumerate(lines, first):
        if number == 1:
            line = line.removeprefix(_BOM)
        line = line.removesuffix(b"\n").removesuffix(b"\r") if line.endswith(b"\n") else line
        if len(line) > MAX_LINE:
            yield DataError(f"{name}:{number}: longer than {MAX_LINE:,} bytes")
            continue
        try:
            text = line.decode("utf-8")
            yield DataError(f"{name}:{number}: contains a NUL character") if "\0" in text else text
        except UnicodeDecodeError as error:
            yield DataError(f"{name}:{number}: not valid UTF-8 (byte {error.start + 1} of the line)")


def read_text(path: Path) -> list[str]:
    """All lines of a file. Raises DataError for the first line that is not valid text."""
    return list(raise_errors(read_lines(path)))


def count_valid_lines(path: Path) -> int:
    """The number of lines of a file. Raises DataError if it cannot be read, or for the first line that is
    not valid text."""
    return sum(1 for _ in raise_errors(read_lines(path)))


T = TypeVar("T", str, Pair)


def raise_errors(items: Iterable[T | DataError]) -> Iterator[T]:
    """Yield the items. Raises the first DataError among them."""
    for item in items:
        if isinstance(item, DataError):
            raise item
        yield item
