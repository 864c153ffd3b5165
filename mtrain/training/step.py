"""One optimizer step: the loss of a batch in as many passes as it takes, clipped, applied if finite."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from mtrain.data.batch import Batch
from mtrain.device import autocast
from mtrain.model.loss import projected_cross_entropy
from mtrain.model.transformer import Transformer
from mtrain.schema import TrainingConfig


class StepSums(NamedTuple):
    """What one optimizer step measured; tensors stay on the device until they are asked for."""

    values: Tensor  # (4,): summed loss and nll, gradient norm, 1 if the step was skipped
    tokens: int  # target tokens


def train_step(
    model: Transformer,
    optimizer: torch.optim.Optimizer,
    batches: list[Batch],
    tokens: int,
    rate: float,
    config: TrainingConfig,
) -> StepSums:
    """One optimizer step over `batches`, whose `tokens` target tokens share the loss equally.

    The gradient is that of the summed loss / `tokens`, however the pairs are split into batches. A step whose
    loss or gradient is not finite leaves weights and optimizer as they were. Nothing waits for the device.
    """
    device = next(model.parameters()).device
    loss, nll = torch.zeros(2, device=device).unbind()
    for batch in batches:
        moved = batch.to(device)
        with autocast(device, config.precision):
            hidden = model(moved.source, moved.source_keep, moved.target_in)
            sums = projected_cross_entropy(
                hidden, *model.projection(), moved.labels, moved.target_tokens, config.label_smoothing
            )
        (sums.loss / tokens).backward()  # type: ignore[no-untyped-call]
        loss, nll = loss + sums.loss.detach(), nll + sums.nll
    norm = nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm or float("inf"))
    bad = ~(norm.isfinite() & loss.isfinite())
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.found_inf = bad.float()  # type: ignore[attr-defined]  # the fused kernel then changes nothing
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return StepSums(torch.stack([loss, nll, norm, bad.float()]), tokens)


def make_optimizer(model: nn.Module, config: TrainingConfig) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter 2019); weight decay for matrices alone, not for biases and norms."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, eps=1e-9, fused=True)
