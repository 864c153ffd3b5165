"""Data-parallel training: each rank computes the gradients of a part of each step, and they are added up."""

import warnings
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mtrain.config.sections.training import TrainingConfig
from mtrain.data.epochs.batch import Batch
from mtrain.distributed.ranks import Ranks
from mtrain.errors import DistributedError
from mtrain.model.build import AnyModel
from mtrain.model.loss import LossSums
from mtrain.training.step.learner import Learner, make_learner

BYTES_OF_COPY = 16  # of each parameter in fp32: weight, gradient, and AdamW's two moments
BYTES_OF_AVERAGE = 4  # of each parameter, with `training.ema_decay`
SHARE_OF_COPY = 0.6  # of a GPU's memory; the rest is for activations and validation


class SynchronizationMemoryError(DistributedError, exit_code=8):
    """Memory ran out while the ranks communicated, so that they cannot try again together."""

    def __init__(self) -> None:
        super().__init__("out of memory; run the same command again to resume with smaller micro-batches")


def make_learner_of_rank(model: AnyModel, config: TrainingConfig, ranks: Ranks) -> Learner:
    """The learner of this rank. If there are several ranks, all start with the weights of rank 0."""
    if ranks.size == 1:
        return make_learner(model, config)
    if not shards_weights(model, config, ranks):
        return ParallelLearner(model, config, ranks)
    from mtrain.training.step.fsdp import ShardedLearner  # takes a second to import

    return ShardedLearner(model, config, ranks)


def shards_weights(model: nn.Module, config: TrainingConfig, ranks: Ranks) -> bool:
    """Whether the ranks share the weights: as configured, or if weights, gradients, moments and the moving
    average do not fit in SHARE_OF_COPY of a GPU's memory."""
    if config.parallel != "auto" or ranks.device.type != "cuda":
        return config.parallel == "fsdp"
    memory = torch.cuda.get_device_properties(ranks.device).total_memory
    each = BYTES_OF_COPY + (0 if config.ema_decay is None else BYTES_OF_AVERAGE)
    needed = sum(each * parameter.numel() for parameter in model.parameters())
    return bool(ranks.all_reduce_max(needed > SHARE_OF_COPY * memory)[0])


class ParallelLearner(Learner):
    """The learner of one of several ranks, which take each step together. `step` is given the batches of this
    rank, and the number of tokens of all ranks; its metrics are those of all ranks.

    Gradients are synchronized once per step, in the backward pass of each rank's last micro-batch. The number
    of micro-batches may therefore differ between ranks, but each has at least one, which may have no pairs.
    """

    def __init__(self, model: AnyModel, config: TrainingConfig, ranks: Ranks):
        super().__init__(model, config)
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

    def loss(self, model: AnyModel, batch: Batch) -> LossSums:
        """The loss of a batch, whose gradient is not synchronized."""
        with self._synchronized.no_sync():
            return self._synchronized(batch)  # type: ignore[no-any-return]

    def _synchronize_nothing(self) -> None:
        """Take part in a synchronized pass without pairs, and discard the gradients."""
        with self.ranks.watched():
            self._synchronized(Batch.without_pairs()).loss.backward()
        self._release_memory()

    def _accumulate(self, batches: list[Batch], tokens: int) -> Tensor:
        """See `Learner`. If memory of a rank runs out, all of them start again with smaller micro-batches.

        Raises SynchronizationMemoryError if this happens in the last backward pass.
        """
        while True:
            batches = [part for batch in batches for part in batch.split(self.max_micro_batch_positions)]
            sums = self._try_until_last_backward(batches, tokens)
            failed, limit = self.ranks.all_reduce_max(sums is None, -self.max_micro_batch_positions)
            self.max_micro_batch_positions = -limit
            if sums is not None and not failed:
                return self._synchronize(*sums, batches, tokens)
            del sums
            self._release_memory()
            self._synchronize_nothing()  # because a synchronized forward pass requires a backward pass

    def _try_until_last_backward(
        self, batches: Sequence[Batch], tokens: int
    ) -> tuple[Tensor, LossSums] | None:
        """Run all passes but the last backward pass, without communication. Returns the summed loss and nll
        of all batches but the last, and the sums of the last; None if memory ran out."""
        *before, last = batches
        try:
            return self._forward_backward(self.model, before, tokens), self._synchronized(last)
        except (RuntimeError, MemoryError) as error:
            self._reduce_micro_batches(error, batches)
            return None

    def _synchronize(self, total: Tensor, last: LossSums, batches: Sequence[Batch], tokens: int) -> Tensor:
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


class BatchLoss(nn.Module):
    """The loss of a batch as a module that contains all uses of the parameters."""

    def __init__(self, model: AnyModel, loss: Callable[[AnyModel, Batch], LossSums]):
        super().__init__()
        self.model, self._loss = model, loss

    def forward(self, batch: Batch) -> LossSums:
        return self._loss(self.model, batch)


def _all_reduce_sum(ranks: Ranks, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    """Add up a bucket of gradients over all ranks. DistributedDataParallel would average them by default."""
    work = dist.all_reduce(bucket.buffer(), group=ranks.step_group, async_op=True)
    assert work is not None
    added: torch.futures.Future[Tensor] = work.get_future().then(lambda future: future.value()[0])
    return added
