"""Triton kernels that choose the next tokens, and append them.

The vocabulary is divided into groups of tokens. One kernel reads all logits and summarizes each group of each
row. Another one reads the summaries, and the logits of the groups with the highest maxima.

`mtrain.kernels.decoding_step` describes arguments, results and symbols. Tensors are contiguous and on the
current device.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="import-untyped"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

SIZE = 128  # of a group
GROUPS = 8  # that a program summarizes
ROWS = 128  # to which a program appends tokens


@triton.jit
def read_logits(
    logits, forbidden, position, min_lengths, prefixes, row, index, vocabulary, beams, fixed, eos_id
):  # fmt: skip
    """The logits of tokens in a row, -inf outside of the vocabulary; and the same, -inf where not allowed.
    Prefixes are given for `fixed` positions."""
    inside = index < vocabulary
    x = tl.load(logits + row * vocabulary + index, mask=inside, other=float("-inf"))
    at, sentence = tl.load(position), row // beams
    allowed = (index != eos_id) | (tl.load(min_lengths + sentence) <= at + 1)
    if forbidden is not None:
        allowed &= tl.load(forbidden + index, mask=inside, other=1) == 0
    required = tl.load(prefixes + sentence * fixed + at, mask=at < fixed, other=-1)
    allowed = tl.where(required < 0, allowed, index == required)
    return x, tl.where(allowed, x, float("-inf"))


@triton.jit
def summarize_kernel(
    logits, forbidden, position, min_lengths, prefixes, vocabulary, beams, fixed, eos_id,
    summaries, groups, SIZE: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """A program for GROUPS groups of a row. Writes the maximum of each, the sum of exp(logit - maximum), and
    the maximum of the tokens that are allowed."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    index = group[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    x, allowed = read_logits(
        logits, forbidden, position, min_lengths, prefixes, row, index, vocabulary, beams, fixed, eos_id
    )  # fmt: skip
    highest = tl.max(x, 1)
    summands = tl.exp(x - tl.where(highest == float("-inf"), 0.0, highest)[:, None])
    place, stored = summaries + 3 * row * groups + group, group < groups
    tl.store(place, highest, mask=stored)
    tl.store(place + groups, tl.sum(summands, 1), mask=stored)
    tl.store(place + 2 * groups, tl.max(allowed, 1), mask=stored)


