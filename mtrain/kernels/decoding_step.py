"""The kernels of a decoding step in static buffers, as a CUDA graph replays it.

A step computes one position of each of N rows, K for each of B sentences. The number of the position is in a
tensor. Shapes do not depend on it, and nothing waits for the device. Where Triton works, its kernels replace
the operators below, except in fp64.

Symbols in shapes: B sentences, K beams, N = B*K rows, T positions in the buffers, S padded source length,
P source tokens of all sentences, H heads, D head width, E = H*D, V vocabulary size, k results.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtrain.kernels.topk import beam_topk, logsumexp
from mtrain.kernels.triton.available import attempt


def add_norm(
    x: Tensor, y: Tensor | None, norm: nn.LayerNorm, dtype: torch.dtype, replace: bool = False
) -> Tensor:
    """Add y (N, E) to the residual stream x (N, E) in place, and return the layer norm of the sum in `dtype`.

    `replace` also stores the normalized sum as x, for models with norms after the residual connections. x has
    the type of the parameters of `norm`; y may have another one, and may be None.
    """
    sizes = x.dtype, dtype, x.size(1)
    out: Tensor | None = attempt("decoding.add_norm", sizes, x, y, norm, dtype, replace)
    if out is not None:
        return out
    if y is not None:
        x.add_(y)
    normed = F.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
    if replace:
        x.copy_(normed)
    return normed.to(dtype)


def self_attention(projected: Tensor, cache: Tensor, past_keep: Tensor | None, position: Tensor) -> Tensor:
    """Self-attention (N, E) of one position of each row to itself and to earlier positions.

    `projected` (N, 3E) contains queries, keys and values. `cache` (2, B, H, T*K, D) contains the keys and
    values of earlier positions; key and value of beam k at `position` (1) int64 go to slot position * K + k.
    `past_keep` (B, K, T*K) uint8 is not 0 at the slots of earlier positions that a beam attends to; what it
    contains at later slots is ignored. If K is 1, it may be None: all earlier positions.
    """
    sizes = cache.dtype, cache.shape, len(projected)
    out: Tensor | None = attempt("decoding.attention", sizes, projected, cache, past_keep, position, True)
    if out is not None:
        return out
    sentences, heads, slots, width = cache.shape[1:]
    parts = projected.view(sentences, -1, 3, heads, width).permute(2, 0, 3, 1, 4)  # (3, B, H, K, D)
    beams = parts.size(3)
    rows = torch.arange(beams, device=cache.device)
    cache.index_copy_(3, position * beams + rows, parts[1:])
    keys, values = cache
    slot = torch.arange(slots, device=cache.device)
    earlier = slot < position * beams  # (slots,)
    allowed = slot == position * beams + rows[:, None]  # (K, slots)
    allowed = allowed | (earlier if past_keep is None else earlier & (past_keep[:, None] != 0))
    return _attend(parts[0], keys, values, allowed, slot < (position + 1) * beams)


def cross_attention(queries: Tensor, memory: Tensor, spans: Tensor, longest: int) -> Tensor:
    """Attention (N, E) of one position of each row, with `queries` (N, E), to the source.

    `memory` (P, 2, H, D) contains keys and values of source tokens. `spans` (B, 2) int64 are the first token
    and the number of tokens, up to `longest`, of each sentence. For a sentence without any, the result is 0.
    """
    sizes = memory.dtype, memory.shape, len(queries), len(spans)
    out: Tensor | None = attempt("decoding.attention", sizes, queries, memory, None, spans, False)
    if out is not None:
        return out
    heads, width = memory.shape[2:]
    by_head = queries.view(len(spans), -1, heads, width).transpose(1, 2)  # (B, H, K, D)
    places = torch.arange(longest, device=memory.device)
    given = places < spans[:, 1:]  # (B, S)
    of_sentences = memory[(spans[:, :1] + places).clamp(max=len(memory) - 1)]  # (B, S, 2, H, D)
    keys, values = of_sentences.permute(2, 0, 3, 1, 4)  # (B, H, S, D)
    return _attend(by_head, keys, values, given[:, None, None], given[:, None])


def _attend(queries: Tensor, keys: Tensor, values: Tensor, allowed: Tensor, given: Tensor) -> Tensor:
    """Attention (N, E) of queries (B, H, K, D) to keys and values (B, H, X, D) where `allowed`, which
    broadcasts to (B, H, K, X). Values that are not `given`, which broadcasts to (B, H, X), count as 0: they
    may be undefined."""
    scores = (queries * queries.size(-1) ** -0.5) @ keys.transpose(2, 3)  # (B, H, K, X)
    scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)  # with -inf, no key would give NaN
    weights = scores.softmax(dim=-1)
    attended: Tensor = weights @ values.masked_fill(~given[..., None], 0)  # (B, H, K, D)
    return attended.transpose(1, 2).reshape(-1, queries.size(1) * queries.size(3))


class Allowed(NamedTuple):
    """Which tokens may be generated at a position of B sentences. A prefix overrides the other rules, as in
    `mtrain.decoding.search.constraints`."""

    position: Tensor  # (1,) int64, the number of tokens so far
    min_lengths: Tensor  # (B,) int64, EOS included
    eos_id: int
    forbidden: Tensor | None = None  # (V,) bool: tokens that are never generated
    prefixes: Tensor | None = None  # (B, X) int64, the tokens of the first positions; negative: any token

    def mask_(self, logits: Tensor) -> Tensor:
        """Set the logits (N, V) of all other tokens to -inf."""
        tokens = torch.arange(logits.size(1), device=logits.device)
        too_short = self.min_lengths > self.position + 1  # (B,)
        masked = too_short[:, None] & (tokens == self.eos_id)  # (B, V)
        if self.forbidden is not None:
            masked = masked | self.forbidden
        if self.prefixes is not None:
            last = self.prefixes.size(1) - 1
            required = self.prefixes.index_select(1, self.position.clamp(max=last))  # (B, 1)
            free = (required < 0) | (self.position > last)
            masked = torch.where(free, masked, tokens != required)
        logits.view(len(masked), -1, len(tokens)).masked_fill_(masked[:, None], -math.inf)
        return logits


def best_tokens(logits: Tensor, allowed: Allowed) -> tuple[Tensor, Tensor]:
    """The most probable token (N) that is allowed in each row, the first of equal ones, and its
    log-probability (N).

    `logits` (N, V), in fp32 or fp64, may be overwritten. Forbidding tokens does not change the probabilities
    of the others.
    """
    sizes = logits.dtype, logits.size(1)
    best: tuple[Tensor, Tensor] | None = attempt("next_tokens.best_tokens", sizes, logits, *allowed)
    if best is not None:
        return best
    log_normalizers = logsumexp(logits)
    log_probs, _, tokens = beam_topk(allowed.mask_(logits), -log_normalizers, 1)
    return tokens[:, 0], log_probs[:, 0]


def best_continuations(
    logits: Tensor, live: Tensor, k: int, allowed: Allowed
) -> tuple[Tensor, Tensor, Tensor]:
    """The best k continuations of each sentence: log-probabilities, beams and tokens, each (B, k).

    The best come first. `live` (B, K) are the log-probabilities of the beams; the rest is as in
    `best_tokens`. k is at most V. If fewer continuations are allowed, further ones have the log-probability
    -inf.
    """
    sizes = logits.dtype, logits.size(1)
    best: tuple[Tensor, Tensor, Tensor] | None = attempt(
        "next_tokens.best_continuations", sizes, logits, live, k, *allowed
    )
    if best is not None:
        return best
    log_normalizers = logsumexp(logits)
    return beam_topk(allowed.mask_(logits), live - log_normalizers.view_as(live), k)


def append_tokens(
    gained: Tensor, chosen: Tensor, state: Sequence[Tensor], limits: Tensor, position: Tensor, eos_id: int
) -> None:
    """Append the chosen tokens (N) to all rows, and add the log-probabilities `gained` (N) to those of the
    unfinished ones. The `state` of the rows, which changes in place, consists of:

        last        (B, K) becomes the tokens
        tokens      (B, K, T) gets them at `position` (1)
        log_probs   (B, K)
        unfinished  (B, K) becomes False in rows that end with EOS or reach the maximum length `limits` (B)
    """
    last, tokens, log_probs, unfinished = state
    sizes, others = (gained.dtype, log_probs.dtype), (*state, limits, position, eos_id)
    if attempt("next_tokens.append_tokens", sizes, gained, chosen, *others) is not None:
        return
    last.copy_(chosen.view_as(last))
    tokens.index_copy_(2, position, last[:, :, None])
    log_probs.add_(gained.view_as(last).masked_fill(~unfinished, 0))
    unfinished.logical_and_((last != eos_id) & (position + 1 < limits)[:, None])
