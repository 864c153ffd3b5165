"""Top-k selection from logits without sorting whole vocabularies.

Symbols in shapes: B sentences, K rows (beams) per sentence, N = B*K rows, V vocabulary size, k results.
"""

import math
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

MIN_ROWS = 4  # with fewer rows, torch.topk on whole rows is faster than the extra calls of `beam_topk`


def logsumexp(logits: Tensor) -> Tensor:
    """The log-normalizer of each row of logits (N, V), as (N, 1).

    Equal to `torch.logsumexp(logits, dim=-1, keepdim=True)`. PyTorch's log_softmax takes half the time of its
    logsumexp, and the maximum of a row is cheap.
    """
    return logits.amax(dim=-1, keepdim=True) - logits.log_softmax(dim=-1).amax(dim=-1, keepdim=True)


def beam_topk(scores: Tensor, offsets: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The k highest of scores (B*K, V) + offsets (B, K) for each sentence, in descending order.

    Returns values, beams (rows of the sentence) and tokens, each (B, k), or fewer columns if a sentence has
    fewer entries. The vocabulary is divided into groups: the top k entries are in the k groups with the
    highest maxima, so only those groups are searched.
    """
    sentences, beams = offsets.shape
    if len(scores) < MIN_ROWS:
        totals = (scores.view(sentences, beams, -1) + offsets[:, :, None]).flatten(1)  # (B, K*V)
        values, index = totals.topk(min(k, totals.size(1)))
        return values, index // scores.size(1), index % scores.size(1)
    size = _group_size(scores.size(1))
    if scores.size(1) % size:
        scores = F.pad(scores, (0, -scores.size(1) % size), value=-math.inf)
    groups = scores.size(1) // size  # per row
    maxima = scores.view(sentences, beams, groups, size).amax(dim=-1) + offsets[:, :, None]
    best = maxima.flatten(1).topk(min(k, beams * groups)).indices  # (B, <= k), each beam * groups + group
    first = torch.arange(sentences, device=scores.device)[:, None] * (beams * groups)
    members = scores.view(-1, size)[best + first] + offsets.gather(1, best // groups)[:, :, None]
    values, index = members.flatten(1).topk(min(k, best.size(1) * size))
    group = best.gather(1, index // size)
    return values, group // groups, group % groups * size + index % size


def row_topk(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k highest of each row of logits (N, V): values and tokens, (N, k), in descending order."""
    if len(logits) < MIN_ROWS:
        return logits.topk(k)
    values, _, tokens = beam_topk(logits, logits.new_zeros(len(logits), 1), k)
    return values, tokens


@cache
def _group_size(vocab_size: int) -> int:
    """The size of a group: close to 160, the fastest size measured, and a divisor of the vocabulary size if
    possible, so that the logits need no padding, which would copy them."""
    candidates = sorted(range(64, 257), key=lambda size: abs(size - 160))
    divisors = (size for size in candidates if vocab_size % size == 0)
    return next(divisors, min(160, vocab_size))
