"""What a model says of translations that are given. Letters in shapes: see `mtrain.model`."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mtrain.model.attention import AttentionWeights
from mtrain.model.transformer import Transformer

_ROWS = 1024  # positions whose logits over the whole vocabulary are held at a time


@torch.inference_mode()
def force(
    models: Sequence[Transformer],
    source: Tensor,
    source_keep: Tensor,
    targets: Tensor,
    attention: list[Tensor] | None = None,
) -> Tensor:
    """Log-probability (N, T), nats, of each token of targets (N, T), K for each of B sources (B, S).

    What pads the targets has values too, of no meaning. An ensemble averages probabilities. If `attention` is
    a list, where each model looks, (N, T, S), is appended to it: the mean over the heads of the last layer.
    """
    log_probs = []
    for model in models:
        starts = targets.new_full((len(targets), 1), model.config.bos_id)
        inputs = torch.cat([starts, targets[:, :-1]], dim=1)
        weights = None if attention is None else AttentionWeights()
        hidden = model.decode(inputs, model.encode(source, source_keep), source_keep, weights)
        log_probs.append(_log_probs(model, hidden, targets))
        if attention is not None and weights is not None:
            attention.append(weights.cross[-1].mean(dim=1))
    return torch.stack(log_probs).logsumexp(dim=0) - math.log(len(models))


def _log_probs(model: Transformer, hidden: Tensor, targets: Tensor) -> Tensor:
    """Of targets (N, T) by hidden states (N, T, E), in fp32 or better."""
    parts = []
    states, ids = hidden.flatten(0, 1), targets.flatten()
    for start in range(0, len(ids), _ROWS):
        rows = slice(start, start + _ROWS)
        logits = model.project(states[rows])
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        parts.append(logits.log_softmax(dim=-1).gather(1, ids[rows, None]))
    return torch.cat(parts).view(targets.shape)
