"""Attention for training on short sentences on a CPU. Symbols in shapes: see `mtrain.kernels.attention`."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from mtrain.kernels.precision import without_autocast

# fp32 numbers in a vector register of a CPU with AVX-512. Products with fewer keys take several times as
# long.
REGISTER = 16
# Minimum number of keys in a partial register for which padding fills it up. With 15 keys, attention takes up
# to three times as long as with 16, but padding has to be copied and differentiated. `eager_attention` pads
# only the first register.
MIN_KEYS_TO_PAD = 11
# Maximum number of keys for which training on a CPU uses the eager kernel. Compared with the fused kernel, it
# takes up to a third less time for 8 to 32 keys, equally long for 128, and a quarter longer for 256. It also
# stores the attention weights, which take no more memory than queries and keys, because the number of keys is
# limited to twice the head width as well.
_MAX_EAGER_KEYS = 64


def suits_eager_kernel(keys: int, head_width: int) -> bool:
    """Whether training on a CPU computes attention over this many keys with `eager_attention`."""
    return keys <= min(_MAX_EAGER_KEYS, 2 * head_width)


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
    return REGISTER if MIN_KEYS_TO_PAD <= keys < REGISTER else keys


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
        ctx.shapes = [None if x is None else x.shape for x in (projected, keys_values)]
        ctx.heads, ctx.dtype = heads, projected.dtype
        return out.flatten(2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        queries, keys, values, weights = ctx.saved_tensors
        heads, scale = ctx.heads, queries.size(-1) ** -0.5
        grad = grad.reshape(*grad.shape[:2], heads, queries.size(-1))
        grad = _by_head(grad, queries.size(1), queries.dtype)
        with without_autocast(grad):
            grad_values = torch.bmm(weights.transpose(1, 2), grad)
            # Gradient of softmax: weights * (g - sum(weights * g)), where g is the gradient of the weights.
            grad_scores = torch.bmm(grad, values.transpose(1, 2)).mul_(weights)
            grad_scores.addcmul_(weights, grad_scores.sum(-1, keepdim=True), value=-1)
            grad_queries = _scaled_product(grad_scores, keys, scale)
            grad_keys = _scaled_product(grad_scores.transpose(1, 2), queries, scale)
        grads = [shape and grad.new_empty(shape, dtype=ctx.dtype) for shape in ctx.shapes]
        by_position = split_heads(grads[0], grads[1], heads)
        for part, out in zip((grad_queries, grad_keys, grad_values), by_position, strict=True):
            _copy_by_position(part, out)
        return *grads, None, None


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


def _scaled_product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """scale * a b of a (X, P, Q) and b (X, Q, R), in one pass."""
    # With beta=0, baddbmm does not read its first argument.
    return torch.baddbmm(a.new_empty(1), a, b, beta=0, alpha=scale)
