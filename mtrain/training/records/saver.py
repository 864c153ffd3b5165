"""Saves the checkpoints of a run, and tries again if that fails."""

import logging
import math
from collections.abc import Callable
from pathlib import Path

from mtrain.checkpoint.checkpoint import CheckpointTensors, TrainState, collect_tensors, save_checkpoint
from mtrain.config.sections.training import TrainingConfig
from mtrain.device import finishes_within
from mtrain.distributed.ranks import Ranks
from mtrain.errors import StorageError
from mtrain.training.records.progress import Progress
from mtrain.training.step.average import WeightAverage
from mtrain.training.step.learner import Learner

log = logging.getLogger(__name__)

MAX_FAILED_SAVES = 3  # in a row, each tried twice; training then stops, because more work would be lost


class Saver:
    """Saves the checkpoints of a run."""

    def __init__(
        self,
        run_dir: Path,
        recipe: TrainingConfig,
        state: TrainState,
        learner: Learner,
        average: WeightAverage,
        progress: Progress,
        describe: Callable[[], str],
    ):
        """`describe` returns what determines the exact results of a step; see `TrainState.arithmetic`."""
        self.run_dir, self.recipe, self.state, self.learner = run_dir, recipe, state, learner
        self.average, self.progress, self._describe = average, progress, describe
        self.saved_step: int | None = None  # of the last checkpoint that was written
        self.failures = 0  # in a row
        self._tensors: CheckpointTensors | None = None  # to save

    @property
    def is_saved(self) -> bool:
        """Whether there is a checkpoint of the current step."""
        return self.saved_step == self.state.step

    def can_save_alone(self, ranks: Ranks) -> bool:
        """Whether there are steps to save, and this process can save them without the other `ranks`. A
        warning says why not."""
        if not ranks.is_first or not self.state.step or self.is_saved:
            return False
        if self.learner.shares_weights:
            log.warning("cannot save: the other ranks have parts of the weights")
            return False
        if not finishes_within(10, self.learner.device):
            log.warning("cannot save: the GPU is waiting for another rank")
            return False
        return True

    def complete_state(self, ranks: Ranks) -> None:
        """Bring the state and the average of the weights up to date, and collect the tensors to save. All
        `ranks` do this before a save."""
        self.progress.read_pending()
        with ranks.watched():
            if self.state.validation_due:
                self.average.average_checkpoints(self.run_dir, ranks)
            tensors = self.learner.model, self.learner.optimizer, self.average.weights
            collected = collect_tensors(*tensors, ranks.is_first)
        self._tensors = collected if ranks.is_first else None  # the others save nothing
        state, limit = self.state, self.learner.max_micro_batch_positions
        state.loss_scale, state.arithmetic = self.learner.loss_scaler.state(), self._describe()
        state.max_micro_batch_positions = None if limit == math.inf else limit

    def save(self, last: bool) -> None:
        """Save a checkpoint. A failed save is repeated at once, then at the next checkpoint.

        Raises StorageError if this is the `last` save or MAX_FAILED_SAVES in a row have failed.
        """
        try:
            try:
                self._write_checkpoint()
            except StorageError as error:
                log.warning("%s; trying again", error)
                self._write_checkpoint()
        except StorageError as error:
            self.failures += 1
            if last or self.failures == MAX_FAILED_SAVES:
                raise
            log.warning("%s; training continues and saves at the next checkpoint", error)
        else:
            self.failures = 0
            self.saved_step = self.state.step
        finally:
            self._tensors = None

    def _write_checkpoint(self) -> None:
        kept = (self.recipe.keep_checkpoints, self.recipe.checkpoint_every)
        assert self._tensors is not None
        save_checkpoint(self.run_dir, self._tensors, self.learner.device, self.state, *kept)
