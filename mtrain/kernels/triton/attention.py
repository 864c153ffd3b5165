"""Attention for packed sentences of up to 128 tokens: one program for each sentence and head.

A tile holds a whole sentence. The backward pass therefore computes the weights again without stored
normalizers, and nothing is added atomically.

Symbols in shapes: P tokens, H heads, D head width, E = H * D.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from mtrain.kernels.dropout import Generator, HashKey
from mtrain.kernels.hashing import threshold
from mtrain.kernels.sequences import Packed
from mtrain.kernels.triton.dropout import kept
from mtrain.kernels.triton.tiles import lanes_of, tile_of

_WARPS = {32: 2, 64: 4, 128: 8}  # by the number of tokens in a tile


def short_attention(
    projected: Tensor,
    keys_values: Tensor | None,
    heads: int,
    queries: Packed,
    keys: Packed,
    causal: bool = False,
    rate: float = 0.0,
    generator: Generator = None,
) -> Tensor:
    """Attention (P, E) as of `attention` in `mtrain.kernels.attention.dispatch`, for as many sentences of
    queries as of keys. `suits_short_attention` must be true for the longest sentence.

    With dropout, `generator` is a HashKey, and the mask equals the mask of `HashKey.of_weights`. Tokens
    after the last sentence, and queries of a sentence without keys, get zeros, and their gradients are zero.
    """
    assert isinstance(generator, HashKey) or not rate
    key = generator[:2] if isinstance(generator, HashKey) and rate else (None, None)
    settings = heads, max(queries.longest, keys.longest), causal, rate
    tensors = projected, keys_values, queries.starts, keys.starts, *key
    return _ShortAttention.apply(*tensors, settings)  # type: ignore[no-any-return]


class _ShortAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, projected: Tensor, keys_values: Tensor | None, *others: Any) -> Tensor:
        *places, ctx.settings = others
        out = projected.new_empty(len(projected), projected.size(1) // (3 if keys_values is None else 1))
        inputs = projected.contiguous(), None if keys_values is None else keys_values.contiguous(), *places
        _launch((out, None, None), inputs, *ctx.settings)
        ctx.save_for_backward(*inputs)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads = [None if x is None else torch.empty_like(x) for x in ctx.saved_tensors[:2]]
        _launch((grads[0], grads[1], grad.contiguous()), ctx.saved_tensors, *ctx.settings)
        return (*grads, *[None] * 5)


def _launch(outputs: Any, inputs: Any, heads: int, longest: int, causal: bool, rate: float) -> None:
    """Run a program for each sentence and head, and for each head one that fills the tokens after the last
    sentence with zeros."""
    out, out_memory, grad = outputs
    projected, keys_values, starts, *others = inputs
    alone = keys_values is None
    memory, out_memory = (projected, out) if alone else (keys_values, out_memory)
    width, tile = projected.size(1) // ((3 if alone else 1) * heads), tile_of(longest)
    numbers = len(projected), len(memory), threshold(rate), 1 / (1 - rate), width**-0.5
    constants = {"HEADS": heads, "WIDTH": width, "LANES": lanes_of(width), "TILE": tile}
    options = {"SELF": alone, "CAUSAL": causal, "num_warps": _WARPS[tile], "num_stages": 1}
    tensors = out, out_memory, grad, projected, memory, starts, *others
    attention_kernel[(len(starts), heads)](*tensors, *numbers, **constants, **options)


# Batches differ in these arguments. The kernel must not be compiled for each of their properties.
_VARYING = ["tokens", "memory_tokens", "limit", "starts", "memory_starts", "key", "salt"]


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_VARYING)
def attention_kernel(
    out, out_memory, grad, projected, memory, starts, memory_starts, key, salt,
    tokens, memory_tokens, limit, dropout_scale, scale, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    LANES: tl.constexpr, TILE: tl.constexpr, SELF: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Attention of the queries in `projected` (P, 3E with SELF, else E), and the keys and values in the last
    2E columns of `memory`, which is the same tensor with SELF.

    Without `grad`, `out` (P, E) is the result. With its gradient `grad` (P, E), `out` and `out_memory` are
    the gradients of `projected` and `memory`.
    """
    E: tl.constexpr = HEADS * WIDTH
    columns: tl.constexpr = 3 * E if SELF else E
    memory_columns: tl.constexpr = 3 * E if SELF else 2 * E
    sentence, head = tl.program_id(0), tl.program_id(1)
    first, memory_first = tl.load(starts + sentence), tl.load(memory_starts + sentence)
    if sentence == tl.num_programs(0) - 1:
        _fill_with_zeros(out, first, tokens, head, E if grad is None else columns, WIDTH, E, LANES, TILE)
        if grad is not None:
            _fill_with_zeros(
                out_memory, memory_first, memory_tokens, head, memory_columns, WIDTH, E, LANES, TILE
            )
    else:
        count = tl.load(starts + sentence + 1) - first
        keys = tl.load(memory_starts + sentence + 1) - memory_first
        at, inside = _places(first, count, head, columns, WIDTH, LANES, TILE)
        at_result, inside = _places(first, count, head, E, WIDTH, LANES, TILE)
        at_keys, is_key = _places(memory_first, keys, head, memory_columns, WIDTH, LANES, TILE)
        at_keys += memory_columns - 2 * E
        q = tl.load(projected + at, mask=inside, other=0.0)
        k = tl.load(memory + at_keys, mask=is_key, other=0.0)
        v = tl.load(memory + at_keys + E, mask=is_key, other=0.0)
        weights = _softmax(tl.dot(q, tl.trans(k), input_precision="ieee") * scale, keys, CAUSAL, TILE)
        dropped = weights
        if key is not None:
            factor = tl.where(_kept_weights(first, head, key, salt, limit, HEADS, TILE), dropout_scale, 0.0)
            dropped = weights * factor
        if grad is None:
            result = tl.dot(dropped.to(v.dtype), v, input_precision="ieee")
            tl.store(out + at_result, result.to(v.dtype), mask=inside)
        else:
            g = tl.load(grad + at_result, mask=inside, other=0.0)
            grad_v = tl.dot(tl.trans(dropped.to(g.dtype)), g, input_precision="ieee")
            tl.store(out_memory + at_keys + E, grad_v.to(v.dtype), mask=is_key)
            grad_weights = tl.dot(g, tl.trans(v), input_precision="ieee")
            if key is not None:
                grad_weights *= factor
            scores = weights * (grad_weights - tl.sum(weights * grad_weights, 1)[:, None]) * scale
            grad_scores = scores.to(q.dtype)
            grad_q = tl.dot(grad_scores, k, input_precision="ieee")
            tl.store(out + at, grad_q.to(q.dtype), mask=inside)
            grad_k = tl.dot(tl.trans(grad_scores), q, input_precision="ieee")
            tl.store(out_memory + at_keys, grad_k.to(k.dtype), mask=is_key)


