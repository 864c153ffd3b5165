"""One optimizer step: the loss of a batch in as many passes as it takes, clipped, applied if finite."""

import copy
import logging
import math
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from contextlib import AbstractContextManager
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from mtrain.config.schema import TrainingConfig
from mtrain.data.batch import Batch
from mtrain.device import autocast, compiles, multiply_all, resolve_precision, step_unless, thread_pool
from mtrain.errors import is_out_of_memory
from mtrain.model.layers import Dropout
from mtrain.model.loss import LossSums, translation_loss
from mtrain.model.transformer import Transformer

log = logging.getLogger(__name__)

Result = TypeVar("Result")


class StepSums(NamedTuple):
    """What one optimizer step measured; tensors stay on the device until they are asked for."""

    values: Tensor  # (4,): summed loss and nll, gradient norm, 1 if the step was skipped
    tokens: int  # target tokens


class LossScale:
    """Keeps the gradients of fp16 within its range (Micikevicius et al., "Mixed Precision Training", 2018,
    section 3.2): halved when one overflows, doubled after `GROWTH` clean steps. 1, and fixed, elsewhere."""

    GROWTH = 2000

    def __init__(self, device: torch.device, enabled: bool):
        self.enabled = enabled
        self.factor = torch.tensor(65536.0 if enabled else 1.0, device=device)
        self.clean = torch.zeros((), device=device)  # steps since it changed

    def state(self) -> list[float]:
        """What a checkpoint must hold, nothing if it is fixed; waits for the device."""
        return [float(self.factor), float(self.clean)] if self.enabled else []

    def restore(self, state: list[float]) -> None:
        """Undo `state`."""
        if self.enabled and state:
            self.factor, self.clean = (self.factor.new_tensor(value) for value in state)

    def update(self, bad: Tensor) -> None:
        """Take note of a step; `bad` is 1 if it was not finite, else 0."""
        if self.enabled:
            self.clean = (self.clean + 1) * (1 - bad)
            grow = (self.clean >= self.GROWTH).float()
            self.factor = (self.factor * (1 - bad / 2) * (1 + grow)).clamp(min=1.0)
            self.clean = self.clean * (1 - grow)


