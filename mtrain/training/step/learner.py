"""One optimizer step: accumulate gradients over micro-batches, clip them, update if they are finite."""

import copy
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import wait
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from mtrain.config.sections.training import TrainingConfig
from mtrain.data.epochs.packed_batch import AnyBatch, Layout, split_batches
from mtrain.device import (
    autocast,
    preserved_random_states,
    release_cached_memory,
    resolve_precision,
    step_unless,
    thread_pool,
)
from mtrain.distributed.shards import own_part, whole
from mtrain.errors import DistributedError, is_out_of_memory
from mtrain.kernels.attention.dispatch import recording
from mtrain.kernels.cross_entropy import LossSums, r_drop_loss
from mtrain.kernels.foreach import add_all, scale_all
from mtrain.model.build import AnyModel
from mtrain.model.transformer import Dropout, Transformer
from mtrain.training.step.alignment_loss import alignment_loss
from mtrain.training.step.optimizer import LossScaler, make_optimizer

log = logging.getLogger(__name__)

Result = TypeVar("Result")


class SynchronizationMemoryError(DistributedError, exit_code=8):
    """Memory ran out while the ranks communicated, so that they cannot try again together."""

    def __init__(self) -> None:
        super().__init__("out of memory; run the same command again to resume with smaller micro-batches")


class StepMetrics(NamedTuple):
    """Measurements of one optimizer step. They stay on the device until they are read."""

    values: Tensor  # (4,): summed loss and nll, gradient norm, 1 if the step was skipped
    tokens: int  # target tokens


