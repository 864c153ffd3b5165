"""The likeliest tokens, without sorting whole vocabularies. Letters in shapes: see `mtrain.model`."""

import math
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

FEW = 4  # rows of logits of which sorting takes less time than the calls that save it


def normalizer(logits: Tensor) -> Tensor:
    """log sum exp of each row of logits (N, V), (N, 1). PyTorch's log_softmax takes half the time of its
    logsumexp, and the maximum of a row is hardly any work."""
    return logits.amax(dim=-1, keepdim=True) - logits.log_softmax(dim=-1).amax(dim=-1, keepdim=True)


def likeliest(scores: Tensor, offsets: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of B sentences with K rows each, the `count` best of scores (B*K, V) + offsets (B, K): values, rows of
    the sentence, tokens; each (B, count), the best first. If there are fewer, all.

    The best are in those groups of tokens that have the best maxima, of which as many as `count` suffice.
    """
    sentences, beams = offsets.shape
    if len(scores) < FEW:
        every = (scores.view(sentences, beams, -1) + offsets[:, :, None]).flatten(1)
        values, picked = every.topk(min(count, every.size(1)))
        return values, picked // scores.size(1), picked % scores.size(1)
    size = _group_size(scores.size(1))
    if scores.size(1) % size:
        scores = F.pad(scores, (0, -scores.size(1) % size), value=-math.inf)
    groups = scores.size(1) // size
    maxima = scores.view(sentences, beams, groups, size).amax(dim=-1) + offsets[:, :, None]
    chosen = maxima.flatten(1).topk(min(count, beams * groups)).indices  # (B, at most count)
    first = torch.arange(sentences, device=scores.device)[:, None] * (beams * groups)
    members = scores.view(-1, size)[chosen + first] + offsets.gather(1, chosen // groups)[:, :, None]
    values, picked = members.flatten(1).topk(min(count, chosen.size(1) * size))
    group = chosen.gather(1, picked // size)
    return values, group // groups, group % groups * size + picked % size


def likeliest_of_rows(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` best of each row of logits (N, V): values and tokens, (N, count), the best first."""
    if len(logits) < FEW:
        return logits.topk(count)
    values, _, tokens = likeliest(logits, logits.new_zeros(len(logits), 1), count)
    return values, tokens


@cache
def _group_size(vocabulary: int) -> int:
    """A divisor of the vocabulary's size, so that nothing need be copied, near what was found fastest."""
    near = sorted(range(64, 257), key=lambda size: abs(size - 160))
    return next((size for size in near if vocabulary % size == 0), 160 if vocabulary > 160 else vocabulary)
