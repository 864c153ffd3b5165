"""Reads Parquet files in blocks of rows. Of each file, one row group is in memory at a time."""

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from mtrain.data.reading.lines import Digests
from mtrain.data.reading.records import columns_of
from mtrain.errors import DataError

_CHUNK = 2**20  # bytes that are hashed at a time
Row = dict[str, Any] | UnicodeDecodeError  # the error of a row that is not valid UTF-8


def count_rows(files: Iterable[Path]) -> int:
    """The number of rows in some files. Raises DataError if one is missing or unreadable."""
    count = 0
    for path in files:
        with _opened(path) as file:
            count += file.metadata.num_rows
    return count


def read_parquet(
    files: Sequence[Path], fields: Sequence[str], size: int, skipped: int = 0, digests: Digests | None = None
) -> Iterator[tuple[Path, int, list[Row]]]:
    """Yield the rows of some files after the first `skipped` ones, in blocks that end at multiples of `size`
    rows, and with each file. With each block comes its file, and the number of rows of the files before it.
    Only the columns of the given fields are read; if none are given or a file lacks one, all. `digests`
    receives the SHA-256 of each file that has been read completely.

    Raises DataError if a file is missing or unreadable.
    """
    before, done = 0, skipped
    for path in files:
        with _opened(path) as file, ExitStack() as stack:
            count = file.metadata.num_rows
            is_hashed = digests is not None and done == before
            hasher = _Hasher(stack.enter_context(path.open("rb"))) if is_hashed else None
            if done < before + count:
                rows = _read_rows(file, fields, size, done - before, hasher)
                while block := list(islice(rows, size - done % size)):
                    yield path, before, block
                    done += len(block)
            if digests is not None and hasher:
                digests[path] = hasher.finish()
            before += count


def _read_rows(
    file: pq.ParquetFile, fields: Sequence[str], size: int, skipped: int, hasher: "_Hasher | None"
) -> Iterator[Row]:
    """The rows of a file after the first `skipped` ones. `hasher` hashes about the bytes of a row group just
    before its rows are read, so that these are still in memory and the file is read from the disk once."""
    wanted = columns_of(fields, file.schema_arrow.names)
    before = 0  # rows
    for number in range(file.num_row_groups):
        group = file.metadata.row_group(number)
        if before + group.num_rows <= skipped:
            before += group.num_rows
            continue
        if hasher:
            hasher.hash_share((before + group.num_rows) / file.metadata.num_rows)
        for rows in map(_to_rows, file.iter_batches(size, [number], wanted)):
            yield from rows[max(0, skipped - before) :]
            before += len(rows)


def _to_rows(batch: pa.RecordBatch) -> list[Row]:
    try:
        rows: list[Row] = batch.to_pylist()
        return rows
    except UnicodeDecodeError as error:
        if len(batch) == 1:
            return [error]
        return [row for number in range(len(batch)) for row in _to_rows(batch.slice(number, 1))]
    except OverflowError as error:  # for dates that Python cannot represent
        others = [field.name for field in batch.schema if not pa.types.is_temporal(field.type)]
        if len(others) == batch.num_columns:
            raise ValueError(str(error)) from error
        return _to_rows(batch.select(others))


class _Hasher:
    """Computes the SHA-256 of a file in several steps."""

    def __init__(self, stream: IO[bytes]):
        self._stream, self._hash = stream, hashlib.sha256()

    def hash_share(self, share: float) -> None:
        """Hash about this share of the file, from its start on."""
        end = round(share * os.fstat(self._stream.fileno()).st_size)
        while part := self._stream.read(min(_CHUNK, max(0, end - self._stream.tell()))):
            self._hash.update(part)

    def finish(self) -> bytes:
        """Hash the remaining bytes; the digest of all."""
        self.hash_share(1.0)
        return self._hash.digest()


@contextmanager
def _opened(path: Path) -> Iterator[pq.ParquetFile]:
    try:
        with pq.ParquetFile(path, pre_buffer=False) as file:
            yield file
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except (OSError, ValueError, pa.ArrowException) as error:
        reason = " ".join(str(error).split())[:300]
        raise DataError(f"{path}: cannot read: {reason}") from error
