"""A mark in the folder of a run whose training has found a damaged shard.

The next start then verifies all rows. Otherwise, the rows of each window are verified before its use. The
mark is not in the data folder, because other runs may use that.
"""

from contextlib import suppress
from pathlib import Path

MARK = "suspect-shards.json"  # in runs of earlier versions, with the shards; all are verified anyway


def is_damage_reported(run_dir: Path) -> bool:
    """Whether a shard was found to be damaged, and the shards were not verified since."""
    return (run_dir / MARK).exists()


def report_damage(run_dir: Path) -> bool:
    """Mark a run. Returns whether the run is marked now: its folder may not be writable."""
    with suppress(OSError):
        (run_dir / MARK).touch()
    return is_damage_reported(run_dir)


def forget_damage(run_dir: Path) -> None:
    """Remove the mark, because the shards have been verified."""
    with suppress(OSError):  # they are verified again then
        (run_dir / MARK).unlink(missing_ok=True)
