"""Shards that are found damaged during training, by their indices.

They are recorded in the run folder, because other runs may use the data folder. The next start verifies them
completely.
"""

import json
from contextlib import suppress
from pathlib import Path

from mtrain.errors import StorageError
from mtrain.storage.atomic import write_atomically
from mtrain.storage.manifest import read_json

_REPORTED = "suspect-shards.json"  # in the run folder


def read_reported_shards(run_dir: Path) -> frozenset[int]:
    """The indices of the shards that were found to be damaged, and not verified since."""
    with suppress(ValueError, TypeError):
        return frozenset(map(int, read_json(run_dir / _REPORTED)))
    return frozenset()


def report_damaged_shard(run_dir: Path, shard: int) -> bool:
    """Record the index of a shard. Returns whether it is recorded now; several ranks may find the damage at
    the same time, and interfere with each other's writing."""
    with suppress(StorageError):
        reported = sorted({*read_reported_shards(run_dir), shard})
        write_atomically(run_dir / _REPORTED, json.dumps(reported) + "\n")
    return shard in read_reported_shards(run_dir)


def forget_reported_shards(run_dir: Path) -> None:
    """Remove the record, because the shards have been verified."""
    with suppress(OSError):  # they are verified again then
        (run_dir / _REPORTED).unlink(missing_ok=True)
