"""Every source of parallel text, read strictly into aligned pairs.

Lines end at LF alone (a CR before it is stripped); anything else that Unicode calls a line separator is data.
Text is strict UTF-8 without NUL. Two files with different line counts are an error: no pair ever shifts.
"""

import glob
import gzip
import hashlib
import io
import json
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar, cast

import pyarrow as pa

from mtrain.data import Pair
from mtrain.data.toy import toy_pairs
from mtrain.errors import DataError
from mtrain.schema import (
    Corpus,
    FieldsCorpus,
    HubCorpus,
    JsonlCorpus,
    ParquetCorpus,
    TextCorpus,
    ToyCorpus,
    TsvCorpus,
)


class BadPair(NamedTuple):
    """Stands where a pair, or a line of it, should be: why it cannot be read, with `file:line`."""

    reason: str


def read_corpus(corpus: Corpus) -> Iterator[Pair | BadPair]:
    """Yield the pairs of a corpus in order, a BadPair for each that cannot be read.

    Raises DataError if the corpus is missing, unreadable, or its two sides differ in length.
    """
    if isinstance(corpus, TextCorpus):
        return _read_text(Path(corpus.source), Path(corpus.target))
    if isinstance(corpus, TsvCorpus):
        return _read_tsv(corpus)
    if isinstance(corpus, JsonlCorpus):
        return _read_jsonl(corpus)
    if isinstance(corpus, ToyCorpus):
        return iter(toy_pairs(corpus.toy))
    return _read_table(corpus)


def read_pairs(corpus: Corpus, bad_lines: str) -> Iterator[Pair | None]:
    """As `read_corpus`, but a bad pair is an error, or None where `bad_lines` is "skip"."""
    for pair in read_corpus(corpus):
        if not isinstance(pair, BadPair):
            yield pair
        elif bad_lines == "skip":
            yield None
        else:
            raise DataError(f"{pair.reason}; mend it, or set data.bad_lines: skip to drop such pairs")


def files_of(corpus: Corpus) -> list[Path]:
    """The local files of a corpus, all of which exist. Raises DataError naming the first that does not."""
    if isinstance(corpus, ParquetCorpus):
        files = [Path(name) for name in sorted(glob.glob(corpus.parquet))]  # noqa: PTH207 (absolute patterns)
        if not files:
            raise DataError(f"{corpus.parquet}: no such file")
        return files
    if isinstance(corpus, TextCorpus):
        files = [Path(corpus.source), Path(corpus.target)]
    elif isinstance(corpus, TsvCorpus):
        files = [Path(corpus.tsv)]
    elif isinstance(corpus, JsonlCorpus):
        files = [Path(corpus.jsonl)]
    elif isinstance(corpus, HubCorpus):
        files = sorted(path for path in Path(corpus.hub).rglob("*") if path.is_file())
    else:
        files = []
    for file in files:
        if not file.is_file():
            raise DataError(f"{file}: {'not a file' if file.exists() else 'no such file'}")
    return files


def content_hash(corpus: Corpus) -> str:
    """SHA-256 of what the corpus holds: a changed byte is noticed, a touched file is not."""
    digest = hashlib.sha256()
    if isinstance(corpus, HubCorpus) and not files_of(corpus):
        digest.update(_load_table(corpus)._fingerprint.encode())
    elif isinstance(corpus, ToyCorpus):
        digest.update(json.dumps(toy_pairs(corpus.toy)).encode())
    for file in files_of(corpus):
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


# -------------------------------------------------------------------------------------------------- lines


@contextmanager
def open_bytes(path: Path) -> Iterator[IO[bytes]]:
    """Open a plain, `.gz` or `.zst` file for reading bytes. Raises DataError if that fails, also midway."""
    try:
        if path.suffix == ".gz":
            with gzip.open(path, "rb") as stream:
                yield cast(IO[bytes], stream)
        elif path.suffix == ".zst":
            with pa.input_stream(str(path), compression="zstd") as stream:
                yield cast(IO[bytes], io.BufferedReader(stream))
        else:
            with path.open("rb") as stream:
                yield stream
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except DataError:
        raise
    except Exception as error:  # each decompressor also raises kinds of its own
        raise DataError(f"{path}: cannot read: {getattr(error, 'strerror', None) or error}") from None


def read_lines(path: Path) -> Iterator[str | BadPair]:
    """Yield the lines of a file without their ends; a BadPair for each that is not clean text."""
    with open_bytes(path) as stream:
        yield from decode_lines(stream, str(path))


