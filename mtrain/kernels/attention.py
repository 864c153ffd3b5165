"""Scaled dot-product attention, softmax(Q K^T / sqrt(D)) V (Vaswani et al. 2017, section 3.2.1).

Symbols in shapes: B sentences, H heads, T queries, S keys, D head width. `keep` is a boolean mask, True where
a query may attend; `keep_bias` is its additive form, 0 there and -inf elsewhere. Both broadcast.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from mtrain.kernels.autocast import without_autocast

# fp32 numbers in a vector register of a CPU. Products with fewer keys take several times as long.
REGISTER = 16
# Minimum number of keys in the last, partial register for which padding fills it up. With 15 keys, attention
# takes up to three times as long as with 16, but padding has to be copied and differentiated.
_MIN_KEYS_TO_PAD = 11


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
    dropout: float = 0.0,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, on a CPU with keys padded to whole registers.

    In inference, this makes the result for a sentence independent of the padding in its batch: with a partial
    register, a CPU adds the numbers in a different order.
    """
    partial = keys.size(2) % REGISTER
    masked = causal or keep is not None  # otherwise there is no mask that hides the padding
    worthwhile = partial >= _MIN_KEYS_TO_PAD or (partial and not torch.is_grad_enabled())
    if queries.device.type == "cpu" and worthwhile and masked:
        missing = REGISTER - partial
        keys, values = (F.pad(x, (0, 0, 0, missing)) for x in (keys, values))
        keep = None if keep is None else F.pad(keep, (0, missing))
    return F.scaled_dot_product_attention(queries, keys, values, keep, dropout, causal)


def eager_attention(queries: Tensor, keys: Tensor, values: Tensor, keep: Tensor | None) -> Tensor:
    """Attention (B, H, T, D) that stores its weights for the backward pass.

    On a CPU this is the fastest way to train on short sentences. Autograd would copy every input of these
    products once more, and PyTorch's fused kernel is designed for long sequences. The gradient is computed in
    the precision of the arguments even if the backward pass runs under autocast.
    """
    out: Tensor = _EagerAttention.apply(queries, keys, values, keep)  # type: ignore[no-untyped-call]
    return out


class _EagerAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, keep: Tensor | None) -> Tensor:
        shape = queries.shape
        queries, keys, values = (x.flatten(0, 1) for x in (queries, keys, values))  # (B*H, .., D)
        scores = _scaled_product(queries, keys.transpose(1, 2), shape[-1] ** -0.5)  # (B*H, T, S)
        if keep is not None:
            # The lowest finite number instead of -inf: -inf would give NaN for a query whose keys are all
            # masked. All other queries have weights of 0 at masked keys either way.
            scores.view(*shape[:-1], keys.size(1)).masked_fill_(~keep, torch.finfo(scores.dtype).min)
        weights = scores.softmax(dim=-1)
        ctx.save_for_backward(queries, keys, values, weights)
        return torch.bmm(weights, values).view(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        queries, keys, values, weights = ctx.saved_tensors
        heads, scale = grad.shape[:2], queries.size(-1) ** -0.5
        grad = grad.reshape(queries.shape)
        with without_autocast(grad):
            grad_values = torch.bmm(weights.transpose(1, 2), grad)
            # Gradient of softmax: weights * (g - sum(weights * g)), where g is the gradient of the weights.
            grad_scores = torch.bmm(grad, values.transpose(1, 2)).mul_(weights)
            grad_scores.addcmul_(weights, grad_scores.sum(-1, keepdim=True), value=-1)
            grad_queries = _scaled_product(grad_scores, keys, scale)
            grad_keys = _scaled_product(grad_scores.transpose(1, 2), queries, scale)
        return *(x.view(*heads, *x.shape[1:]) for x in (grad_queries, grad_keys, grad_values)), None


def cached_attention(
    queries: Tensor, keys: Tensor, values: Tensor, keep_bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attention (B*H, T, D) and its weights (B*H, T, S) for the few queries of one decoding step.

    The arguments are laid out for batched products: queries (B*H, T, D), keys (B*H, D, S) and values
    (B*H, S, D). With few queries, setting up the fused kernel takes longer than these products.
    """
    # Scaled first: on Intel CPUs the rounding of baddbmm with an `alpha` depends on the number of keys, so
    # padding would change the result.
    queries = queries * queries.size(-1) ** -0.5
    scores = torch.bmm(queries, keys) if keep_bias is None else torch.baddbmm(keep_bias, queries, keys)
    weights = scores.softmax(dim=-1)
    return torch.bmm(weights, values), weights


def _scaled_product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """scale * a b of a (X, P, Q) and b (X, Q, R), in one pass."""
    # With beta=0, baddbmm does not read its first argument.
    return torch.baddbmm(a.new_empty(1), a, b, beta=0, alpha=scale)
