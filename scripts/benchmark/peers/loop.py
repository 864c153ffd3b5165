"""The plain training loop of a tutorial, for tools that offer a model but no trainer."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmark.job import TrainingJob
from benchmark.meter import Meter
from benchmark.peers.batches import IGNORE, PeerBatch, Streams

LEARNING_RATE = 5e-4  # safe without warm-up; speed does not depend on it


def train(job: TrainingJob, model: nn.Module, logits_of: Callable[[PeerBatch], Tensor]) -> dict[str, Any]:
    """Train a model, whose logits (B, T, V) `logits_of` computes, on mtrain's batches.

    AdamW (on a GPU the fused one, which is faster), clipped gradients, cross-entropy with label smoothing
    over all positions, bf16 by autocast.
    """
    recipe, device = job.training, torch.device(job.device)
    model.to(device).train()
    fused = device.type == "cuda"
    optimizer = torch.optim.AdamW(
        model.parameters(), LEARNING_RATE, recipe["betas"], weight_decay=0.0, fused=fused
    )
    meter = Meter(job.device, job.warmup, job.seconds)
    for batches in Streams(job.streams, job.model).steps():
        tokens = sum(int(batch.target_keep.sum()) for batch in batches)
        for batch in (each.to(device) for each in batches):
            with torch.autocast(device.type, torch.bfloat16, enabled=job.precision == "bf16"):
                logits = logits_of(batch)
            loss = summed_loss(logits, batch, recipe["label_smoothing"]) / tokens
            loss.backward()  # type: ignore[no-untyped-call]
        update(model, optimizer)
        if meter.step(tokens, sum(batch.labels.numel() for batch in batches)):
            break
    return meter.result()


def summed_loss(logits: Tensor, batch: PeerBatch, smoothing: float) -> Tensor:
    """Cross-entropy of logits (B, T, V), summed over the tokens of a batch."""
    arguments = (logits.float().flatten(0, 1), batch.labels.flatten())
    return F.cross_entropy(*arguments, ignore_index=IGNORE, label_smoothing=smoothing, reduction="sum")


def update(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Clip the gradients and take an optimizer step."""
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
