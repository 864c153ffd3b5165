"""Saves the checkpoints of a run, and tries again if that fails."""

import logging
import math
from dataclasses import dataclass, replace
from pathlib import Path

from mtrain.checkpoint.checkpoint import CheckpointTensors, collect_tensors, save_checkpoint
from mtrain.checkpoint.state import TrainState
from mtrain.config.schema import Config
from mtrain.device import finishes_within
from mtrain.distributed.ranks import Ranks
from mtrain.errors import StorageError
from mtrain.training.records.progress import Progress
from mtrain.training.step.arithmetic import describe_arithmetic
from mtrain.training.step.average import WeightAverage
from mtrain.training.step.learner import Learner

log = logging.getLogger(__name__)

MAX_FAILED_SAVES = 3  # in a row, each tried twice; training then stops, because more work would be lost


@dataclass
class Saver:
    """Saves the checkpoints of a run."""

    config: Config
    state: TrainState
    learner: Learner
    average: WeightAverage
    progress: Progress
    ranks: Ranks
    saved_step: int | None = None  # of the last checkpoint that was written
    failures: int = 0  # in a row

    @property
    def is_saved(self) -> bool:
        """Whether there is a checkpoint of the current step."""
        return self.saved_step == self.state.step

    def save(self, last: bool, alone: bool = False) -> None:
        """Save a checkpoint. All ranks call this together, and rank 0 writes. If an error or a signal ends
        the run between steps, rank 0 calls it `alone`. A failed save is repeated at once, then at the next
        checkpoint.

        Raises StorageError if this is the `last` save or MAX_FAILED_SAVES in a row have failed.
        """
        ranks = Ranks(self.ranks.device) if alone else self.ranks
        self.progress.read_pending()
        learner = self.learner
        with ranks.watched():
            if self.state.validation_due:
                self.average.average_checkpoints(Path(self.config.run_dir), ranks)
            averaged = self.average.weights
            tensors = collect_tensors(learner.model, learner.optimizer, averaged, ranks.is_first)
        ranks.barrier()  # all have read the checkpoints that they average, and rank 0 may now remove one
        if ranks.is_first:
            self._write(tensors, last)
        self.saved_step = ranks.broadcast(self.saved_step)

    def can_save_alone(self) -> bool:
        """Whether there are steps to save, and this process can save them without the other ranks. A warning
        says why not."""
        if not self.ranks.is_first or not self.state.step or self.is_saved:
            return False
        if self.learner.shares_weights:
            log.warning("cannot save: the other ranks have parts of the weights")
            return False
        if not finishes_within(10, self.learner.device):
            log.warning("cannot save: the GPU is waiting for another rank")
            return False
        return True

    def _write(self, tensors: CheckpointTensors, last: bool) -> None:
        run_dir, device = Path(self.config.run_dir), self.ranks.device
        kept, every = self.config.training.keep_checkpoints, self.config.training.checkpoint_every
        state = self._complete_state()
        try:
            try:
                save_checkpoint(run_dir, tensors, device, state, kept, every)
            except StorageError as error:
                log.warning("%s; trying again", error)
                save_checkpoint(run_dir, tensors, device, state, kept, every)
        except StorageError as error:
            self.failures += 1
            if last or self.failures == MAX_FAILED_SAVES:
                raise
            log.warning("%s; training continues and saves at the next checkpoint", error)
        else:
            self.failures = 0
            self.saved_step = state.step

    def _complete_state(self) -> TrainState:
        """The state with what other objects keep during training."""
        limit = self.learner.max_micro_batch_positions
        return replace(
            self.state,
            loss_scale=self.learner.loss_scaler.state(),
            max_micro_batch_positions=None if limit == math.inf else limit,
            fixed_shapes=self.learner.describe_shapes(),
            arithmetic=describe_arithmetic(self.learner, self.ranks, self.state.micro_batch_tokens),
            **self.progress.counters(),
        )