class Learner:
    """A model, its optimizer, and the threads that share a step's passes.

    The small operations of a small model use one core each far better than two cores together. So on a CPU
    each of `workers` threads has a replica of the model: the same weights, gradients of its own.
    """

    def __init__(self, model: Transformer, config: TrainingConfig, workers: int = 1):
        self.model, self.config = model, config
        self.optimizer = make_optimizer(model, config)
        self.device = next(model.parameters()).device
        self.precision = resolve_precision(self.device, config.precision)
        self.scale = LossScale(self.device, self.precision == "fp16")
        self.replicas = [model, *(_replica(model) for _ in range(workers - 1))]
        if compiles(self.device, config.compile):  # of changing sizes: compiled once or twice, not for each
            for replica in self.replicas:
                replica.compile(dynamic=True)
        self.pool = thread_pool(workers)
        self.most = math.inf  # positions of a pass that memory holds, padding included

    def step(self, batches: Sequence[Batch], tokens: int, rate: float) -> StepSums:
        """Learn from `batches`, whose `tokens` target tokens share the loss equally, at learning rate `rate`.

        The gradient is that of the summed loss / `tokens`, however the pairs are split into batches. A step
        whose loss or gradient is not finite leaves weights and optimizer as they were. Nothing waits for the
        device.
        """
        sums = self._accumulate_in_memory(list(batches), tokens)
        return self.alone(lambda: self._update(sums, tokens, rate))

    def alone(self, work: Callable[[], Result]) -> Result:
        """Do what has a small part for each parameter on the cores of one worker. All cores would wait for
        each other at every part, and for long where another program has one of them."""
        return work() if self.pool is None else self.pool.submit(work).result()

    def _update(self, sums: Tensor, tokens: int, rate: float) -> StepSums:
        if self.scale.enabled:
            multiply_all(_gradients(self.model), 1 / self.scale.factor)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_norm or float("inf"))
        bad = (~(norm.isfinite() & sums[0].isfinite())).float()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        step_unless(self.optimizer, bad)
        self.scale.update(bad)
        self.optimizer.zero_grad(set_to_none=True)
        return StepSums(torch.stack([*sums, norm, bad]), tokens)

    def _accumulate_in_memory(self, batches: list[Batch], tokens: int) -> Tensor:
        """As `_accumulate`, but where memory does not hold the passes, no pass is to be more than half as
        large as the largest of them, from then on. Which of them was too much is not known."""
        while True:
            batches = [part for batch in batches for part in batch.cut(self.most)]
            try:
                return self._accumulate(batches, tokens)
            except (RuntimeError, MemoryError) as error:
                several = [batch.positions for batch in batches if len(batch.rows) > 1]
                if not is_out_of_memory(error) or not several:
                    raise
                self.most = max(several) / 2
                pairs = sum(len(batch.rows) for batch in batches)
                log.warning(
                    "out of memory in %d micro-batches of %d pairs; now at most %d positions each",
                    *(len(batches), pairs, self.most),
                )
            for replica in self.replicas:
                replica.zero_grad(set_to_none=True)  # of the passes that did fit
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _accumulate(self, batches: Sequence[Batch], tokens: int) -> Tensor:
        """Sum the gradients of all passes into the model's; returns summed loss and nll (2,)."""
        if self.pool is None:
            return self._passes(self.model, batches, tokens)
        busy = self.replicas[: len(batches)]
        # Drawn here, so that the one generator whose state a checkpoint holds decides all dropout.
        seeds = torch.randint(2**63 - 1, (len(busy),)).tolist()
        shares = [batches[i :: len(busy)] for i in range(len(busy))]
        jobs = [
            self.pool.submit(self._passes, replica, share, tokens, seed)
            for replica, share, seed in zip(busy, shares, seeds, strict=True)
        ]
        wait(jobs)  # also where one has failed: nothing may touch the gradients meanwhile
        sums = torch.stack([job.result() for job in jobs]).sum(0)
        self.alone(lambda: self._merge(busy[1:]))
        return sums

    def _merge(self, replicas: Sequence[Transformer]) -> None:
        for replica in replicas:
            mine, others = _gradients(self.model), _gradients(replica)
            for gradient, other in zip(mine, others, strict=True):
                gradient += other
            replica.zero_grad(set_to_none=True)

    def _passes(
        self, model: Transformer, batches: Sequence[Batch], tokens: int, seed: int | None = None
    ) -> Tensor:
        if seed is not None:
            Dropout.seed(model, seed)
        total = torch.zeros(2, device=self.device)
        for batch in batches:
            sums = self.loss(model, batch)
            (sums.loss / tokens * self.scale.factor).backward()  # type: ignore[no-untyped-call]
            total = total + torch.stack([sums.loss.detach(), sums.nll])
        return total

    def loss(self, model: Transformer, batch: Batch) -> LossSums:
        """Forward pass of a batch through the model or a replica."""
        moved, passes = batch.to(self.device), 2 if self.config.r_drop else 1
        inputs = (moved.source, moved.source_keep, moved.target_in)
        with autocast(self.device, self.precision):
            hidden = model(*(part.repeat(passes, 1) for part in inputs))
            labels, options = moved.labels, (self.config.label_smoothing, self.config.r_drop)
            return translation_loss(hidden, *model.projection(), labels, moved.target_tokens, *options)

    def rehearse(self, batch: Batch) -> None:
        """Take a batch through every worker at once, beside all that training holds, and forget it."""
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        # The optimizer makes its moments, and changes nothing.
        step_unless(self.optimizer, torch.ones((), device=self.device))
        with self.generators_restored():
            self._accumulate_in_memory([batch] * len(self.replicas), batch.target_tokens)
        self.optimizer.zero_grad(set_to_none=True)

    def generators_restored(self) -> AbstractContextManager[None]:
        """Within it, what is drawn from the generators of training is undone."""
        return torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else [])


def _gradients(model: Transformer) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def _replica(model: Transformer) -> Transformer:
    """A copy that shares the weights; only gradients and the generators of its dropout are its own."""
    replica = copy.deepcopy(model)
    for copied, parameter in zip(replica.parameters(), model.parameters(), strict=True):
        copied.data = parameter.data
    return replica


def make_optimizer(model: nn.Module, config: TrainingConfig) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter 2019); weight decay for matrices alone, not for biases and norms.
    Embeddings decay as in nanoGPT (fairseq decays all): tied, they are a matrix that multiplies too."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, eps=1e-9, fused=True)