@triton.jit
def best_of_row_kernel(
    logits, forbidden, position, min_lengths, prefixes, vocabulary, beams, fixed, eos_id,
    summaries, groups, live, log_probs, tokens, k, SIZE: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """A program for a row of up to GROUPS groups. Writes its k best tokens, of equal ones the lower first."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    place, stored = summaries + 3 * row * groups + group, group < groups
    maxima = tl.load(place, mask=stored, other=float("-inf"))
    highest = tl.max(maxima, 0)
    total = tl.sum(tl.load(place + groups, mask=stored, other=0.0) * tl.exp(maxima - highest), 0)
    offset = -(highest + tl.log(total))
    if live is not None:
        offset += tl.load(live + row)
    # Of each group: the highest logit not yet chosen, and the last token chosen, if it has the same logit.
    maxima = tl.load(place + 2 * groups, mask=stored, other=float("-inf"))
    last = tl.full((GROUPS,), -1, tl.int32)
    for rank in range(k):
        best, number = tl.max(maxima, 0), tl.argmax(maxima, 0)
        index = number * SIZE + tl.arange(0, SIZE)
        _, x = read_logits(
            logits, forbidden, position, min_lengths, prefixes,
            row, index, vocabulary, beams, fixed, eos_id,
        )  # fmt: skip
        equal = (x == best) & (index > tl.max(tl.where(group == number, last, -1), 0))
        token = tl.min(tl.where(equal, index, vocabulary - 1), 0)
        rest = tl.max(tl.where((x < best) | (equal & (index > token)), x, float("-inf")), 0)
        maxima = tl.where(group == number, rest, maxima)
        last = tl.where(group == number, tl.where(rest == best, token, -1), last)
        tl.store(log_probs + row * k + rank, best + offset)
        tl.store(tokens + row * k + rank, token.to(tl.int64))


def _best_of_rows(
    logits: Tensor, live: Tensor | None, k: int, position: Tensor, min_lengths: Tensor, eos_id: int,
    forbidden: Tensor | None, prefixes: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Log-probabilities, plus those of the beams `live` (B, K) if given, and tokens, of the k best tokens of
    each row, each (N, k)."""
    rows, vocabulary = logits.shape
    groups, beams = triton.cdiv(vocabulary, SIZE), rows // len(min_lengths)
    forbidden = None if forbidden is None else forbidden.view(torch.uint8)
    fixed, prefixes = (0, min_lengths) if prefixes is None else (prefixes.size(1), prefixes)
    summaries, log_probs = logits.new_empty(rows, 3, groups), logits.new_empty(rows, k)
    tokens = torch.empty_like(log_probs, dtype=torch.int64)
    given = logits, forbidden, position, min_lengths, prefixes, vocabulary, beams, fixed, eos_id
    grid = (rows, triton.cdiv(groups, GROUPS))
    summarize_kernel[grid](*given, summaries, groups, SIZE=SIZE, GROUPS=GROUPS, num_warps=4)
    sizes = {"SIZE": SIZE, "GROUPS": triton.next_power_of_2(groups), "num_warps": 1 if groups <= 512 else 4}
    best_of_row_kernel[(rows,)](*given, summaries, groups, live, log_probs, tokens, k, **sizes)
    return log_probs, tokens


def best_tokens(logits: Tensor, *allowed: Any) -> tuple[Tensor, Tensor]:
    """See `mtrain.kernels.decoding_step.best_tokens`; `allowed` are the fields of `Allowed`."""
    log_probs, tokens = _best_of_rows(logits, None, 1, *allowed)
    return tokens[:, 0], log_probs[:, 0]


def best_continuations(logits: Tensor, live: Tensor, k: int, *allowed: Any) -> tuple[Tensor, Tensor, Tensor]:
    """See `mtrain.kernels.decoding_step.best_continuations`; `allowed` are the fields of `Allowed`. Of equal
    continuations, the lowest beam comes first, then the highest logit, then the lowest token."""
    log_probs, tokens = (x.view(len(live), -1) for x in _best_of_rows(logits, live, k, *allowed))
    log_probs, order = log_probs.sort(dim=1, descending=True, stable=True)
    return log_probs[:, :k], order[:, :k] // k, tokens.gather(1, order[:, :k])


@triton.jit
def append_kernel(
    gained, chosen, last, tokens, log_probs, unfinished, limits, position, eos_id, rows, beams, length,
    ROWS: tl.constexpr,
):  # fmt: skip
    """A program for ROWS rows."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside, at = row < rows, tl.load(position)
    going = tl.load(unfinished + row, mask=inside, other=0) != 0
    token = tl.load(chosen + row, mask=inside, other=0)
    added = tl.where(going, tl.load(gained + row, mask=inside, other=0.0), 0.0)
    tl.store(log_probs + row, tl.load(log_probs + row, mask=inside, other=0.0) + added, mask=inside)
    tl.store(tokens + row.to(tl.int64) * length + at, token, mask=inside)
    tl.store(last + row, token, mask=inside)
    below_limit = at + 1 < tl.load(limits + row // beams, mask=inside, other=0)
    tl.store(unfinished + row, (going & (token != eos_id) & below_limit).to(tl.uint8), mask=inside)


def append_tokens(
    gained: Tensor, chosen: Tensor, last: Tensor, tokens: Tensor, log_probs: Tensor, unfinished: Tensor,
    limits: Tensor, position: Tensor, eos_id: int,
) -> Tensor:  # fmt: skip
    """See `mtrain.kernels.decoding_step.append_tokens`. Returns the log-probabilities (B, K)."""
    count, (_, beams, length) = len(gained), tokens.shape
    state = last, tokens, log_probs, unfinished.view(torch.uint8), limits, position
    grid = (triton.cdiv(count, ROWS),)
    append_kernel[grid](gained, chosen, *state, eos_id, count, beams, length, ROWS=ROWS, num_warps=4)
    return log_probs
