"""Scaled dot-product attention, softmax(Q K^T / sqrt(D)) V (Vaswani et al. 2017, section 3.2.1).

`attention` chooses the kernel; the model does not know which one it gets. The step-by-step decoder calls
`cached_attention`.

Symbols in shapes: P tokens, B sequences of keys, N sequences of queries, H heads, T queries, S keys, D head
width, E = H * D. `keep` is a boolean mask, True where a query may attend; `keep_bias` is its additive form, 0
there and -inf elsewhere. Both broadcast.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from mtrain.kernels.autocast import without_autocast
from mtrain.kernels.dropout import dropout
from mtrain.kernels.sequences import Padded

# fp32 numbers in a vector register of a CPU with AVX-512. Products with fewer keys take several times as
# long.
REGISTER = 16
# Minimum number of keys in a partial register for which padding fills it up. With 15 keys, attention takes up
# to three times as long as with 16, but padding has to be copied and differentiated. `eager_attention` pads
# only the first register.
_MIN_KEYS_TO_PAD = 11
# Maximum number of keys for which training on a CPU uses the eager kernel. Compared with the fused kernel, it
# takes up to a third less time for 8 to 32 keys, equally long for 128, and a quarter longer for 256. It also
# stores the attention weights, which take no more memory than queries and keys, because the number of keys is
# limited to twice the head width as well.
_MAX_EAGER_KEYS = 64


# ------------------------------------------------------------------------------------ the choice of a kernel


def attention(
    projected: Tensor,
    keys_values: Tensor | None,
    heads: int,
    queries: Padded,
    keys: Padded,
    causal: bool = False,
    rate: float = 0.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Attention (P, E) in `heads` heads. `queries` and `keys` say to which sequences the tokens belong.

    Self-attention if `keys_values` is None: `projected` (P, 3E) contains queries, keys and values. Else
    `projected` (P, E) contains queries, and `keys_values` (B * S, 2E) keys and values. The N sequences of
    queries may be more than the B sequences of keys: N / B of them in turn share one.

    Padding is masked here: no query attends to it, according to `keys.keep`. With `causal`, each position
    attends to itself and those before it (self-attention only). Weights are dropped at a `rate`; for
    `generator` see `mtrain.kernels.dropout`.

    The kernel is
        explicit  if the weights are recorded, and for dropout on a CPU, where the fused kernel would draw
                  from a generator that all threads share
        eager     on a CPU where gradients are needed, for few keys: see `suits_eager_kernel`
        fused     otherwise
    """
    maps = recorder(cross=keys_values is not None)
    on_cpu = projected.device.type == "cpu"
    explicit = maps is not None or (on_cpu and rate > 0)
    keep = None if keys.keep is None else keys.keep[:, None, None]  # (B, 1, 1, S)
    tokens = len(projected)
    # By rows first: torch.compile would otherwise not know that B is N in training.
    # The N / B rows of a sentence become one sequence of queries: (B, N / B * T, E or 3E). In self-attention,
    # B is N, and S is T.
    projected = queries.by_row(projected).view(keys.rows, -1, projected.size(-1))
    keys_values = None if keys_values is None else keys.by_row(keys_values)  # (B, S, 2E)
    if on_cpu and not explicit and _trains_on_few_keys(projected, keys_values, heads):
        keep = _causal(keep, projected) if causal else keep
        return eager_attention(projected, keys_values, heads, keep).flatten(0, 1)
    parts = split_heads(projected, keys_values, heads)
    q, k, v = (part.transpose(1, 2) for part in parts)  # (B, H, N / B * T or S, D)
    if explicit:
        keep = _causal(keep, q) if causal else keep
        out, weights = explicit_attention(q, k, v, keep, rate, generator)
        if maps is not None:
            maps.append(weights_by_row(weights, queries.rows))
    else:
        out = fused_attention(q, k, v, keep, causal, rate)
    return out.transpose(1, 2).reshape(tokens, heads * out.size(-1))


def _trains_on_few_keys(projected: Tensor, keys_values: Tensor | None, heads: int) -> bool:
    head_width = projected.size(-1) // ((3 if keys_values is None else 1) * heads)
    trained = projected.requires_grad or (keys_values is not None and keys_values.requires_grad)
    keys = (projected if keys_values is None else keys_values).size(1)
    return trained and suits_eager_kernel(keys, head_width)


def suits_eager_kernel(keys: int, head_width: int) -> bool:
    """Whether training on a CPU computes attention over this many keys with `eager_attention`."""
    return keys <= min(_MAX_EAGER_KEYS, 2 * head_width)