def read_text(path: Path) -> list[str]:
    """All lines of a file. Raises DataError at the first that is not clean text."""
    return list(clean(read_lines(path)))


T = TypeVar("T", str, Pair)


def clean(items: Iterable[T | BadPair]) -> Iterator[T]:
    """Pass lines or pairs on. Raises DataError at the first that cannot be read."""
    for item in items:
        if isinstance(item, BadPair):
            raise DataError(item.reason)
        yield item


def decode_lines(stream: IO[bytes], name: str) -> Iterator[str | BadPair]:
    """As `read_lines`, from an open byte stream that error messages call `name`."""
    for number, line in enumerate(stream, start=1):
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        line = line.removesuffix(b"\n").removesuffix(b"\r") if line.endswith(b"\n") else line
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as error:
            yield BadPair(f"{name}:{number}: not valid UTF-8 (byte {error.start + 1} of the line)")
            continue
        yield BadPair(f"{name}:{number}: holds a NUL character") if "\0" in text else text


def _read_text(source: Path, target: Path) -> Iterator[Pair | BadPair]:
    sources, targets = read_lines(source), read_lines(target)
    for count, (a, b) in enumerate(zip_longest(sources, targets)):
        if a is None or b is None:
            rest = 1 + sum(1 for _ in (targets if a is None else sources))
            longer, shorter = (target, source) if a is None else (source, target)
            raise DataError(f"{longer} has {count + rest} lines but {shorter} has {count}; pairs would shift")
        yield a if isinstance(a, BadPair) else b if isinstance(b, BadPair) else Pair(a, b)


def _read_tsv(corpus: TsvCorpus) -> Iterator[Pair | BadPair]:
    needed = max(corpus.source_column, corpus.target_column) + 1
    for number, line in enumerate(read_lines(Path(corpus.tsv)), start=1):
        if isinstance(line, BadPair):
            yield line
            continue
        columns = line.split("\t")
        if len(columns) < needed:
            yield BadPair(f"{corpus.tsv}:{number}: {len(columns)} column(s); at least {needed} expected")
        else:
            yield Pair(columns[corpus.source_column], columns[corpus.target_column])


# ------------------------------------------------------------------------------------------------- fields


def _read_jsonl(corpus: JsonlCorpus) -> Iterator[Pair | BadPair]:
    for number, line in enumerate(read_lines(Path(corpus.jsonl)), start=1):
        if isinstance(line, BadPair):
            yield line
            continue
        where = f"{corpus.jsonl}:{number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            yield BadPair(f"{where}: not JSON: {error}")
        else:
            yield _pair_of(record, corpus, where)


def _read_table(corpus: ParquetCorpus | HubCorpus) -> Iterator[Pair | BadPair]:
    name = corpus.parquet if isinstance(corpus, ParquetCorpus) else corpus.hub
    for number, record in enumerate(_load_table(corpus), start=1):
        yield _pair_of(record, corpus, f"{name}:{number}")


def _load_table(corpus: ParquetCorpus | HubCorpus) -> Any:
    """A memory-mapped `datasets.Dataset`."""
    import datasets

    files = [str(file) for file in files_of(corpus)]
    datasets.utils.logging.set_verbosity(logging.CRITICAL)  # what goes wrong is told below, in one line
    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)
    try:
        if isinstance(corpus, ParquetCorpus):
            return datasets.load_dataset("parquet", data_files=files, split="train")
        return datasets.load_dataset(corpus.hub, corpus.config, split=corpus.split, revision=corpus.revision)
    except Exception as error:  # the library raises dozens of kinds, of its own and of its dependencies
        name = corpus.parquet if isinstance(corpus, ParquetCorpus) else corpus.hub
        reason = " ".join(str(error.__cause__ or error).split())[:300]
        raise DataError(f"{name}: cannot load the data set: {reason}") from error


def _pair_of(record: Any, corpus: FieldsCorpus, where: str) -> Pair | BadPair:
    texts = []
    for field in (corpus.source_field, corpus.target_field):
        value = record
        for key in field.split("."):
            if not isinstance(value, dict) or key not in value:
                known = ", ".join(map(str, value)) if isinstance(value, dict) else "none"
                return BadPair(f"{where}: no field '{field}'; fields here: {known}")
            value = value[key]
        if not isinstance(value, str):
            return BadPair(f"{where}: field '{field}' is no string")
        if "\0" in value or any("\ud800" <= c <= "\udfff" for c in value):
            return BadPair(f"{where}: field '{field}' holds a NUL or half a surrogate pair")
        texts.append(value)
    return Pair(*texts)
