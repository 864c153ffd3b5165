"""Linear maps of training in mixed precision.

Symbols in shapes: P tokens, I input features, O output features.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from mtrain.kernels.precision import product_dtype, product_fp32, without_autocast
from mtrain.kernels.triton.available import attempt, suits_kernels


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x W^T + b (.., O) for x (.., I), a weight (O, I) and a bias (O).

    Under autocast on a GPU, the gradients of weight and bias are computed in fp32, and are not rounded to the
    type of autocast.
    """
    # The device first: on a CPU, decoding makes many small products.
    if not suits_kernels(x) or not torch.is_grad_enabled() or (dtype := product_dtype(x)) == weight.dtype:
        return F.linear(x, weight, bias)
    return _MixedLinear.apply(x, weight, bias, dtype)  # type: ignore[no-any-return, no-untyped-call]


class _MixedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
        low, low_weight = x.to(dtype), weight.to(dtype)
        ctx.save_for_backward(low, low_weight)
        ctx.dtypes = x.dtype, weight.dtype, bias.dtype
        with without_autocast(x):
            return F.linear(low, low_weight, bias.to(dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        found: list[Tensor | None] = [None, None, None]
        rows = grad.flatten(0, -2).contiguous()  # (P, O)
        with without_autocast(x):
            if ctx.needs_input_grad[0]:
                found[0] = (rows @ weight).view_as(x)
            if ctx.needs_input_grad[1]:
                found[1] = product_fp32(rows.t(), x.flatten(0, -2))
            if ctx.needs_input_grad[2]:
                total = attempt("mixed_linear.sum_over_tokens", (rows.dtype,), rows, in_backward=True)
                found[2] = rows.sum(0, dtype=torch.float32) if total is None else total
        pairs = zip(found, ctx.dtypes, strict=True)
        return (*[None if grad is None else grad.to(dtype) for grad, dtype in pairs], None)
