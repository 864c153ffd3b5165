"""Readers of parallel text: every kind of corpus as a stream of aligned pairs.

`read_blocks` cuts a corpus into blocks of raw pairs, which is fast, and `parse_block` decodes them. Two files
with different line counts are an error, because their lines would be misaligned. A pair that cannot be read
is a DataError with `file:line` and the reason.
"""

import glob
import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, cast

from mtrain.config.corpora import (
    Corpus,
    FieldsCorpus,
    HubCorpus,
    ParquetCorpus,
    TextCorpus,
    ToyCorpus,
    TsvCorpus,
)
from mtrain.data import Pair
from mtrain.data.lines import Digests, decode_block, open_blocks
from mtrain.data.toy import toy_pairs
from mtrain.errors import DataError

BLOCK = 10_000  # pairs that are read at a time
_SMALL = 100  # pairs that are read at a time if they are wanted one by one, perhaps from a pipe
_Table = ParquetCorpus | HubCorpus


class Position(NamedTuple):
    """Where to continue reading a corpus."""

    first: int = 1  # number of the next pair, from 1
    offsets: tuple[int, ...] = (0, 0)  # bytes before it in the decompressed files of a corpus of lines


START = Position()


class RawBlock(NamedTuple):
    """Consecutive pairs of a corpus, not decoded yet."""

    first: int  # number of the first pair, from 1
    end: Position  # after the last pair
    lines: tuple[bytes, ...]  # of the file or of the two files, with their ends
    records: Sequence[Any] = ()  # instead of lines, for other kinds of corpora


class Block(NamedTuple):
    """Consecutive pairs of a corpus: those that are readable, and the errors of the others."""

    sources: list[str]
    targets: list[str]
    numbers: Sequence[int]  # of the readable pairs in the corpus, from 1
    errors: dict[int, DataError]  # by number, ascending


def read_blocks(
    corpus: Corpus, digests: Digests | None = None, size: int = BLOCK, start: Position = START
) -> Iterator[RawBlock]:
    """Yield the pairs of a corpus in order, in blocks of `size` pairs, from a position on.

    `digests` receives the SHA-256 of each text file that has been read completely. Raises DataError if the
    corpus is missing or unreadable, or if its sides differ in length.
    """
    first = start.first
    if isinstance(corpus, TextCorpus):
        yield from _read_sides(Path(corpus.source), Path(corpus.target), digests, size, start)
    elif isinstance(corpus, _Table | ToyCorpus):
        records = toy_pairs(corpus.toy) if isinstance(corpus, ToyCorpus) else _load_table(corpus)
        remaining = iter(records) if first == 1 else (records[i] for i in range(first - 1, len(records)))
        while block := list(islice(remaining, size)):
            yield RawBlock(first, Position(first + len(block)), (), block)
            first += len(block)
    else:
        with open_blocks(Path(_place(corpus)), digests, first - 1, start.offsets[0]) as file:
            while lines := file.take(size):
                yield RawBlock(first, Position(file.lines + 1, (file.offset,)), (lines,))
                first = file.lines + 1


def _read_sides(
    source: Path, target: Path, digests: Digests | None, size: int, start: Position
) -> Iterator[RawBlock]:
    first, offsets = start
    with (
        open_blocks(source, digests, first - 1, offsets[0]) as sources,
        open_blocks(target, digests, first - 1, offsets[1]) as targets,
    ):
        while (lines := (sources.take(size), targets.take(size))) != (b"", b""):
            if sources.lines != targets.lines:
                counts = sources.count_all(), targets.count_all()
                reason = f"{source} has {counts[0]} lines but {target} has {counts[1]} lines"
                raise DataError(f"{reason}; the pairs would be misaligned")
            yield RawBlock(first, Position(sources.lines + 1, (sources.offset, targets.offset)), lines)
            first = sources.lines + 1


