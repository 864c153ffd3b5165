"""Readers of parallel text: every kind of corpus as a stream of aligned pairs.

`read_blocks` cuts a corpus into blocks of raw pairs, which is fast, and `parse_block` decodes them. Two files
with different line counts are an error, because their lines would be misaligned. A pair that cannot be read
is a DataError with `file:line` and the reason.
"""

import hashlib
import json
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, cast

from mtrain.config.corpora import (
    Corpus,
    FieldsCorpus,
    HubCorpus,
    ParquetCorpus,
    SacrebleuCorpus,
    TextCorpus,
    ToyCorpus,
    TsvCorpus,
)
from mtrain.data import Pair
from mtrain.data.corpus_files import files_by_pair, files_of, name_of
from mtrain.data.lines import Digests, LineBlocks, decode_block, open_blocks
from mtrain.data.toy import toy_pairs
from mtrain.errors import DataError

BLOCK = 10_000  # pairs that are read at a time
_SURROGATE = re.compile("[\ud800-\udfff]")
_SMALL = 100  # pairs that are read at a time if they are wanted one by one, perhaps from a pipe
_Table = ParquetCorpus | HubCorpus


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
    skipped: int = 0  # pairs of the corpus before these files


class Block(NamedTuple):
    """Consecutive pairs of a corpus: those that are readable, and the errors of the others."""

    sources: list[str]
    targets: list[str]
    numbers: Sequence[int]  # of the readable pairs in the corpus, from 1
    errors: dict[int, DataError]  # by number, ascending
    name: str  # of the file, that of the sources if there are two
    skipped: int = 0  # pairs of the corpus before this file

    def place_of(self, number: int) -> str:
        """The location of a pair, as `file:line`."""
        return f"{self.name}:{number - self.skipped}"


def read_blocks(
    corpus: Corpus, digests: Digests | None = None, size: int = BLOCK, start: RawPosition = START
) -> Iterator[RawBlock]:
    """Yield the pairs of a corpus in order, in blocks of `size` pairs, from a position on.

    `digests` receives the SHA-256 of each text file that has been read completely. Raises DataError if the
    corpus is missing or unreadable, or if its sides differ in length.
    """
    if not isinstance(corpus, _Table | ToyCorpus):
        yield from _read_lines(files_by_pair(corpus), digests, size, start)
        return
    records = toy_pairs(corpus.toy) if isinstance(corpus, ToyCorpus) else _load_table(corpus)
    for begin in range(start.first - 1, len(records), size):
        block = records[begin : begin + size]
        if isinstance(block, dict):  # the columns of a table
            block = [dict(zip(block, row, strict=True)) for row in zip(*block.values(), strict=True)]
        yield RawBlock(begin + 1, RawPosition(begin + 1 + len(block)), (), block, (name_of(corpus),))


def _read_lines(
    files: list[tuple[Path, ...]], digests: Digests | None, size: int, start: RawPosition
) -> Iterator[RawBlock]:
    """Read files of lines one after another, or pairs of files."""
    first, offsets = start
    sides, index, skipped = len(files[0]), 0, 0
    if len(offsets) == sides + 2:
        index, skipped = offsets[sides:]
    for number, paths in enumerate(files[index:], index):
        with ExitStack() as stack:
            streams = [
                stack.enter_context(open_blocks(path, digests, first - 1 - skipped, offset))
                for path, offset in zip(paths, offsets, strict=False)
            ]
            # Blocks end at multiples of their size, whatever the sizes of the files.
            while any(lines := tuple(stream.take(size - (first - 1) % size) for stream in streams)):
                _require_equal_counts(paths, streams)
                end = skipped + streams[0].lines + 1
                offsets = tuple(stream.offset for stream in streams)
                position = RawPosition(end, (*offsets, *((number, skipped) if number else ())))
                yield RawBlock(first, position, lines, (), tuple(map(str, paths)), skipped)
                first = end
        offsets, skipped = (0,) * sides, first - 1


def _require_equal_counts(paths: Sequence[Path], streams: Sequence[LineBlocks]) -> None:
    """Raise DataError if the files of two sides differ in length."""
    if len({stream.lines for stream in streams}) > 1:
        counts = [stream.count_all() for stream in streams]
        reason = f"{paths[0]} has {counts[0]} lines but {paths[1]} has {counts[1]} lines"
        raise DataError(f"{reason}; the pairs would be misaligned")