def causal_mask(length: int, device: torch.device | None = None) -> Tensor:
    """(length, length) bool: position i may attend to positions 0 to i."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()


def _causal(keep: Tensor | None, x: Tensor) -> Tensor:
    """`keep` combined with the causal mask of the T positions of x (.., T, any width)."""
    mask = causal_mask(x.size(-2), x.device)
    return mask if keep is None else keep & mask


# ------------------------------------------------------------------------------------------ attention maps


class _Recording(NamedTuple):
    maps: list[Tensor]
    cross_only: bool


# Of the current thread: a new thread starts without one.
_recording: ContextVar[_Recording | None] = ContextVar("attention maps", default=None)


@contextmanager
def recording(cross_only: bool = False) -> Iterator[list[Tensor]]:
    """A context in which the weights of each attention are appended to the list that it returns.

    They are the weights before dropout, (N, H, T, S), in the order of the calls. With `cross_only`,
    self-attention is not recorded, and uses its usual kernel. An inner `recording` takes precedence. Other
    threads and compiled code are not recorded, and a step of `decode_next` records cross-attention only.
    """
    maps: list[Tensor] = []
    token = _recording.set(_Recording(maps, cross_only))
    try:
        yield maps
    finally:
        _recording.reset(token)


def recorder(cross: bool) -> list[Tensor] | None:
    """The list to append the weights of cross-attention or self-attention to; None if they are not wanted."""
    if torch.compiler.is_compiling():
        return None
    current = _recording.get()
    return None if current is None or (current.cross_only and not cross) else current.maps


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
    rate: float = 0.0,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention (B, H, T, D) by its formula, and its weights (B, H, T, S) before dropout.

    queries (B, H, T, D), keys and values (B, H, S, D); `keep` broadcasts to (B, H, T, S).
    """
    dtype = queries.dtype
    queries, keys, values = _in_fast_precision(queries, keys, values)
    with without_autocast(queries):
        weights = attention_weights(queries, keys, keep)
        dropped = dropout(weights, rate, generator) if rate else weights
        return (dropped @ values).to(dtype), weights