def parse_block(raw: RawBlock, corpus: Corpus) -> Block:
    """Decode the pairs of a block."""
    if isinstance(corpus, TextCorpus):
        names = corpus.source, corpus.target
        sides = [decode_block(*each, raw.first) for each in zip(raw.lines, names, strict=True)]
        if all(set(map(type, side)) <= {str} for side in sides):  # fast path: everything is readable
            sources, targets = cast(list[list[str]], sides)
            return Block(sources, targets, range(raw.first, raw.first + len(sources)), {})
        both = zip(*sides, strict=True)
        items = [next((side for side in pair if isinstance(side, DataError)), pair) for pair in both]
    elif isinstance(corpus, ToyCorpus):
        items = [*raw.records]
    else:
        place = _place(corpus)
        records = decode_block(raw.lines[0], place, raw.first) if raw.lines else raw.records
        items = [_try_pair(item, corpus, f"{place}:{n}") for n, item in enumerate(records, raw.first)]
    errors = {n: item for n, item in enumerate(items, raw.first) if isinstance(item, DataError)}
    numbers = [n for n in range(raw.first, raw.first + len(items)) if n not in errors]
    pairs = [item for item in items if not isinstance(item, DataError)]
    return Block([pair[0] for pair in pairs], [pair[1] for pair in pairs], numbers, errors)


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


def files_of(corpus: Corpus) -> list[Path]:
    """The local files of a corpus. Raises DataError for the first that does not exist."""
    if isinstance(corpus, HubCorpus):
        return sorted(path for path in Path(corpus.hub).rglob("*") if path.is_file())
    if isinstance(corpus, ToyCorpus):
        return []
    names = [corpus.source, corpus.target] if isinstance(corpus, TextCorpus) else [_place(corpus)]
    if isinstance(corpus, ParquetCorpus):
        names = sorted(glob.glob(corpus.parquet)) or names  # noqa: PTH207 (absolute patterns)
    for file in map(Path, names):
        if not file.is_file():
            raise DataError(f"{file}: {'not a file' if file.exists() else 'no such file'}")
    return [Path(name) for name in names]


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


def _place(corpus: Corpus) -> str:
    """The file, pattern or dataset that a corpus names. Not for text corpora, which have two files."""
    keys = ("tsv", "jsonl", "parquet", "hub")
    return str(next(getattr(corpus, key) for key in keys if hasattr(corpus, key)))


def place_of(corpus: Corpus, number: int) -> str:
    """The location of a pair, as `file:line`. `number` counts from 1."""
    if isinstance(corpus, TextCorpus):
        return f"{corpus.source}:{number}"
    return f"toy {corpus.toy}:{number}" if isinstance(corpus, ToyCorpus) else f"{_place(corpus)}:{number}"


# -------------------------------------------------------------------------------------------------- pairs


def _try_pair(item: Any, corpus: TsvCorpus | FieldsCorpus, where: str) -> Pair | DataError:
    """The pair in a line of TSV or JSONL, or in a row of a table; or a DataError if it has none."""
    try:
        return item if isinstance(item, DataError) else _pair_of(item, corpus, where)
    except DataError as error:
        return error


def _pair_of(item: Any, corpus: TsvCorpus | FieldsCorpus, where: str) -> Pair:
    if isinstance(corpus, TsvCorpus):
        columns = item.split("\t")
        needed = max(corpus.source_column, corpus.target_column) + 1
        if len(columns) < needed:
            raise DataError(f"{where}: {len(columns)} column(s); at least {needed} expected")
        return Pair(columns[corpus.source_column], columns[corpus.target_column])
    if isinstance(item, str):
        try:
            item = json.loads(item)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: not JSON: {error}") from None
    return Pair(_text_of(item, corpus.source_field, where), _text_of(item, corpus.target_field, where))


def _text_of(record: Any, field: str, where: str) -> str:
    value = record
    for key in field.split("."):
        if not isinstance(value, dict) or key not in value:
            known = ", ".join(map(str, value)) if isinstance(value, dict) else "none"
            raise DataError(f"{where}: no field '{field}'; available fields: {known}")
        value = value[key]
    if not isinstance(value, str):
        raise DataError(f"{where}: field '{field}' is not a string")
    if "\0" in value or any("\ud800" <= c <= "\udfff" for c in value):
        raise DataError(f"{where}: field '{field}' contains a NUL or an unpaired surrogate")
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
        raise DataError(f"{_place(corpus)}: cannot load the dataset: {reason}") from error
