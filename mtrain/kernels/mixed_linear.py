"""Linear maps of training in mixed precision.

Symbols in shapes: P tokens, I input features, O output features.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from mtrain.kernels.precision import cpu_has_amx, product_dtype, product_fp32, without_autocast
from mtrain.kernels.triton.available import attempt, suits_kernels


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x W^T + b (.., O) for x (.., I), a weight (O, I) and a bias (O).

    Under autocast in training, products on a CPU with AMX have a rounded number of rows (`surplus_rows`). On
    a GPU, the gradients of weight and bias are computed in fp32, and are not rounded to the type of autocast.
    """
    # Gradients first: decoding makes many small products.
    if not torch.is_grad_enabled() or (dtype := product_dtype(x)) == weight.dtype:
        return F.linear(x, weight, bias)
    if not suits_kernels(x) and not _compiles_shapes(x):
        return F.linear(x, weight, bias)
    return _MixedLinear.apply(x, weight, bias, dtype)  # type: ignore[no-any-return, no-untyped-call]


def _compiles_shapes(x: Tensor) -> bool:
    """Whether the first product of each shape, in low precision, takes much longer than the next ones: oneDNN
    compiles a kernel for it. With AMX, this takes up to ten times as long as the product itself."""
    return x.device.type == "cpu" and cpu_has_amx()


def surplus_rows(x: Tensor) -> int:
    """How many rows x (P, I) lacks, before products in low precision, to a multiple of 16 that has at most
    five significant bits; 0 where shapes do not matter.

    Nearly every batch has another number of tokens. Rounded up, by 3% on average, there are 16 numbers
    between 512 and 1,024, and oneDNN keeps the kernels for all of them.
    """
    if not _compiles_shapes(x):
        return 0
    return -len(x) % (1 << max(4, (len(x) - 1).bit_length() - 5))


def _in_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x (.., I) as rows (P, I) of a type, followed by `surplus_rows` of zeros."""
    rows = x.flatten(0, -2)
    surplus = surplus_rows(rows)
    if not surplus:
        return rows.to(dtype).contiguous()
    padded = rows.new_empty(len(rows) + surplus, rows.size(1), dtype=dtype)
    padded[: len(rows)], padded[len(rows) :] = rows, 0
    return padded


def _like(x: Tensor, rows: Tensor) -> Tensor:
    """The rows (P, O) of the tokens of x (.., I) in its shape (.., O), without surplus rows."""
    return rows[: x.shape[:-1].numel()].view(*x.shape[:-1], rows.size(1))


class _MixedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
        rows, low_weight = _in_rows(x, dtype), weight.to(dtype)
        ctx.save_for_backward(rows, low_weight)
        ctx.dtypes = x.dtype, weight.dtype, bias.dtype
        with without_autocast(x):
            return _like(x, F.linear(rows, low_weight, bias.to(dtype)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        found: list[Tensor | None] = [None, None, None]
        rows = _in_rows(grad, x.dtype)  # (P, O)
        product = product_fp32 if suits_kernels(rows) else torch.matmul  # a CPU would convert both factors
        with without_autocast(x):
            if ctx.needs_input_grad[0]:
                found[0] = _like(grad, rows @ weight)
            if ctx.needs_input_grad[1]:
                found[1] = product(rows.t(), x)
            if ctx.needs_input_grad[2]:
                total = attempt("mixed_linear.sum_over_tokens", (rows.dtype,), rows, in_backward=True)
                found[2] = rows.sum(0, dtype=torch.float32) if total is None else total
        pairs = zip(found, ctx.dtypes, strict=True)
        return (*[None if grad is None else grad.to(dtype) for grad, dtype in pairs], None)
