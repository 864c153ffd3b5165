"""Top-k selection from logits without sorting whole vocabularies.

Symbols in shapes: B sentences, K rows (beams) per sentence, N = B*K rows, V vocabulary size, k results.
"""

import math
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

# Logits of which a CPU computes the log-softmax at a time: 2 MiB in fp32, so that they stay in its cache.
CHUNK = 2**19
_MIN_GROUPED_ROWS = 16  # with fewer, torch.max on whole rows is faster than the extra calls of `row_topk`


def logsumexp(logits: Tensor) -> Tensor:
    """The log-normalizer of each row of logits (N, V), as (N, 1).

    Equal to `torch.logsumexp(logits, dim=-1, keepdim=True)`, but NaN if all logits of a row are -inf.
    PyTorch's log_softmax takes half the time of its logsumexp, and the maximum of a row is cheap.
    """
    rows = max(1, CHUNK // logits.size(1)) if logits.device.type == "cpu" else len(logits)
    if len(logits) > rows:
        parts = torch.split(logits, rows)
        return torch.cat([logsumexp(part) for part in parts])
    return logits.amax(dim=-1, keepdim=True) - logits.log_softmax(dim=-1).amax(dim=-1, keepdim=True)


def beam_topk(scores: Tensor, offsets: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The k highest of scores (B*K, V) + offsets (B, K) for each sentence, in descending order.

    Returns values, beams (rows of the sentence) and tokens, each (B, k). If a sentence has fewer entries,
    there are fewer columns, or further ones with values of -inf at any tokens of the vocabulary. The
    vocabulary is divided into groups: the top k entries are in the k groups with the highest maxima, so only
    those groups are searched.
    """
    (sentences, beams), vocab_size = offsets.shape, scores.size(1)
    if beams == 1:
        values, tokens = row_topk(scores, k)
        return values + offsets, torch.zeros_like(tokens), tokens
    scores = _in_groups(scores)
    groups, size = scores.shape[1:]
    maxima = scores.view(sentences, beams, groups, size).amax(dim=-1) + offsets[:, :, None]
    best = maxima.flatten(1).topk(min(k, beams * groups)).indices  # (B, <= k), each beam * groups + group
    first = torch.arange(sentences, device=scores.device)[:, None] * (beams * groups)
    members = scores.view(-1, size)[best + first] + offsets.gather(1, best // groups)[:, :, None]
    values, index = members.flatten(1).topk(min(k, best.size(1) * size))
    group = best.gather(1, index // size)
    tokens = group % groups * size + index % size
    return values, group // groups, tokens.clamp_(max=vocab_size - 1)


def row_topk(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k highest of each row of logits (N, V): values and tokens, in descending order.

    Each has the shape (N, k). If a row has fewer entries, there are fewer columns, or further ones with
    values of -inf at any tokens of the vocabulary. Which of several equal entries are found does not depend
    on the other rows.
    """
    if k == 1 and len(logits) < _MIN_GROUPED_ROWS:
        return logits.max(dim=1, keepdim=True)
    grouped = _in_groups(logits)
    size = grouped.size(2)
    maxima = grouped.amax(dim=-1)
    # With k = 1, like above, the first of equal entries.
    best = maxima.argmax(dim=1, keepdim=True) if k == 1 else maxima.topk(min(k, maxima.size(1))).indices
    members = grouped.gather(1, best[:, :, None].expand(-1, -1, size)).flatten(1)  # (N, <= k * size)
    if k == 1:
        values, index = members.max(dim=1, keepdim=True)
        return values, best * size + index
    values, index = members.topk(min(k, members.size(1)))
    tokens = best.gather(1, index // size) * size + index % size
    return values, tokens.clamp_(max=logits.size(1) - 1)


def _in_groups(scores: Tensor) -> Tensor:
    """Scores (N, V) as (N, groups, group size), filled up with -inf."""
    size = _group_size(scores.size(1))
    if scores.size(1) % size:
        scores = F.pad(scores, (0, -scores.size(1) % size), value=-math.inf)
    return scores.view(len(scores), -1, size)


@cache
def _group_size(vocab_size: int) -> int:
    """The size of a group: close to 160, the fastest size measured, and a divisor of the vocabulary size if
    possible, so that the logits need no padding, which would copy them."""
    candidates = sorted(range(64, 257), key=lambda size: abs(size - 160))
    divisors = (size for size in candidates if vocab_size % size == 0)
    return next(divisors, min(160, vocab_size))
