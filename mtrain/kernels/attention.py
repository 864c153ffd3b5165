"""Attention whose weights exist, with its gradient written out: on a CPU the fastest for short sentences."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class EagerAttention(torch.autograd.Function):
    """softmax(Q K^T / sqrt(D)) V (Vaswani et al. 2017, section 3.2.1) of queries (B, H, T, D), keys and
    values (B, H, S, D); `allowed`, bool, broadcasts to (B, H, T, S). Forward and, even within autocast,
    backward are in the precision of the arguments.

    Left to themselves, the gradients of these operations would copy each of their inputs once more; those of
    PyTorch's fused kernel are made for long sequences.
    """

    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, allowed: Tensor | None) -> Tensor:
        shape = queries.shape
        queries, keys, values = (x.flatten(0, 1) for x in (queries, keys, values))
        scores = _product(queries, keys.transpose(1, 2), shape[-1] ** -0.5)
        if allowed is not None:
            # Not -inf: a row that may look nowhere would be NaN. Others have weights of 0 there either way.
            scores.view(*shape[:-1], keys.size(1)).masked_fill_(~allowed, torch.finfo(scores.dtype).min)
        weights = scores.softmax(dim=-1)
        ctx.save_for_backward(queries, keys, values, weights)
        return torch.bmm(weights, values).view(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        queries, keys, values, weights = ctx.saved_tensors
        heads, scale = grad.shape[:2], queries.size(-1) ** -0.5
        grad = grad.reshape(queries.shape)
        with torch.autocast(grad.device.type, enabled=False):
            grad_values = torch.bmm(weights.transpose(1, 2), grad)
            grad_weights = torch.bmm(grad, values.transpose(1, 2))
            grad_scores = torch.ops.aten._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
            grad_queries = _product(grad_scores, keys, scale)
            grad_keys = _product(grad_scores.transpose(1, 2), queries, scale)
        return *(x.view(*heads, *x.shape[1:]) for x in (grad_queries, grad_keys, grad_values)), None


def _product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """a (N, P, Q) times b (N, Q, R) times `scale`, in one pass."""
    return torch.baddbmm(a.new_empty(1), a, b, beta=0, alpha=scale)  # what is times 0 is not read
