"""Linear maps in mixed precision.

Symbols in shapes: P tokens, I input features, O output features.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from mtrain.kernels.linear import padded_rows
from mtrain.kernels.precision import cpu_has_amx, product_dtype, product_fp32, without_autocast
from mtrain.kernels.triton.available import attempt, suits_kernels


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x W^T + b (.., O) for x (.., I), a weight (O, I) and a bias (O).

    Under autocast, products on some CPUs get surplus rows (see `pads_rows`), and on a GPU, the gradients of
    weight and bias are computed in fp32, and are not rounded to the type of autocast.
    """
    if x.is_cpu and not torch.is_autocast_enabled("cpu"):  # first: decoding makes many small products
        return F.linear(x, weight, bias)
    dtype = product_dtype(x)
    kernels_help = dtype != weight.dtype and suits_kernels(x) and torch.is_grad_enabled()
    if kernels_help or pads_rows(x.device, dtype):
        return _MixedLinear.apply(x, weight, bias, dtype)  # type: ignore[no-any-return, no-untyped-call]
    return F.linear(x, weight, bias)


def pads_rows(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products of tokens in a type should get surplus rows, so that batches share shapes.

    oneDNN compiles a kernel for each shape. On a CPU with AMX, compiling takes up to ten times as long as
    the product itself, and nearly every batch has a number of tokens of its own.
    """
    return device.type == "cpu" and dtype == torch.bfloat16 and cpu_has_amx()


def shared_rows(rows: int) -> int:
    """The number of rows with surplus ones: for 513 to 1,024 rows, one of 16 numbers."""
    return padded_rows(rows, significant_bits=5)


def _in_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x (.., I) as rows (P, I) of a type, followed by surplus rows of zeros where they help."""
    rows = x.flatten(0, -2)
    count = total = len(rows)
    if pads_rows(x.device, dtype):
        total = shared_rows(count)
    if total == count:
        return rows.to(dtype).contiguous()
    padded = rows.new_empty(total, rows.size(1), dtype=dtype)
    padded[:count] = rows
    padded[count:] = 0
    return padded


def _like(x: Tensor, rows: Tensor) -> Tensor:
    """The rows (P, O) of the tokens of x (.., I) as (.., O), without surplus rows."""
    count = x.shape[:-1].numel()
    rows = rows if len(rows) == count else rows[:count]
    return rows if x.dim() == 2 else rows.view(*x.shape[:-1], rows.size(1))


class _MixedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
        rows, low_weight = _in_rows(x, dtype), weight.to(dtype)
        # The operation that computed an x of this type saves x as well, so no further memory is needed.
        ctx.save_for_backward(x if x.dtype == dtype else rows, low_weight)
        ctx.dtypes = x.dtype, weight.dtype, bias.dtype
        with without_autocast(x):
            return _like(x, F.linear(rows, low_weight, bias.to(dtype)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        found: list[Tensor | None] = [None, None, None]
        rows = _in_rows(grad, weight.dtype)  # (P, O)
        accurate = suits_kernels(x)  # on a CPU, products and sums in fp32 would convert their arguments
        with without_autocast(x):
            if ctx.needs_input_grad[0]:
                found[0] = _like(grad, rows @ weight)
            if ctx.needs_input_grad[1]:
                inputs = _in_rows(x, weight.dtype)
                found[1] = product_fp32(rows.t(), inputs) if accurate else rows.t() @ inputs
            if ctx.needs_input_grad[2]:
                total = attempt("mixed_linear.sum_over_tokens", (rows.dtype,), rows, in_backward=True)
                in_fp32 = torch.float32 if accurate else None
                found[2] = rows.sum(0, dtype=in_fp32) if total is None else total
        pairs = zip(found, ctx.dtypes, strict=True)
        return (*[None if grad is None else grad.to(dtype) for grad, dtype in pairs], None)
