"""Which kernel computes attention. Symbols in shapes: see `mtrain.kernels.attention`."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count

import torch
import torch.nn.functional as F
from torch import Tensor

from mtrain.kernels.attention.eager import (
    MIN_KEYS_TO_PAD,
    REGISTER,
    eager_attention,
    split_heads,
    suits_eager_kernel,
)
from mtrain.kernels.attention.packed import packed_attention
from mtrain.kernels.dropout import Generator, HashKey, dropout
from mtrain.kernels.precision import without_autocast
from mtrain.kernels.sequences import Packed, Padded, Sequences

# ------------------------------------------------------------------------------------ the choice of a kernel


def attention(
    projected: Tensor,
    keys_values: Tensor | None,
    heads: int,
    queries: Sequences,
    keys: Sequences,
    causal: bool = False,
    rate: float = 0.0,
    generator: Generator = None,
) -> Tensor:
    """Attention (P, E) in `heads` heads. `queries` and `keys` say to which sequences the tokens belong.

    Self-attention if `keys_values` is None: `projected` (P, 3E) contains queries, keys and values. Else
    `projected` (P, E) contains queries, and `keys_values` (B * S, 2E) keys and values. The N sequences of
    queries may be more than the B sequences of keys: N / B of them in turn share one.

    Padding is masked here: no query attends to it, according to `keys.keep`. With `causal`, each position
    attends to itself and earlier positions (self-attention only). Weights are dropped at a `rate`; for
    `generator` see `mtrain.kernels.dropout`.
    """
    maps = recorder(cross=keys_values is not None)
    if isinstance(queries, Packed) or isinstance(keys, Packed):
        assert isinstance(queries, Packed) and isinstance(keys, Packed)
        if maps is None:
            out = packed_attention(projected, keys_values, heads, queries, keys, causal, rate, generator)
            if out is not None:
                return out
        if rate and isinstance(generator, HashKey):
            of_rows = queries.starts[:-1, None] + torch.arange(queries.longest, device=projected.device)
            generator = generator.of_weights(of_rows, heads, keys.longest)
        rows = queries.pad(projected).flatten(0, 1)
        memory = None if keys_values is None else keys.pad(keys_values).flatten(0, 1)
        padded = queries.as_padded(), keys.as_padded(masked=not causal)
        out = _padded_attention(rows, memory, heads, *padded, causal, rate, generator, maps)
        return out.index_select(0, queries.slots)
    return _padded_attention(projected, keys_values, heads, queries, keys, causal, rate, generator, maps)


def _padded_attention(
    projected: Tensor,
    keys_values: Tensor | None,
    heads: int,
    queries: Padded,
    keys: Padded,
    causal: bool,
    rate: float,
    generator: Generator,
    maps: list[Tensor] | None,
) -> Tensor:
    """`attention` of padded sequences. Appends its weights to `maps`, unless that is None."""
    on_cpu = projected.device.type == "cpu"
    explicit = maps is not None or (rate > 0 and (on_cpu or isinstance(generator, HashKey)))
    keep = None if keys.keep is None else keys.keep[:, None, None]  # (B, 1, 1, S)
    tokens = len(projected)
    # The N / B rows of a sentence become one sequence of queries: (B, N / B * T, E or 3E). In self-attention,
    # B is N, and S is T.
    projected = projected.view(keys.rows, -1, projected.size(-1))
    keys_values = None if keys_values is None else keys.by_row(keys_values)  # (B, S, 2E)
    parts = split_heads(projected, keys_values, heads)
    q, k, v = (part.transpose(1, 2) for part in parts)  # (B, H, N / B * T or S, D)
    trained = q.requires_grad or k.requires_grad
    if on_cpu and not explicit and trained and suits_eager_kernel(k.size(2), k.size(3)):
        keep = _causal(keep, q) if causal else keep
        return eager_attention(projected, keys_values, heads, keep).flatten(0, 1)
    if explicit:
        keep = _causal(keep, q) if causal else keep
        out, weights = explicit_attention(q, k, v, keep, rate, generator, precise=maps is not None)
        if maps is not None:
            maps.append(weights_by_row(weights, queries.rows))
    else:
        out = fused_attention(q, k, v, keep, causal, rate)
    return out.transpose(1, 2).reshape(tokens, heads * out.size(-1))


def causal_mask(length: int, device: torch.device | None = None) -> Tensor:
    """(length, length) bool: position i may attend to positions 0 to i."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()


def _causal(keep: Tensor | None, x: Tensor) -> Tensor:
    """`keep` combined with the causal mask of the T positions of x (.., T, any width)."""
    mask = causal_mask(x.size(-2), x.device)
    return mask if keep is None else keep & mask


# ------------------------------------------------------------------------------------------ attention maps


Recorder = Callable[[bool], list[Tensor] | None]
# Of the current thread: a new thread starts without one.
_recorder: ContextVar[Recorder | None] = ContextVar("attention maps", default=None)


