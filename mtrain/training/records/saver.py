"""Saves the checkpoints of a run, and tries again if that fails.

Where steps are short compared to writing a file, on a GPU, training waits only until the tensors are copied
to host memory, from which a thread writes them. A checkpoint counts once it is complete on disk:
`Saver.settle` waits for it.
"""

import logging
import math
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from mtrain.checkpoint.checkpoint import TensorFiles, collect_tensors, describe_random_states, save_checkpoint
from mtrain.checkpoint.state import TrainState
from mtrain.config.schema import Config
from mtrain.device import finishes_within
from mtrain.distributed.ranks import Ranks
from mtrain.errors import StorageError, is_out_of_memory
from mtrain.training.records.progress import Progress
from mtrain.training.setup.micro_batch import available_memory
from mtrain.training.step.arithmetic import describe_arithmetic
from mtrain.training.step.average import WeightAverage
from mtrain.training.step.learner import Learner

log = logging.getLogger(__name__)

MAX_FAILED_SAVES = 3  # in a row, each tried twice; training then stops, because more work would be lost
BYTES_OF_COPY = 16  # of each parameter in fp32: weight, AdamW's two moments, and the averaged weight
SHARE_OF_COPY = 0.25  # of host memory; writing needs memory as well, up to half of the copy


def saves_in_background(learner: Learner) -> bool:
    """Whether checkpoints are written while training continues: on a CUDA device, if a copy takes at most
    SHARE_OF_COPY of host memory, unless the weights are divided among ranks (FSDP): these are gathered in
    host memory, and a copy would need as much again. On a CPU, the thread would compete with training for its
    cores."""
    if learner.device.type != "cuda" or learner.shares_weights:
        return False
    needed = BYTES_OF_COPY * sum(parameter.numel() for parameter in learner.model.parameters())
    return needed <= SHARE_OF_COPY * available_memory(torch.device("cpu"))


@dataclass
class Saver:
    """Saves the checkpoints of a run."""

    config: Config
    state: TrainState
    learner: Learner
    average: WeightAverage
    progress: Progress
    ranks: Ranks
    in_background: bool = False  # whether a thread writes while training continues
    saved_step: int | None = None  # of the last checkpoint that was written
    failures: int = 0  # in a row
    _writer: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "checkpoint"))
    _writing: Future[None] | None = None  # until `settle`

    def is_saved(self) -> bool:
        """Wait for the thread; whether there is a checkpoint of the current step. Until `settle`, only rank 0
        knows."""
        if self._writing is not None:
            wait([self._writing])
        return self.saved_step == self.state.step

    def save(self, last: bool, alone: bool = False) -> None:
        """Save a checkpoint. All ranks call this together, and rank 0 writes. If an error or a signal ends
        the run between steps, rank 0 calls it `alone`. A failed save is repeated at once, then at the next
        checkpoint. The `last` one is complete on return; others may be in the background until `settle`.

        Raises StorageError if this is the `last` save or MAX_FAILED_SAVES in a row have failed.
        """
        ranks = Ranks(self.ranks.device) if alone else self.ranks
        self.settle(ranks)  # the last checkpoint may be averaged, and memory suffices for one copy
        self.progress.read_pending()
        learner = self.learner
        with ranks.watched():
            if self.state.validation_due:
                self.average.average_checkpoints(Path(self.config.run_dir), self.state.step, ranks)
            averaged = self.average.weights
            files = collect_tensors(learner.model, learner.optimizer, averaged, ranks.is_first)
        ranks.barrier()  # all have read the checkpoints that they average, and rank 0 may now remove one
        if ranks.is_first:
            self._start_writing(files, last)
        if last or not self.in_background:
            self.settle(ranks)

    def settle(self, ranks: Ranks | None = None) -> None:
        """Wait for the thread, and let all ranks know whether the checkpoint is complete. All of `ranks` (by
        default, all ranks) call this together. Raises StorageError as `save` does, if the thread has."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()
        self.saved_step = (ranks or self.ranks).broadcast(self.saved_step)

    def close(self) -> None:
        """Wait for the thread when training ends. An error that nothing else has noticed is logged."""
        if self._writing is not None and (error := self._writing.exception()):
            log.warning("%s", error)
        self._writing = None
        self._writer.shutdown()

    def can_save_alone(self) -> bool:
        """Whether there are steps to save, and this process can save them without the other ranks. A warning
        says why not."""
        if not self.ranks.is_first or not self.state.step or self.is_saved():
            return False
        if self.learner.shares_weights:
            log.warning("cannot save: the other ranks have parts of the weights")
            return False
        if not finishes_within(10, self.learner.device):
            log.warning("cannot save: the GPU is waiting for another rank")
            return False
        return True

    def _start_writing(self, files: TensorFiles, last: bool) -> None:
        """Write a checkpoint in the background, or now if this is the last one or memory is short."""
        state = self._complete_state()
        if self.in_background and not last:
            try:
                copies = {
                    file: {name: x.detach().to("cpu", copy=True) for name, x in tensors.items()}
                    for file, tensors in files.items()
                }
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
            else:
                self._writing = self._writer.submit(self._write, copies, state, last)
                return
        self._write(files, state, last)

    def _write(self, files: TensorFiles, state: TrainState, last: bool) -> None:
        run_dir, training = Path(self.config.run_dir), self.config.training
        kept, every = training.keep_checkpoints, training.checkpoint_every
        try:
            try:
                save_checkpoint(run_dir, files, state, kept, every)
            except StorageError as error:
                log.warning("%s; trying again", error)
                save_checkpoint(run_dir, files, state, kept, every)
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
            rng=describe_random_states(self.ranks.device),
            metric_sums=dict(self.progress.sums),
        )
