"""Data-parallel training: each rank computes the gradients of a part of each step, and they are added up."""

import warnings
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from mtrain.config.sections.training import TrainingConfig
from mtrain.data.epochs.packed_batch import AnyBatch, batch_type, split_batches
from mtrain.distributed.ranks import Ranks
from mtrain.kernels.cross_entropy import LossSums
from mtrain.model.build import AnyModel
from mtrain.training.step.learner import BatchLoss, Learner, SynchronizationMemoryError


class ParallelLearner(Learner):
    """The learner of one of several ranks, which take each step together. `step` is given the batches of this
    rank, and the number of tokens of all ranks; its metrics cover all ranks.

    Gradients are synchronized once per step, in the backward pass of each rank's last micro-batch. The number
    of micro-batches may therefore differ between ranks, but each has at least one, which may have no pairs.
    """

    def __init__(self, model: AnyModel, training: TrainingConfig, ranks: Ranks):
        super().__init__(model, training)
        self.ranks = ranks
        with ranks.watched(), warnings.catch_warnings():
            # Newer versions of PyTorch rename this argument. The buffers are tables of positions, which may
            # differ in length.
            warnings.filterwarnings("ignore", ".*broadcast_buffers", FutureWarning)
            self._synchronized = DistributedDataParallel(
                BatchLoss(model, super().loss), broadcast_buffers=False, gradient_as_bucket_view=True
            )
        self._synchronized.register_comm_hook(ranks, _all_reduce_sum)
        # The first pass connects the GPUs. At the second one, the ranks agree on the order of the gradients.
        for _ in range(2):
            self._synchronize_nothing()

    def loss(self, model: AnyModel, batch: AnyBatch) -> LossSums:
        """The loss of a batch, whose gradient is not synchronized."""
        with self._synchronized.no_sync():
            return self._synchronized(batch)  # type: ignore[no-any-return]

    def _synchronize_nothing(self) -> None:
        """Take part in a synchronized pass without pairs, and discard the gradients."""
        with self.ranks.watched():
            self._synchronized(batch_type(self.device).without_pairs()).loss.backward()
        self._release_memory()

    def _accumulate(self, batches: list[AnyBatch], tokens: int) -> Tensor:
        """See `Learner`. If memory of a rank runs out, all of them start again with smaller micro-batches.

        Raises SynchronizationMemoryError if this happens in the last backward pass.
        """
        while True:
            batches = split_batches(batches, self.max_micro_batch_positions)
            sums = self._try_until_last_backward(batches, tokens)
            failed, limit = self.ranks.all_reduce_max(sums is None, -self.max_micro_batch_positions)
            self.max_micro_batch_positions = -limit
            if sums is not None and not failed:
                return self._synchronize(*sums, batches, tokens)
            del sums
            self._release_memory()
            self._synchronize_nothing()  # because a synchronized forward pass requires a backward pass

    def _try_until_last_backward(
        self, batches: Sequence[AnyBatch], tokens: int
    ) -> tuple[Tensor, LossSums] | None:
        """Run all passes but the last backward pass, without communication. Returns the summed loss and nll
        of all batches but the last, and the sums of the last; None if memory ran out."""
        *before, last = batches
        try:
            return self._forward_backward(self.model, before, tokens), self._synchronized(last)
        except (RuntimeError, MemoryError) as error:
            self._reduce_micro_batches(error, batches)
            return None

    def _synchronize(self, total: Tensor, last: LossSums, batches: Sequence[AnyBatch], tokens: int) -> Tensor:
        """Run the last backward pass, and add up the gradients and the losses of all ranks."""
        sums = total + torch.stack([last.loss.detach(), last.nll])
        complete = self.ranks.start_all_reduce(sums)
        try:
            with self.ranks.watched():
                self._backward(last, tokens)
        except (RuntimeError, MemoryError) as error:
            self._reduce_micro_batches(error, batches)
            raise SynchronizationMemoryError from error
        complete()
        return sums


def _all_reduce_sum(ranks: Ranks, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    """Add up a bucket of gradients over all ranks. DistributedDataParallel would average them by default."""
    work = dist.all_reduce(bucket.buffer(), group=ranks.step_group, async_op=True)
    assert work is not None
    added: torch.futures.Future[Tensor] = work.get_future().then(lambda future: future.value()[0])
    return added
