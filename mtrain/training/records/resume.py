"""Continues a run from one of its checkpoints."""

import logging
from pathlib import Path

from mtrain.checkpoint.checkpoint import Checkpoint, checkpoint_folders, load_checkpoint, restore_validation
from mtrain.checkpoint.state import TrainState
from mtrain.config.training import TrainingConfig
from mtrain.distributed.ranks import Ranks
from mtrain.runs.limits import limit_reached
from mtrain.training.step.average import WeightAverage
from mtrain.training.step.learner import Learner

log = logging.getLogger(__name__)


def restore(
    checkpoint: Checkpoint, run_dir: Path, learner: Learner, average: WeightAverage, ranks: Ranks
) -> TrainState:
    """Restore the model, the optimizer, the averaged weights and the random generators. Returns the state of
    training. Raises ModelError if the tensors do not fit the model."""
    load_checkpoint(checkpoint, learner.model, learner.optimizer)
    average.load(checkpoint.folder)
    learner.loss_scaler.restore(checkpoint.state.loss_scale)
    # That of rank 0, because the file systems of the ranks may differ.
    state = ranks.broadcast(restore_validation(run_dir, checkpoint.state).to_json())
    log.info("resuming from %s", checkpoint.folder)
    return TrainState.from_json(state)


def ends_at_older_checkpoint(folder: Path, state: TrainState, training: TrainingConfig) -> bool:
    """Whether the run has finished, and is resumed from a checkpoint that is not its newest. Nothing then
    changes."""
    newest = checkpoint_folders(folder.parent.parent)[-1:] == [folder]
    return not newest and limit_reached(training, state) is not None
