"""Remembers shards that were found damaged during training, so that the next start verifies them completely.

They are recorded in the run folder, because training only reads the data folder, which other runs may use.
"""

import json
from contextlib import suppress
from pathlib import Path

from mtrain.errors import StorageError
from mtrain.regular_files import read_file
from mtrain.storage.atomic import write_atomically

_SUSPECTS = "suspect-shards.json"  # in the run folder


def read_suspects(run_dir: Path) -> frozenset[int]:
    """The indices of the recorded shards."""
    with suppress(OSError, ValueError, TypeError, RecursionError):
        return frozenset(map(int, json.loads(read_file(run_dir / _SUSPECTS))))
    return frozenset()


def add_suspect(run_dir: Path, shard: int) -> bool:
    """Record the index of a shard. Returns whether it is recorded now; several ranks may find the damage at
    the same time, and interfere with each other's writing."""
    with suppress(StorageError):
        write_atomically(run_dir / _SUSPECTS, json.dumps(sorted({*read_suspects(run_dir), shard})) + "\n")
    return shard in read_suspects(run_dir)


def remove_suspects(run_dir: Path) -> None:
    """Remove the record, because the shards have been verified."""
    with suppress(OSError):  # they are verified again then
        (run_dir / _SUSPECTS).unlink(missing_ok=True)
