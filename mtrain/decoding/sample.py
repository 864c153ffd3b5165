"""Drawing tokens at random: temperature, top-k, top-p. Letters in shapes: see `mtrain.model`."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mtrain.config.schema import DecodingConfig


def uniform_numbers(seed: int, keys: Sequence[tuple[int, ...]], samples: int, steps: int) -> Tensor:
    """(B, samples, steps) fp64 numbers in [0, 1), a stream of its own for each sample of each sentence: what
    one draws depends on its key and the seed alone, not on its batch."""
    streams = [
        [np.random.default_rng([seed, *key, sample]).random(steps) for sample in range(samples)]
        for key in keys
    ]
    return torch.from_numpy(np.array(streams))


def draw(logits: Tensor, uniform: Tensor, config: DecodingConfig) -> Tensor:
    """One token (N) for each row of logits (N, V), by its number `uniform` (N) in [0, 1).

    Of the distribution at `temperature` are left its `top_k` likeliest tokens (Fan et al., "Hierarchical
    Neural Story Generation", 2018, section 5.3), and of these the likeliest that together reach `top_p`
    (Holtzman et al., "The Curious Case of Neural Text Degeneration", 2020, section 3.1).
    """
    count = min(config.top_k or logits.size(1), logits.size(1))
    values, ids = logits.topk(count) if config.top_k else logits.sort(descending=True)
    probabilities = (values.double() / config.temperature).softmax(dim=-1)
    if config.top_p < 1:
        before = probabilities.cumsum(dim=-1) - probabilities
        probabilities = probabilities.masked_fill(before >= config.top_p, 0)
    reached = probabilities.cumsum(dim=-1)
    wanted = uniform[:, None] * reached[:, -1:]
    picked = torch.searchsorted(reached, wanted, right=True).clamp(max=count - 1)
    return ids.gather(1, picked).squeeze(1)
