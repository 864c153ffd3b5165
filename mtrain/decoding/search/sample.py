"""Sampling: temperature, top-k, top-p. Symbols in shapes: see `mtrain.model`."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mtrain.config.sections.decoding import DecodingConfig
from mtrain.kernels.hashing import lowbias32
from mtrain.kernels.precision import widest_float


def noise_keys(seed: int, keys: Sequence[tuple[int, ...]], samples: int, steps: int) -> Tensor:
    """(B, samples, steps) random int32 numbers, one for each token to be drawn.

    Each sample of each sentence has its own stream of random numbers, which depends only on the seed and on
    the sentence's key, not on the batch.
    """
    streams = (np.random.default_rng([seed, *key, sample]) for key in keys for sample in range(samples))
    numbers = [stream.integers(-(2**31), 2**31, steps, dtype=np.int32) for stream in streams]
    return torch.from_numpy(np.array(numbers)).view(len(keys), samples, steps)


def draw(logits: Tensor, keys: Tensor, config: DecodingConfig) -> Tensor:
    """Draw one token (N) from each row of logits (N, V), with the random numbers of `noise_keys` (N).

    The distribution at `temperature` is restricted to its `top_k` most probable tokens (Fan et al.,
    "Hierarchical Neural Story Generation", 2018, section 5.3), then to the most probable tokens that together
    reach the probability `top_p` (Holtzman et al., "The Curious Case of Neural Text Degeneration", 2020,
    section 3.1).

    Tokens are drawn with the Gumbel-max trick, with noise that depends only on the key and the token. The
    same key therefore draws the same token, unless two sums are so close that rounding decides. If the
    cumulative distribution were inverted instead, rounding of any logit could change the token that is drawn.
    """
    logits = logits / config.temperature
    if config.top_k:
        kept = logits.topk(min(config.top_k, logits.size(1)))
        logits = torch.full_like(logits, -math.inf).scatter(1, kept.indices, kept.values)
    if config.top_p < 1:
        values, tokens = logits.sort(descending=True)
        probabilities = values.to(widest_float(values.device)).softmax(dim=-1)
        before = probabilities.cumsum(dim=-1) - probabilities
        values = values.masked_fill(before >= config.top_p, -math.inf)
        logits = torch.empty_like(logits).scatter(1, tokens, values)
    return (logits + gumbel_noise(keys, logits.size(1))).argmax(dim=-1)


def gumbel_noise(keys: Tensor, vocab_size: int) -> Tensor:
    """(N, V) fp32 samples of the standard Gumbel distribution, hashed from int32 keys (N) and tokens."""
    tokens = torch.arange(vocab_size, dtype=torch.int32, device=keys.device)
    bits = lowbias32(keys[:, None] ^ lowbias32(tokens + 1)).bitwise_and_(2**31 - 1)
    uniform = (bits.float() + 0.5) * 2.0**-31  # precise near 0, where the noise is largest
    uniform = uniform.clamp(max=1 - 2.0**-24)  # rounded to 1, it would be minus infinity
    return -torch.log(-torch.log1p(-uniform))
