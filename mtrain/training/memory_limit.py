"""The limit on micro-batches that a rank leaves in the run folder when it must end because memory ran out.

Rank 0 may have ended before it could save it, and a checkpoint may be older.
"""

import json
import logging
import math
from contextlib import suppress
from pathlib import Path

from mtrain.errors import StorageError
from mtrain.storage.atomic import write_atomically
from mtrain.storage.manifest import read_json

log = logging.getLogger(__name__)

FILE = "memory-limit.json"


def write_limit(run_dir: Path, micro_batch_tokens: int | None, positions: float) -> None:
    """Limit the micro-batches of later starts with the same `micro_batch_tokens` to some padded positions."""
    try:
        values = {"micro_batch_tokens": micro_batch_tokens, "max_micro_batch_positions": positions}
        write_atomically(run_dir / FILE, json.dumps(values) + "\n")
    except StorageError as error:
        log.warning("%s; the next start does not know that memory ran out", error)


def read_limit(run_dir: Path, micro_batch_tokens: int) -> float:
    """The limit for micro-batches of some tokens; infinite if memory has sufficed."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        values = read_json(run_dir / FILE)
        if values["micro_batch_tokens"] == micro_batch_tokens:
            return float(values["max_micro_batch_positions"])
    return math.inf
