"""Reads Parquet files in blocks of rows. Of each file, one row group is in memory at a time."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from mtrain.errors import DataError


class ParquetBlock(NamedTuple):
    """Consecutive rows of a file."""

    file: Path
    skipped: int  # rows of the files before this one
    rows: list[dict[str, Any]]


def read_parquet(
    files: Sequence[Path], columns: Sequence[str], size: int, skipped: int = 0
) -> Iterator[ParquetBlock]:
    """Yield the rows of some files after the first `skipped` ones, in blocks that end at multiples of `size`
    rows, and with each file. Only the given columns are read; if a file lacks one, all of its columns.

    Raises DataError if a file is missing or unreadable.
    """
    before, done = 0, skipped
    for path in files:
        with _opened(path) as file:
            count = file.metadata.num_rows
            if done < before + count:
                rows = _read_rows(file, columns, size, done - before)
                while block := list(islice(rows, size - done % size)):
                    yield ParquetBlock(path, before, block)
                    done += len(block)
            before += count


def _read_rows(
    file: pq.ParquetFile, columns: Sequence[str], size: int, skipped: int
) -> Iterator[dict[str, Any]]:
    """The rows of a file after the first `skipped` ones."""
    wanted = list(columns) if set(columns) <= set(file.schema_arrow.names) else None
    groups, before = list(range(file.num_row_groups)), 0
    while groups and before + (count := file.metadata.row_group(groups[0]).num_rows) <= skipped:
        groups.pop(0)
        before += count
    batches = file.iter_batches(size, groups, wanted) if groups else ()
    rows = chain.from_iterable(batch.to_pylist() for batch in batches)
    return islice(rows, skipped - before, None)


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
