"""The size of micro-batches that all ranks use, and the limit that a rank leaves in the run folder when it
must end because memory ran out: rank 0 may have ended before it could save it, and a checkpoint may be older.
"""

import json
import logging
import math
from contextlib import suppress
from pathlib import Path

from mtrain.checkpoint.state import TrainState
from mtrain.config.schema import Config
from mtrain.data.epochs.windows import WindowedCorpus
from mtrain.device import describe_device
from mtrain.distributed.ranks import Ranks
from mtrain.errors import StorageError
from mtrain.storage.atomic import write_atomically
from mtrain.storage.manifest import read_json
from mtrain.training.setup.micro_batch import micro_batch_tokens
from mtrain.training.step.learner import Learner

log = logging.getLogger(__name__)

FILE = "memory-limit.json"


def write_limit(run_dir: Path, micro_batch_tokens: int | None, positions: float) -> None:
    """Record a limit for the micro-batches of later starts with the same `micro_batch_tokens`, in padded
    tokens of both sides."""
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


def agree_on_micro_batches(
    config: Config, train: WindowedCorpus, learner: Learner, state: TrainState, ranks: Ranks
) -> int:
    """The padded tokens of a micro-batch, which all ranks use: the smallest of their numbers. Restores the
    limit that memory has required, from the state or from the file.

    With `auto`, a run that resumes on the same kind of GPU keeps the size of its micro-batches if this size
    still fits, even if more memory is free, so that results stay the same.
    """
    own = micro_batch_tokens(config, train, learner, ranks.local_size)
    if config.training.micro_batch_tokens == "auto" and learner.device.type == "cuda":
        same_gpu = (state.arithmetic or "").startswith(f"{describe_device(learner.device)},")
        own = min(own, state.micro_batch_tokens or own) if same_gpu else own
    tokens = -int(ranks.all_reduce_max(-own)[0])
    limit = state.max_micro_batch_positions
    if limit is None or state.micro_batch_tokens != tokens:
        limit = math.inf
    written = ranks.broadcast(read_limit(Path(config.run_dir), tokens))
    learner.max_micro_batch_positions = min(limit, written)
    return tokens