class Learner:
    """A model, its optimizer, and the threads that share the micro-batches of a step.

    The operations of a small model do not scale to many cores. On a CPU, each of `workers` threads therefore
    has a replica of the model, which shares the weights but accumulates gradients of its own.
    """

    shares_weights = False  # whether each rank has only a part of them
    captures = 0  # CUDA graphs that were captured

    def __init__(self, model: AnyModel, training: TrainingConfig, workers: int = 1):
        self.model, self.training = model, training
        self.device = next(model.parameters()).device
        self.precision = resolve_precision(self.device, training.precision)
        self.loss_scaler = LossScaler(self.device, self.precision == "fp16")
        self.replicas = [model, *(_replica(model) for _ in range(workers - 1))]
        self.pool = thread_pool(workers)
        self.optimizer = make_optimizer(model, training, self.precision, workers, self.pool)
        self.dropout_key: Tensor | None = None  # (1,) int32, of the current micro-batch
        if self.device.type == "cuda":
            self.dropout_key = torch.zeros(1, dtype=torch.int32, device=self.device)
            Dropout.use_key(model, self.dropout_key)
        self.max_micro_batch_positions = math.inf  # with padding, if any; lowered when memory runs out
        self.r_drop = training.r_drop  # the weight alpha; 0 in steps without R-Drop
        self.encoder_share = 1.0  # of the learning rate, with which the encoder is trained
        self.updates = 0  # number of updates of the weights that were begun

    def step(self, batches: Sequence[AnyBatch], tokens: int, rate: float) -> StepMetrics:
        """Take an optimizer step on `batches`, which have `tokens` target tokens in total.

        The gradient of the summed loss is divided by `tokens`, however the pairs are split into batches.
        If the loss or the gradient is not finite, weights and optimizer do not change. Does not synchronize
        with a CUDA device, except to capture graphs.
        """
        sums = self._accumulate(list(batches), tokens)
        self.updates += 1
        for group in self.optimizer.param_groups:
            group["lr"] = rate * (self.encoder_share if group.get("is_encoder") else 1.0)
        return StepMetrics(self.run_in_worker(lambda: self._apply(sums)), tokens)

    def expect(self, layouts: Iterable[Layout]) -> None:
        """Prepare for packed micro-batches of these exact layouts."""

    def layout_for(self, exact: Layout) -> Layout | None:
        """The layout for a packed micro-batch whose exact layout is given; None for the exact one."""
        return None

    def describe_shapes(self) -> list[int]:
        """What determines the layouts that `layout_for` returns, to save in a checkpoint."""
        return []

    def restore_shapes(self, shapes: list[int]) -> None:
        """Restore what `describe_shapes` returned: with other shapes, results are rounded differently."""

    def run_in_worker(self, work: Callable[[], Result]) -> Result:
        """Run `work` in one worker thread, if there are any, and return its result.

        This is for many small operations, such as one per parameter. A worker has only some of the cores; on
        all of them, each operation would wait for the slowest core.
        """
        return work() if self.pool is None else self.pool.submit(work).result()

    def _apply(self, sums: Tensor, skip: Tensor | None = None) -> Tensor:
        """Update the weights by their gradients, unless the scalar `skip` is 1, and free the gradients.
        Returns the `values` of StepMetrics, for summed loss and nll (2,). On a GPU, the host decides nothing:
        the same operations follow, whatever the values are."""
        if self.loss_scaler.enabled:
            scale_all([own_part(g) for g in _gradients(self.model)], 1 / self.loss_scaler.scale)
        # `clip_grad_norm_` of PyTorch 2.8 adds its 1e-6 to the norm of each rank's part.
        norm, limit = whole(nn.utils.get_total_norm(_gradients(self.model))), self.training.clip_norm
        # On a GPU, the comparison would make the host wait; below the limit, the factor is 1.
        if limit and (self.device.type != "cpu" or norm + 1e-6 > limit):
            nn.utils.clip_grads_with_norm_(self.model.parameters(), limit, norm)
        found_inf = (~(norm.isfinite() & sums[0].isfinite())).float()
        step_unless(self.optimizer, found_inf if skip is None else torch.maximum(found_inf, skip))
        self.loss_scaler.update(found_inf)
        self.optimizer.zero_grad(set_to_none=True)
        return torch.stack([*sums, norm, found_inf])

    def _accumulate(self, batches: list[AnyBatch], tokens: int) -> Tensor:
        """Accumulate the gradients of all batches. Returns the summed loss and nll, (2,)."""
        return self._accumulate_alone(batches, tokens)

    def _accumulate_alone(self, batches: list[AnyBatch], tokens: int) -> Tensor:
        """`_accumulate` in this process.

        If memory runs out, the batches are split to at most half the size of the largest one. The limit also
        applies to later steps.
        """
        while True:
            batches = split_batches(batches, self.max_micro_batch_positions)
            try:
                if self.pool is None:
                    return self._forward_backward(self.model, batches, tokens)
                return self._accumulate_in_threads(batches, tokens)
            except (RuntimeError, MemoryError) as error:
                self._reduce_micro_batches(error, batches)
            self._release_memory()

    def _reduce_micro_batches(self, error: Exception, batches: Sequence[AnyBatch]) -> None:
        """After an out-of-memory `error`, limit micro-batches to half the size of the largest of `batches`
        that can be divided. Raises any other error again, and also if none can be divided."""
        divisible = [batch.positions for batch in batches if len(batch.rows) > 1]
        if not is_out_of_memory(error) or not divisible:
            raise error
        self._limit_micro_batches(max(divisible) / 2, batches)

    def _limit_micro_batches(self, limit: float, batches: Sequence[AnyBatch]) -> None:
        """Limit micro-batches to `limit` positions after memory has run out in `batches`."""
        self.max_micro_batch_positions = limit
        size = f"{len(batches)} micro-batches ({sum(len(batch.rows) for batch in batches)} pairs)"
        unit = "tokens" if self.device.type == "cuda" else "padded tokens"
        log.warning("out of memory in %s; limiting each to %d %s", size, limit, unit)

    def _release_memory(self) -> None:
        for replica in self.replicas:
            replica.zero_grad(set_to_none=True)
        release_cached_memory(self.device)

    def _accumulate_in_threads(self, batches: Sequence[AnyBatch], tokens: int) -> Tensor:
        assert self.pool is not None
        replicas = self.replicas[: len(batches)]
        # Checkpoints have the state of this generator, so a resumed run draws the same dropout masks.
        seeds = torch.randint(2**63 - 1, (len(replicas),)).tolist()
        shares = [batches[i :: len(replicas)] for i in range(len(replicas))]
        jobs = []
        for replica, share, seed in zip(replicas, shares, seeds, strict=True):
            Dropout.seed(replica, seed)
            jobs.append(self.pool.submit(self._forward_backward, replica, share, tokens))
        wait(jobs)  # even if one fails, because the others still write gradients
        sums = torch.stack([job.result() for job in jobs]).sum(0)
        for replica in replicas[1:]:
            self.run_in_worker(partial(add_all, _gradients(self.model), _gradients(replica)))
            replica.zero_grad(set_to_none=True)
        return sums

    def _forward_backward(self, model: AnyModel, batches: Sequence[AnyBatch], tokens: int) -> Tensor:
        total = torch.zeros(2, device=self.device)
        for batch in batches:
            total = total + self._backward(self.loss(model, batch), tokens)
        return total

    def _backward(self, sums: LossSums, tokens: int) -> Tensor:
        (sums.loss / tokens * self.loss_scaler.scale).backward()  # type: ignore[no-untyped-call]
        return torch.stack([sums.loss.detach(), sums.nll])

    def loss(self, model: AnyModel, batch: AnyBatch) -> LossSums:
        """The loss of a batch, computed by the model or a replica."""
        if self.dropout_key is not None:
            self.dropout_key.fill_(self.draw_dropout_key())  # does not wait for the device
        return self.loss_on_device(model, batch.to(self.device))

    def loss_on_device(self, model: AnyModel, batch: AnyBatch) -> LossSums:
        """The loss of a batch that is on the device. Nothing here waits for the device."""
        labels, smoothing = batch.labels, self.training.label_smoothing
        passes = 2 if self.r_drop else 1  # with different dropout
        inputs = batch.inputs().twice() if self.r_drop else batch.inputs()
        recorded: AbstractContextManager[list[Tensor]] = nullcontext([])
        if model.config.alignment_head:
            recorded = recording(cross_from=model.config.decoder_layers - 1)  # of the last layer
        with autocast(self.device, self.precision), recorded as maps:
            hidden = model(*inputs)
            if self.r_drop:
                assert isinstance(model, Transformer)
                sums = r_drop_loss(hidden, *model.projection(), labels, smoothing, self.r_drop)
            else:
                sums = model.loss(hidden, labels, smoothing, inputs.targets)
        for weights in maps:
            sums = sums._replace(loss=sums.loss + alignment_loss(weights, labels, inputs.targets, passes))
        return sums

    def draw_dropout_key(self) -> int:
        """An int32 number from the generator of the CPU, whose state checkpoints have."""
        return int(torch.randint(-(2**31), 2**31, ()))

    def discard(self, sums: LossSums) -> None:
        """Free what the loss of a batch keeps for a backward pass that is not needed."""

    def dry_run(self, batch: AnyBatch) -> None:
        """Allocate all memory that training needs: run a batch in every worker at once, and discard the
        gradients. Weights, optimizer and random generators do not change."""
        self._allocate_moments()
        with preserved_random_states(self.device):
            self._accumulate_alone([batch] * len(self.replicas), max(1, batch.target_tokens))
        self.optimizer.zero_grad(set_to_none=True)

    def _allocate_moments(self) -> None:
        """Allocate gradients and the optimizer's moments, without changing anything."""
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        step_unless(self.optimizer, torch.ones((), device=self.device))


class BatchLoss(nn.Module):
    """The loss of a batch as a module that contains all uses of the parameters, which DDP and FSDP wrap."""

    def __init__(self, model: AnyModel, loss: Callable[[AnyModel, AnyBatch], LossSums]):
        super().__init__()
        self.model, self._loss = model, loss

    def forward(self, batch: AnyBatch) -> LossSums:
        return self._loss(self.model, batch)


def _gradients(model: AnyModel) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def _replica(model: AnyModel) -> AnyModel:
    """A copy that shares the weights but has its own gradients and dropout generators."""
    replica = copy.deepcopy(model)
    for copied, parameter in zip(replica.parameters(), model.parameters(), strict=True):
        copied.data = parameter.data
    return replica
