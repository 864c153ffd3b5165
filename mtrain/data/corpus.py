"""Readers of parallel text: every kind of corpus as a stream of aligned pairs.

Lines end at LF only (a CR before it is stripped); other Unicode line separators are part of the text. Text
is strict UTF-8 without NUL. Two files with different line counts are an error, because their lines would be
misaligned. A line that cannot be read is yielded as a DataError with `file:line` and the reason.
"""

import glob
import hashlib
import io
import json
import logging
import os
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import IO, Any, TypeVar, cast

import pyarrow as pa

from mtrain.config.corpora import (
    Corpus,
    FieldsCorpus,
    HubCorpus,
    ParquetCorpus,
    TextCorpus,
    ToyCorpus,
    TsvCorpus,
)
from mtrain.data import COMPRESSION, Pair
from mtrain.data.toy import toy_pairs
from mtrain.errors import DataError

_Table = ParquetCorpus | HubCorpus
Digests = dict[Path, bytes]  # SHA-256 of files
_BUFFER = 2**18  # bytes


def read_corpus(corpus: Corpus, digests: Digests | None = None) -> Iterator[Pair | DataError]:
    """Yield the pairs of a corpus in order, and a DataError for each pair that cannot be read.

    `digests` receives the SHA-256 of each text file that has been read to its end. Raises DataError if the
    corpus is missing or unreadable, or if its sides differ in length.
    """
    if isinstance(corpus, TextCorpus):
        yield from _read_sides(Path(corpus.source), Path(corpus.target), digests)
    elif isinstance(corpus, ToyCorpus):
        yield from toy_pairs(corpus.toy)
    else:
        place = _place(corpus)
        items = _load_table(corpus) if isinstance(corpus, _Table) else read_lines(Path(place), digests)
        for number, item in enumerate(items, start=1):
            try:
                yield _pair_of(item, corpus, f"{place}:{number}")
            except DataError as error:
                yield error


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
    """SHA-256 of the contents of a corpus, without modification times. Files in `digests` are not read."""
    digest, files = hashlib.sha256(), files_of(corpus)
    if isinstance(corpus, HubCorpus) and not files:
        digest.update(_load_table(corpus)._fingerprint.encode())
    elif isinstance(corpus, ToyCorpus):
        digest.update(json.dumps(toy_pairs(corpus.toy)).encode())
    for file in files:
        if digests and file in digests:
            digest.update(digests[file])
            continue
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
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


# -------------------------------------------------------------------------------------------------- lines


class _HashingReader(io.RawIOBase):
    """Hashes the bytes of an unbuffered file while they are read."""

    def __init__(self, file: io.FileIO):
        self._file, self.hash = file, hashlib.sha256()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._file.readinto(buffer) or 0
        self.hash.update(memoryview(buffer)[:count])
        return count


def read_lines(path: Path, digests: Digests | None = None) -> Iterator[str | DataError]:
    """Yield the lines of a plain, `.gz` or `.zst` file without line ends, and a DataError for each line that
    is not valid text. `digests` receives the SHA-256 of the file when it has been read to its end.

    Raises DataError if the file cannot be read.
    """
    try:
        with path.open("rb", buffering=0) as file:
            hashing = _HashingReader(file)
            # Not opened by pyarrow, which cannot open a named pipe.
            yield from _decompressed_lines(path, io.BufferedReader(hashing, _BUFFER))
            if digests is not None:
                while rest := file.read(_BUFFER):  # what follows the compressed data
                    hashing.hash.update(rest)
                digests[path] = hashing.hash.digest()
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else error
        raise DataError(f"{path}: cannot read: {reason}") from None


def _decompressed_lines(path: Path, stream: IO[bytes]) -> Iterator[str | DataError]:
    if path.suffix not in COMPRESSION:
        yield from decode_lines(stream, str(path))
        return
    if path.is_file() and not path.stat().st_size:
        raise ValueError(f"empty, so not a {path.suffix} file")
    with pa.input_stream(stream, compression=COMPRESSION[path.suffix]) as plain:
        yield from decode_lines(cast(IO[bytes], io.BufferedReader(plain)), str(path))


def read_text(path: Path) -> list[str]:
    """All lines of a file. Raises DataError for the first line that is not valid text."""
    return list(raise_errors(read_lines(path)))


T = TypeVar("T", str, Pair)


def raise_errors(items: Iterable[T | DataError]) -> Iterator[T]:
    """Yield the items. Raises the first DataError among them."""
    for item in items:
        if isinstance(item, DataError):
            raise item
        yield item


def decode_lines(stream: IO[bytes], name: str) -> Iterator[str | DataError]:
    """Like `read_lines`, for an open byte stream. `name` identifies it in error messages."""
    for number, line in enumerate(stream, start=1):
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        line = line.removesuffix(b"\n").removesuffix(b"\r") if line.endswith(b"\n") else line
        try:
            text = line.decode("utf-8")
            yield DataError(f"{name}:{number}: contains a NUL character") if "\0" in text else text
        except UnicodeDecodeError as error:
            yield DataError(f"{name}:{number}: not valid UTF-8 (byte {error.start + 1} of the line)")


# -------------------------------------------------------------------------------------------------- pairs


def _read_sides(source: Path, target: Path, digests: Digests | None) -> Iterator[Pair | DataError]:
    for one, other in zip_longest(read_lines(source, digests), read_lines(target, digests)):
        if one is None or other is None:
            counts = [f"{side} has {sum(1 for _ in read_lines(side))} lines" for side in (source, target)]
            raise DataError(f"{' but '.join(counts)}; the pairs would be misaligned")
        yield (
            one if isinstance(one, DataError) else other if isinstance(other, DataError) else Pair(one, other)
        )


def _pair_of(item: Any, corpus: TsvCorpus | FieldsCorpus, where: str) -> Pair:
    """The pair in a line of TSV or JSONL, or in a row of a table. Raises DataError if it has none."""
    if isinstance(item, DataError):
        raise item
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
