"""Cuts corpora of every kind into blocks of pairs that are not decoded yet, which is fast.

Two files with different line counts are an error, because their lines would be misaligned.
"""

import io
import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mtrain.config.sections.corpora import Corpus, HubCorpus, ParquetCorpus, ToyCorpus, TsvCorpus, name_of
from mtrain.data import COMPRESSION
from mtrain.data.reading.files import files_by_pair, files_of, toy_pairs
from mtrain.data.reading.lines import BUFFER, Digests, cannot_read, cut_long_lines, open_bytes
from mtrain.errors import DataError

BLOCK = 10_000  # pairs that are read at a time
_BLANK = b" \r\n"  # the characters of blank lines
Column = int | str  # a column of TSV, from 0, or a field of JSONL and tables


class RawPosition(NamedTuple):
    """Where to continue reading a corpus."""

    first: int = 1  # number of the next pair, from 1
    # Of a corpus of lines: the bytes before it in the decompressed file of each side and, after the first of
    # several files, the index of the file and the number of pairs before that file.
    offsets: tuple[int, ...] = (0, 0)


START = RawPosition()


class RawBlock(NamedTuple):
    """Consecutive pairs of a corpus, not decoded yet."""

    first: int  # number of the first pair, from 1
    end: RawPosition  # after the last pair
    lines: tuple[bytes, ...]  # of the file or of the two files, with their ends
    records: Sequence[Any]  # instead of lines, for other kinds of corpora
    names: tuple[str, ...]  # of the file or of the two files
    skipped: int = 0  # pairs of the corpus before these files, minus 1 if they have a header
    # In place of lines: the first byte and the number of bytes in each file, to be read by another process.
    ranges: Sequence[tuple[int, int]] = ()

    @property
    def size(self) -> int:
        """The number of bytes, if they are known."""
        return sum(map(len, self.lines)) + sum(size for _, size in self.ranges)


def read_blocks(
    corpus: Corpus,
    digests: Digests | None = None,
    size: int = BLOCK,
    start: RawPosition = START,
    by_range: bool = False,
    score: Column | None = None,
) -> Iterator[RawBlock]:
    """Yield the pairs of a corpus in order, in blocks of `size` pairs, from a position on. With `by_range`,
    the blocks of plain files of lines have ranges of bytes in place of the lines. `score` is the column or
    field of a score that is needed besides source and target.

    `digests` receives the SHA-256 of each file that has been read completely. Raises DataError if the
    corpus is missing or unreadable, or if its sides differ in length.
    """
    columns: list[str] = []
    if isinstance(corpus, ParquetCorpus | HubCorpus):
        fields = [corpus.source_field, corpus.target_field] + ([score] if isinstance(score, str) else [])
        columns = [field.split(".")[0] for field in fields]
    if isinstance(corpus, ParquetCorpus):
        from mtrain.data.reading.parquet import read_parquet  # takes long to import

        first = start.first
        for file, skipped, rows in read_parquet(files_of(corpus), columns, size, first - 1, digests):
            end = first + len(rows)
            yield RawBlock(first, RawPosition(end), (), rows, (str(file),), skipped)
            first = end
        return
    if not isinstance(corpus, HubCorpus | ToyCorpus):
        has_header = isinstance(corpus, TsvCorpus) and corpus.header
        yield from _read_lines(files_by_pair(corpus), digests, size, start, by_range, has_header)
        return
    records: Any = toy_pairs(corpus.toy) if isinstance(corpus, ToyCorpus) else load_dataset(corpus)
    if columns and {*columns} <= {*records.column_names}:  # else an error names all columns
        records = records.select_columns([*dict.fromkeys(columns)])
    for begin in range(start.first - 1, len(records), size):
        block = records[begin : begin + size]
        if isinstance(block, dict):  # the columns of a table
            block = [dict(zip(block, row, strict=True)) for row in zip(*block.values(), strict=True)]
        yield RawBlock(begin + 1, RawPosition(begin + 1 + len(block)), (), block, (name_of(corpus),))


def _read_lines(
    files: list[tuple[Path, ...]],
    digests: Digests | None,
    size: int,
    start: RawPosition,
    by_range: bool,
    has_header: bool,
) -> Iterator[RawBlock]:
    """Read files of lines one after another, or pairs of files."""
    first, offsets = start
    # A header makes the line of a pair in its file one more than its number among the pairs of the file.
    index, skipped = 0, -has_header
    sides = len(files[0])
    if len(offsets) == sides + 2:
        index, skipped = offsets[sides:]
    for number, paths in enumerate(files[index:], index):
        names, in_ranges = tuple(map(str, paths)), by_range and all(map(is_seekable, paths))
        with ExitStack() as stack:
            lines_before = 0 if offsets[0] == 0 else first - 1 - skipped
            streams = [
                stack.enter_context(open_blocks(path, digests, lines_before, offset, records=sides == 1))
                for path, offset in zip(paths, offsets, strict=False)
            ]
            if has_header and lines_before == 0:
                streams[0].take(1)
            # Blocks end at multiples of their size, whatever the sizes of the files.
            while any(stream.peek() for stream in streams):
                count = size - (first - 1) % size
                lines, ranges = tuple[bytes, ...](), list[tuple[int, int]]()
                if in_ranges:
                    ranges = [(stream.offset, stream.skip(count)) for stream in streams]
                else:
                    lines = tuple(stream.take(count) for stream in streams)
                _require_equal_counts(paths, streams)
                end = skipped + streams[0].lines + 1
                offsets = tuple(stream.offset for stream in streams)
                position = RawPosition(end, (*offsets, *((number, skipped) if number else ())))
                yield RawBlock(first, position, lines, (), names, skipped, ranges)
                first = end
        offsets, skipped = (0,) * sides, first - 1 - has_header


def load_dataset(corpus: HubCorpus) -> Any:
    """A memory-mapped `datasets.Dataset`."""
    import datasets

    datasets.utils.logging.set_verbosity(logging.CRITICAL)  # errors are reported below, in one line
    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)
    try:
        return datasets.load_dataset(corpus.hub, corpus.config, split=corpus.split, revision=corpus.revision)
    except Exception as error:  # the library and its dependencies raise dozens of exception types
        reason = " ".join(str(error.__cause__ or error).split())[:300]
        raise DataError(f"{name_of(corpus)}: cannot load the dataset: {reason}") from error


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


def _require_equal_counts(paths: Sequence[Path], streams: Sequence[LineBlocks]) -> None:
    """Raise DataError if the files of two sides differ in length."""
    if len({stream.lines for stream in streams}) > 1:
        counts = [stream.count_all() for stream in streams]
        reason = f"{paths[0]} has {counts[0]} lines but {paths[1]} has {counts[1]} lines"
        raise DataError(f"{reason}; the pairs would be misaligned")
