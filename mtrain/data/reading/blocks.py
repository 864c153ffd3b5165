"""Reads corpora of every kind in blocks of pairs: raw blocks, which are cut fast, and decoded ones.

Two files with different line counts are an error, because their lines would be misaligned. A pair that cannot
be read is a DataError with `file:line` and the reason.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import compress, islice
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from mtrain.config.sections.corpora import Corpus, FieldsCorpus, HubCorpus, ParquetCorpus, TsvCorpus, name_of
from mtrain.data import Pair
from mtrain.data.reading.files import LineCorpus, files_by_pair, files_of, load_dataset, toy_pairs
from mtrain.data.reading.lines import Digests, LineBlocks, decode_block, is_seekable, open_blocks, read_range
from mtrain.data.reading.records import Column, ScoredPair, columns_of, split_quoted, try_pair
from mtrain.errors import DataError
from mtrain.invisible_characters import is_blank

BLOCK = 10_000  # pairs that are read at a time
_SMALL = 100  # pairs that are read at a time if they are wanted one by one, perhaps from a pipe


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
    fields: list[str] = []
    if isinstance(corpus, ParquetCorpus | HubCorpus):
        fields = [corpus.source_field, corpus.target_field] + ([score] if isinstance(score, str) else [])
    if isinstance(corpus, ParquetCorpus):
        from mtrain.data.reading.parquet import read_parquet  # takes long to import

        first = start.first
        for file, skipped, rows in read_parquet(files_of(corpus), fields, size, first - 1, digests):
            end = first + len(rows)
            yield RawBlock(first, RawPosition(end), (), rows, (str(file),), skipped)
            first = end
        return
    if isinstance(corpus, LineCorpus):
        yield from _read_lines(corpus, digests, size, start, by_range)
        return
    records: Any = load_dataset(corpus) if isinstance(corpus, HubCorpus) else toy_pairs(corpus.toy)
    if fields:  # without columns such as audio, which take long to decode or cannot be decoded
        decoded = [name for name, feature in records.features.items() if hasattr(feature, "decode_example")]
        others = [name for name in records.column_names if name not in decoded]
        records = records.select_columns(columns_of(fields, records.column_names) or others)
    for begin in range(start.first - 1, len(records), size):
        block = records[begin : begin + size]
        if isinstance(block, dict):  # the columns of a table
            block = [dict(zip(block, row, strict=True)) for row in zip(*block.values(), strict=True)]
        yield RawBlock(begin + 1, RawPosition(begin + 1 + len(block)), (), block, (name_of(corpus),))


def _read_lines(
    corpus: LineCorpus, digests: Digests | None, size: int, start: RawPosition, by_range: bool
) -> Iterator[RawBlock]:
    """Read files of lines one after another, or pairs of files."""
    files, has_header = files_by_pair(corpus), isinstance(corpus, TsvCorpus) and corpus.header
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


def _require_equal_counts(paths: Sequence[Path], streams: Sequence[LineBlocks]) -> None:
    """Raise DataError if the files of two sides differ in length."""
    if len({stream.lines for stream in streams}) > 1:
        counts = [stream.count_all() for stream in streams]
        reason = f"{paths[0]} has {counts[0]} lines but {paths[1]} has {counts[1]} lines"
        raise DataError(f"{reason}; the pairs would be misaligned")


class Block(NamedTuple):
    """Consecutive pairs of a corpus: the readable ones, and the errors of the others."""

    sources: list[str]
    targets: list[str]
    numbers: Sequence[int]  # of the readable pairs in the corpus, from 1
    errors: dict[int, DataError]  # by number, ascending
    name: str  # of the file; of the source file if there are two
    skipped: int = 0  # pairs of the corpus before this file, minus 1 if it has a header
    scores: Sequence[float] = ()  # of the readable pairs, if they were asked for

    @property
    def indices(self) -> npt.NDArray[np.int64]:
        """The indices of the readable pairs among all pairs of the block, if none was left out."""
        first = min((*self.numbers[:1], *islice(self.errors, 1)))
        return np.asarray(self.numbers, np.int64) - first

    def select(self, kept: Sequence[bool] | npt.NDArray[np.bool_]) -> "Block":
        """The block with some of its readable pairs; `kept` says which."""
        return self._replace(
            sources=list(compress(self.sources, kept)),
            targets=list(compress(self.targets, kept)),
            numbers=list(compress(self.numbers, kept)),
            scores=list(compress(self.scores, kept)),
        )

    def have_text(self) -> list[bool]:
        """Whether neither side of each readable pair is blank."""
        both = zip(self.sources, self.targets, strict=True)
        return [not (is_blank(source) or is_blank(target)) for source, target in both]

    def usable(self) -> "Block":
        """The readable pairs of which neither side is blank."""
        return self.select(self.have_text())._replace(errors={})

    def refuse_errors(self, bad_lines: str) -> None:
        """Raise the error of the first unreadable pair, unless `bad_lines` is "skip"."""
        for error in self.errors.values():
            refuse_unless_skipped(error, bad_lines)

    def place_of(self, number: int) -> str:
        """The location of a pair, as `file:line`."""
        return f"{self.name}:{number - self.skipped}"


def parse_block(raw: RawBlock, corpus: Corpus, score: Column | None = None) -> Block:
    """Decode the pairs of a block and, if the column or field `score` is given, the number that it has for
    each pair. A pair without this number is unreadable."""
    sides, name = _decode_sides(raw), raw.names[0]
    if block := _parse_readable(raw, sides, corpus, score):  # fast path
        return block
    items: list[Pair | ScoredPair | DataError]
    if len(sides) == 2:  # of two files
        items = [
            next((side for side in pair if isinstance(side, DataError)), Pair(*cast(Pair, pair)))
            for pair in zip(*sides, strict=True)
        ]
    elif isinstance(corpus, TsvCorpus | FieldsCorpus):
        records = enumerate(sides[0] if sides else raw.records, raw.first - raw.skipped)
        items = [try_pair(item, corpus, name, number, score) for number, item in records]
    else:
        items = [*raw.records]
    errors = {n: item for n, item in enumerate(items, raw.first) if isinstance(item, DataError)}
    numbers = [n for n in range(raw.first, raw.first + len(items)) if n not in errors]
    pairs = [item for item in items if not isinstance(item, DataError)]
    sources, targets = [pair.source for pair in pairs], [pair.target for pair in pairs]
    scores = [pair.score for pair in pairs if isinstance(pair, ScoredPair)]
    return Block(sources, targets, numbers, errors, name, raw.skipped, scores)


def _decode_sides(raw: RawBlock) -> list[list[str | DataError]]:
    """The lines of the file or of the two files of a block; none if it has records instead."""
    lines = raw.lines
    if raw.ranges:
        parts = zip(raw.names, raw.ranges, strict=True)
        lines = tuple(read_range(Path(name), *part) for name, part in parts)
    both = zip(raw.names, lines, strict=True) if lines else ()
    sides = [decode_block(side, name, raw.first - raw.skipped) for name, side in both]
    if len(set(map(len, sides))) > 1:  # they had equal counts when the ranges were chosen
        raise DataError(f"{raw.names[0]}: changed while it was read; run again")
    return sides


def _parse_readable(
    raw: RawBlock, sides: list[list[str | DataError]], corpus: Corpus, score: Column | None
) -> Block | None:
    """Parse lines of text or TSV of which each has a pair. None if one has none, or if there are records."""
    has_lines = len(sides) == 2 or isinstance(corpus, TsvCorpus)
    if not has_lines or any(set(map(type, side)) - {str} for side in sides):
        return None
    lines, scores = cast(list[list[str]], sides), list[float]()
    if isinstance(corpus, TsvCorpus):
        source, target = corpus.source_column, corpus.target_column
        try:
            rows = [split_quoted(line) if corpus.quotes else line.split("\t") for line in lines[0]]
            if min(map(len, rows), default=0) <= max(source, target, score if isinstance(score, int) else 0):
                return None
            scores = [float(row[score]) for row in rows] if isinstance(score, int) else []
        except (ValueError, DataError):
            return None
        lines = [[row[source] for row in rows], [row[target] for row in rows]]
    numbers = range(raw.first, raw.first + len(lines[0]))
    return Block(lines[0], lines[1], numbers, {}, raw.names[0], raw.skipped, scores)


def read_corpus(corpus: Corpus) -> Iterator[Pair | DataError]:
    """Yield the pairs of a corpus in order, and a DataError for each pair that cannot be read. Raises
    DataError if the corpus is missing or unreadable, or if its sides differ in length."""
    for raw in read_blocks(corpus, size=_SMALL):
        block = parse_block(raw, corpus)
        items: dict[int, Pair | DataError] = {**block.errors}
        items.update(zip(block.numbers, map(Pair, block.sources, block.targets), strict=True))
        yield from (items[number] for number in sorted(items))


def read_pairs(corpus: Corpus, bad_lines: str) -> Iterator[Pair | None]:
    """Like `read_corpus`, but an unreadable pair raises DataError, or is None if `bad_lines` is "skip"."""
    for pair in read_corpus(corpus):
        if isinstance(pair, DataError):
            refuse_unless_skipped(pair, bad_lines)
        yield None if isinstance(pair, DataError) else pair


def refuse_unless_skipped(error: DataError, bad_lines: str) -> None:
    """Raise the error of an unreadable pair, unless `bad_lines` is "skip"."""
    if bad_lines != "skip":
        raise DataError(f"{error}; fix it, or set data.bad_lines: skip to drop such pairs")


def good_pairs(corpora: Iterable[Corpus], bad_lines: str) -> Iterator[Pair]:
    """Pairs of several corpora. Unreadable pairs raise DataError or, if `bad_lines` is skip, are skipped."""
    return (pair for corpus in corpora for pair in read_pairs(corpus, bad_lines) if pair is not None)
