"""Continues a run from one of its checkpoints."""

import logging
from pathlib import Path

from mtrain.checkpoint.checkpoint import (
    Checkpoint,
    TrainState,
    checkpoint_folders,
    load_checkpoint,
    restore_validation,
)
from mtrain.config.sections.training import TrainingConfig
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
    state = checkpoint.state
    load_checkpoint(checkpoint, learner.model, learner.optimizer)
    average.load(checkpoint.folder)
    learner.loss_scaler.restore(state.loss_scale)
    restore_validation(run_dir, state)
    # The file systems of the ranks may differ.
    state.validation_due = ranks.broadcast(state.validation_due)
    log.info("resuming from %s", checkpoint.folder)
    return state


def ends_at_older_checkpoint(checkpoint: Checkpoint, run_dir: Path, recipe: TrainingConfig) -> bool:
    """Whether the run has finished, and is resumed from a checkpoint that is not its newest. Nothing then
    changes."""
    newest = checkpoint_folders(run_dir)[-1:] == [checkpoint.folder]
    return not newest and limit_reached(recipe, checkpoint.state) is not None