@contextmanager
def recording(cross_from: int | None = None) -> Iterator[list[Tensor]]:
    """A context in which the weights of each attention are appended to the list that it returns.

    They are the weights before dropout, (N, H, T, S), in the order of the calls. With `cross_from`, only
    cross-attention is recorded, from the call with this index on; others use their usual kernels. An inner
    `recording` takes precedence. Other threads are not recorded. A step of `DecodingTransformer.decode_next`
    records cross-attention only, and a step of `StaticDecoder` nothing.
    """
    maps: list[Tensor] = []
    crossings = count()

    def record(cross: bool) -> list[Tensor] | None:
        if cross_from is None:
            return maps
        return maps if cross and next(crossings) >= cross_from else None

    token = _recorder.set(record)
    try:
        yield maps
    finally:
        _recorder.reset(token)


def recorder(cross: bool) -> list[Tensor] | None:
    """The list to append the weights of cross-attention or self-attention to; None if they are not wanted."""
    current = _recorder.get()
    return None if current is None else current(cross)


def weights_by_row(weights: Tensor, rows: int) -> Tensor:
    """Weights (B, H, N / B * T, S) as (N, H, T, S), where N is the number of `rows`."""
    by_position = weights.transpose(1, 2)  # (B, N / B * T, H, S)
    return by_position.reshape(rows, -1, *by_position.shape[2:]).transpose(1, 2)


# ----------------------------------------------------------------------------------------------- the kernels


def explicit_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    keep: Tensor | None,
    rate: float,
    generator: Generator,
    precise: bool,
) -> tuple[Tensor, Tensor]:
    """Attention (B, H, T, D) by its formula, and its weights (B, H, T, S) before dropout. With `precise`, the
    weights are in fp32 or fp64, which takes more memory.

    queries (B, H, T, D), keys and values (B, H, S, D); `keep` broadcasts to (B, H, T, S).
    """
    dtype = queries.dtype
    queries, keys, values = _in_fast_precision(queries, keys, values)
    with without_autocast(queries):
        weights = attention_weights(queries, keys, keep, precise)
        dropped = dropout(weights, rate, generator) if rate else weights
        return (dropped.to(values.dtype) @ values).to(dtype), weights


def _in_fast_precision(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors in bf16 on a CPU as fp32: in bf16, the backward pass of the fused kernel takes several times as
    long. The explicit kernel computes the same."""
    if tensors[0].device.type == "cpu" and tensors[0].dtype == torch.bfloat16:
        return tuple(tensor.float() for tensor in tensors)
    return tensors


def attention_weights(queries: Tensor, keys: Tensor, keep: Tensor | None, precise: bool = False) -> Tensor:
    """softmax(Q K^T / sqrt(D)), (B, H, T, S), of queries (B, H, T, D) and keys (B, H, S, D). With `precise`,
    in fp32 or fp64: in fp16, the gradient of the logarithm of a small weight would overflow.
    """
    scores = queries @ keys.transpose(-2, -1) / math.sqrt(queries.size(-1))
    if keep is not None:
        scores = scores.masked_fill(~keep, -math.inf)
    if precise:
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    return scores.softmax(dim=-1)


def fused_attention(
    queries: Tensor, keys: Tensor, values: Tensor, keep: Tensor | None, causal: bool, rate: float
) -> Tensor:
    """Attention (B, H, T, D) by `torch.nn.functional.scaled_dot_product_attention`, with a mask on a CPU with
    keys padded to whole registers (in training, only where that saves time). Arguments are as of
    `explicit_attention`, but dropout draws from PyTorch's default generator.

    In inference, this makes the result for a sentence independent of the padding in its batch: with a partial
    register, a CPU adds the numbers in a different order. The mask hides the surplus keys; so does causality,
    because they come after every query.
    """
    dtype, masked = queries.dtype, causal or keep is not None  # otherwise, nothing would hide surplus keys
    if causal and keep is not None:  # PyTorch's function takes a mask or `causal`, not both
        keep, causal = _causal(keep, queries), False
    queries, keys, values = _in_fast_precision(queries, keys, values)
    if queries.device.type == "cpu" and masked:
        partial = keys.size(2) % REGISTER
        if partial >= MIN_KEYS_TO_PAD or (partial and not torch.is_grad_enabled()):
            missing = REGISTER - partial
            keys, values = (F.pad(x, (0, 0, 0, missing)) for x in (keys, values))
            keep = None if keep is None else F.pad(keep, (0, missing))
    with without_autocast(queries):
        return F.scaled_dot_product_attention(queries, keys, values, keep, rate, causal).to(dtype)


def cached_attention(
    queries: Tensor, keys: Tensor, values: Tensor, keep_bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attention (B*H, K, D) and its weights (B*H, K, S) for one decoding step, with a query for each beam.

    The arguments are queries (B, H, K, D), keys (B*H, D, S) and values (B*H, S, D) as batched products read
    them, and `keep_bias`, which broadcasts to (B*H, K, S). With few queries, setting up the fused kernel
    takes longer than these products.
    """
    # Scaled first: on Intel CPUs the rounding of baddbmm with an `alpha` depends on the number of keys, so
    # padding would change the result.
    queries = (queries * queries.size(-1) ** -0.5).flatten(0, 1)
    scores = torch.bmm(queries, keys) if keep_bias is None else torch.baddbmm(keep_bias, queries, keys)
    weights = scores.softmax(dim=-1)
    return torch.bmm(weights, values), weights