# The arguments below in capitals are constants as well, because the kernel passes constants.


@triton.jit
def _places(first, count, head, COLUMNS, WIDTH, LANES, TILE):
    """Where `count` tokens from `first` on have the first columns of a head, and a mask, (TILE, LANES)."""
    rows, lanes = tl.arange(0, TILE)[:, None], tl.arange(0, LANES)[None, :]
    return (first + rows).to(tl.int64) * COLUMNS + head * WIDTH + lanes, (rows < count) & (lanes < WIDTH)


@triton.jit
def _softmax(scores, keys, CAUSAL, TILE):
    rows, columns = tl.arange(0, TILE)[:, None], tl.arange(0, TILE)[None, :]
    keep = columns < keys
    if CAUSAL:
        keep = keep & (columns <= rows)
    scores = tl.where(keep, scores, -float("inf"))
    # Without the bounds, the weights would be NaN if there are no keys. They are 0.
    weights = tl.exp(scores - tl.maximum(tl.max(scores, 1), -1e30)[:, None])
    return weights / tl.maximum(tl.sum(weights, 1), 1e-30)[:, None]


@triton.jit
def _kept_weights(first, head, key, salt, limit, HEADS, TILE):
    """The mask of `HashKey.of_weights` of one head and the queries from `first` on, (TILE, TILE)."""
    places = tl.arange(0, TILE)
    rows = ((first + places) * HEADS + head).to(tl.uint32)
    return kept(rows[:, None] * 128 + places[None, :].to(tl.uint32), key, salt, limit)


@triton.jit
def _fill_with_zeros(x, first, tokens, head, COLUMNS, WIDTH, E, LANES, TILE):
    """Zeros in all columns of a head, of the tokens from `first` on."""
    zeros = tl.zeros((TILE, LANES), x.dtype.element_ty)
    for start in range(first, tokens, TILE):
        at, inside = _places(start, tokens - start, head, COLUMNS, WIDTH, LANES, TILE)
        for part in tl.static_range(COLUMNS // E):
            tl.store(x + at + part * E, zeros, mask=inside)