def _in_fast_precision(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors in bf16 on a CPU as fp32: in bf16, the backward pass of the fused kernel takes several times as
    long. The explicit kernel computes the same."""
    if tensors[0].device.type == "cpu" and tensors[0].dtype == torch.bfloat16:
        return tuple(tensor.float() for tensor in tensors)
    return tensors


def attention_weights(queries: Tensor, keys: Tensor, keep: Tensor | None) -> Tensor:
    """softmax(Q K^T / sqrt(D)), (B, H, T, S), of queries (B, H, T, D) and keys (B, H, S, D)."""
    scores = queries @ keys.transpose(-2, -1) / math.sqrt(queries.size(-1))
    if keep is not None:
        scores = scores.masked_fill(~keep, -math.inf)
    return scores.softmax(dim=-1)


def fused_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    keep: Tensor | None,
    causal: bool = False,
    rate: float = 0.0,
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
    # The device is checked first: under `torch.compile`, a branch on the number of keys would limit the
    # compiled code to the numbers that take the same branch, and other batches would be compiled again.
    if queries.device.type == "cpu" and masked:
        partial = keys.size(2) % REGISTER
        if partial >= _MIN_KEYS_TO_PAD or (partial and not torch.is_grad_enabled()):
            missing = REGISTER - partial
            keys, values = (F.pad(x, (0, 0, 0, missing)) for x in (keys, values))
            keep = None if keep is None else F.pad(keep, (0, missing))
    with without_autocast(queries):
        return F.scaled_dot_product_attention(queries, keys, values, keep, rate, causal).to(dtype)


def eager_attention(projected: Tensor, keys_values: Tensor | None, heads: int, keep: Tensor | None) -> Tensor:
    """Attention (B, T, E) that stores its weights for the backward pass, for short sentences on a CPU.

    `projected` contains queries (B, T, E), and `keys_values` keys and values (B, S, 2E). If it is None,
    `projected` contains all three (B, T, 3E). Each of them is divided among the heads. `keep` has a value for
    each key in its last dimension.

    Arguments in low precision are converted to fp32, and the result back. Type and layout change in one copy,
    and the keys are padded where that saves time. Autograd would copy every input of the products once more,
    and PyTorch's fused kernel is designed for long sequences. The gradient is computed in the same precision
    even if the backward pass runs under autocast.
    """
    with without_autocast(projected):
        out: Tensor = _EagerAttention.apply(projected, keys_values, heads, keep)  # type: ignore[no-untyped-call]
    return out


def padded_keys(keys: int) -> int:
    """The number of keys in `eager_attention`, which may pad them."""
    return REGISTER if _MIN_KEYS_TO_PAD <= keys < REGISTER else keys


class _EagerAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, projected: Tensor, keys_values: Tensor | None, heads: int, keep: Tensor | None
    ) -> Tensor:
        dtype = torch.promote_types(projected.dtype, torch.float32)
        in_parts = split_heads(projected, keys_values, heads)
        sentences, length, _, width = in_parts[0].shape
        keys = in_parts[1].size(1)
        padded = padded_keys(keys)
        lengths = length, padded, padded
        parts = [_by_head(part, size, dtype) for part, size in zip(in_parts, lengths, strict=True)]
        scores = _scaled_product(parts[0], parts[1].transpose(1, 2), width**-0.5)  # (B*H, T, S)
        if padded > keys:
            is_key = torch.arange(padded, device=projected.device) < keys
            keep = is_key if keep is None else F.pad(keep, (0, padded - keys))
        if keep is not None:
            # The lowest finite number instead of -inf: -inf would give NaN for a query whose keys are all
            # masked. All other queries have weights of 0 at masked keys either way.
            scores.view(sentences, heads, length, padded).masked_fill_(~keep, torch.finfo(dtype).min)
        weights = scores.softmax(dim=-1)
        out = projected.new_empty(sentences, length, heads, width)
        _copy_by_position(torch.bmm(weights, parts[2]), out)
        ctx.save_for_backward(*parts, weights)
        ctx.shapes = (
            heads,
            projected.shape,
            None if keys_values is None else keys_values.shape,
            projected.dtype,
        )
        return out.flatten(2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        queries, keys, values, weights = ctx.saved_tensors
        heads, projected_shape, keys_values_shape, dtype = ctx.shapes
        scale = queries.size(-1) ** -0.5
        grad = _by_head(
            grad.reshape(*grad.shape[:2], heads, queries.size(-1)), queries.size(1), queries.dtype
        )
        with without_autocast(grad):
            grad_values = torch.bmm(weights.transpose(1, 2), grad)
            # Gradient of softmax: weights * (g - sum(weights * g)), where g is the gradient of the weights.
            grad_scores = torch.bmm(grad, values.transpose(1, 2)).mul_(weights)
            grad_scores.addcmul_(weights, grad_scores.sum(-1, keepdim=True), value=-1)
            grad_queries = _scaled_product(grad_scores, keys, scale)
            grad_keys = _scaled_product(grad_scores.transpose(1, 2), queries, scale)
        grad_projected = grad.new_empty(projected_shape, dtype=dtype)
        grad_keys_values = (
            None if keys_values_shape is None else grad.new_empty(keys_values_shape, dtype=dtype)
        )
        by_head = (grad_queries, grad_keys, grad_values)
        for part, by_position in zip(
            by_head, split_heads(grad_projected, grad_keys_values, heads), strict=True
        ):
            _copy_by_position(part, by_position)
        return grad_projected, grad_keys_values, None, None


def split_heads(projected: Tensor, keys_values: Tensor | None, heads: int) -> tuple[Tensor, ...]:
    """Views of queries, keys and values, (B, T or S, H, D). For the arguments see `eager_attention`."""
    if keys_values is None:
        width = projected.size(-1) // (3 * heads)
        return projected.view(*projected.shape[:2], 3, heads, width).unbind(2)
    width = projected.size(-1) // heads
    queries = projected.view(*projected.shape[:2], heads, width)
    return queries, *keys_values.view(*keys_values.shape[:2], 2, heads, width).unbind(2)


def _by_head(x: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """x (B, T, H, D) as (B*H, length, D) in another type, with zeros after its T positions."""
    sentences, positions, heads, width = x.shape
    out = x.new_empty(sentences, heads, length, width, dtype=dtype)
    out[:, :, :positions] = x.transpose(1, 2)
    if length > positions:
        out[:, :, positions:] = 0
    return out.flatten(0, 1)


def _copy_by_position(x: Tensor, out: Tensor) -> None:
    """Copy x (B*H, length, D) to `out` (B, T, H, D), which may have fewer positions."""
    by_head = x.view(len(out), out.size(2), x.size(1), out.size(3))
    out.copy_(by_head[:, :, : out.size(1)].transpose(1, 2))


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


def _scaled_product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """scale * a b of a (X, P, Q) and b (X, Q, R), in one pass."""
    # With beta=0, baddbmm does not read its first argument.
    return torch.baddbmm(a.new_empty(1), a, b, beta=0, alpha=scale)