def parse_block(raw: RawBlock, corpus: Corpus) -> Block:
    """Decode the pairs of a block."""
    first, skipped, name = raw.first, raw.skipped, raw.names[0]
    lines = zip(raw.lines, raw.names, strict=True) if raw.lines else ()
    sides = [decode_block(side, file, first - skipped) for side, file in lines]
    if columns := _readable_columns(sides, corpus):  # fast path
        return Block(*columns, range(first, first + len(columns[0])), {}, name, skipped)
    items: list[Pair | DataError]
    if isinstance(corpus, TextCorpus | SacrebleuCorpus):
        both = zip(*sides, strict=True)
        errors_first = (next((side for side in pair if isinstance(side, DataError)), pair) for pair in both)
        items = [item if isinstance(item, DataError) else Pair(*cast(Pair, item)) for item in errors_first]
    elif isinstance(corpus, ToyCorpus):
        items = [*raw.records]
    else:
        records = sides[0] if sides else raw.records
        items = [_try_pair(item, corpus, name, n) for n, item in enumerate(records, first - skipped)]
    errors = {n: item for n, item in enumerate(items, first) if isinstance(item, DataError)}
    numbers: Sequence[int] = range(first, first + len(items))
    if errors:
        numbers = [n for n in numbers if n not in errors]
    pairs = [item for item in items if not isinstance(item, DataError)]
    sources, targets = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    return Block(sources, targets, numbers, errors, name, skipped)


def _readable_columns(
    sides: list[list[str | DataError]], corpus: Corpus
) -> tuple[list[str], list[str]] | None:
    """The source and target texts in lines of text or TSV. None if one cannot be read."""
    if not isinstance(corpus, TextCorpus | SacrebleuCorpus | TsvCorpus) or any(
        set(map(type, side)) - {str} for side in sides
    ):
        return None
    lines = cast(list[list[str]], sides)
    if not isinstance(corpus, TsvCorpus):
        return lines[0], lines[1]
    rows, columns = [line.split("\t") for line in lines[0]], (corpus.source_column, corpus.target_column)
    if min(map(len, rows), default=0) <= max(columns):
        return None
    return [row[columns[0]] for row in rows], [row[columns[1]] for row in rows]


def read_corpus(corpus: Corpus, digests: Digests | None = None) -> Iterator[Pair | DataError]:
    """Yield the pairs of a corpus in order, and a DataError for each pair that cannot be read. Arguments and
    errors are those of `read_blocks`."""
    for raw in read_blocks(corpus, digests, _SMALL):
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


def content_hash(corpus: Corpus, digests: Digests | None = None) -> str:
    """SHA-256 of the contents of a corpus, without modification times. Files in `digests` are not read; the
    others are added to it."""
    digest, files, digests = hashlib.sha256(), files_of(corpus), {} if digests is None else digests
    if isinstance(corpus, HubCorpus) and not files:
        digest.update(_load_table(corpus)._fingerprint.encode())
    elif isinstance(corpus, ToyCorpus):
        digest.update(json.dumps(toy_pairs(corpus.toy)).encode())
    for file in files:
        if file not in digests:
            with file.open("rb") as stream:
                digests[file] = hashlib.file_digest(stream, "sha256").digest()
        digest.update(digests[file])
    return digest.hexdigest()


# -------------------------------------------------------------------------------------------------- pairs


def _try_pair(item: Any, corpus: TsvCorpus | FieldsCorpus, name: str, number: int) -> Pair | DataError:
    """The pair in a line of TSV or JSONL, or in a row of a table; or a DataError if it has none. `number` is
    that of the line in the file `name`."""
    if isinstance(item, DataError):
        return item
    try:
        return _pair_of(item, corpus)
    except DataError as error:
        return DataError(f"{name}:{number}: {error}")


def _pair_of(item: Any, corpus: TsvCorpus | FieldsCorpus) -> Pair:
    if isinstance(corpus, TsvCorpus):
        columns = item.split("\t")
        needed = max(corpus.source_column, corpus.target_column) + 1
        if len(columns) < needed:
            raise DataError(f"{len(columns)} column(s); at least {needed} expected")
        return Pair(columns[corpus.source_column], columns[corpus.target_column])
    if isinstance(item, str):
        try:
            item = json.loads(item)
        except (ValueError, RecursionError) as error:
            raise DataError(f"not JSON: {error}") from None
    return Pair(_text_of(item, corpus.source_field), _text_of(item, corpus.target_field))


def _text_of(record: Any, field: str) -> str:
    value = record
    for key in field.split("."):
        if not isinstance(value, dict) or key not in value:
            known = ", ".join(map(str, value)) if isinstance(value, dict) else "none"
            raise DataError(f"no field '{field}'; available fields: {known}")
        value = value[key]
    if not isinstance(value, str):
        raise DataError(f"field '{field}' is not a string")
    if "\0" in value or _SURROGATE.search(value):
        raise DataError(f"field '{field}' contains a NUL or an unpaired surrogate")
    return value


def _load_table(corpus: _Table) -> Any:
    """A memory-mapped `datasets.Dataset`."""
    import datasets

    files = [str(file) for file in files_of(corpus)]
    datasets.utils.logging.set_verbosity(logging.CRITICAL)  # errors are reported below, in one line
    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)
    try:
        if isinstance(corpus, ParquetCorpus):
            return datasets.load_dataset("parquet", data_files=files, split="train")
        return datasets.load_dataset(corpus.hub, corpus.config, split=corpus.split, revision=corpus.revision)
    except Exception as error:  # the library and its dependencies raise dozens of exception types
        reason = " ".join(str(error.__cause__ or error).split())[:300]
        raise DataError(f"{name_of(corpus)}: cannot load the dataset: {reason}") from error
