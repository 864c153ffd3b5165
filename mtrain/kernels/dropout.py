"""Dropout (Srivastava et al. 2014) with masks that are cheap to draw on a CPU.

`rate` is the probability that an element is zeroed; the others are scaled by 1 / (1 - rate). On a CPU, the
mask is drawn from `generator` (None: PyTorch's default one). Other devices use `torch.nn.functional.dropout`
and ignore it.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


class HashKey(NamedTuple):
    """What a mask is hashed from, besides the index of each element."""

    key: Tensor  # (1,) int32, on the device of the elements
    salt: int  # a different one for each place in the model that drops elements


def dropout(
    x: Tensor,
    rate: float,
    generator: torch.Generator | None = None,
    *,
    relu: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """Dropout of x, or with `relu` of relu(x), plus the residual if given. At rate 0, nothing is drawn.

    On a CPU, dropout and sum are one pass over memory, in the type of the residual. The backward pass of
    dropout(relu(x)) needs nothing but its result: where that is 0, the gradient is 0.
    """
    if rate and x.device.type == "cpu":
        if not relu and residual is not None:
            return torch.addcmul(residual, x.to(residual.dtype), _mask(residual, rate, generator))
        x = _ReluDropout.apply(x, rate, generator) if relu else x * _mask(x, rate, generator)  # type: ignore[no-untyped-call]
    else:
        x = F.relu(x) if relu else x
        x = F.dropout(x, rate) if rate else x
    return x if residual is None else residual + x


class _ReluDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rate: float, generator: torch.Generator | None) -> Tensor:
        out = x.clamp_min(0).mul_(_mask(x, rate, generator))
        ctx.save_for_backward(out)
        ctx.scale = _scale(rate, x.dtype)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (out,) = ctx.saved_tensors
        return out.sign().mul_(ctx.scale).mul_(grad), None, None


def _mask(x: Tensor, rate: float, generator: torch.Generator | None) -> Tensor:
    """A factor for each element of x: 0 or the scale.

    Drawing one number per element takes longer than the layer around it, so four elements share a 64-bit
    draw, and the rate is exact to 1/65536.
    """
    draws = torch.empty((x.numel() + 3) // 4, dtype=torch.int64)
    draws.random_(-(2**63), None, generator=generator)
    # The rate is derived from the rounded scale, so that the mean is unbiased.
    scale = _scale(rate, x.dtype)
    threshold = min(round((0.5 - 1 / scale) * 65536), 32767)
    draws = draws.view(torch.int16)[: x.numel()].view(x.shape)
    keep = torch.ge(draws, threshold, out=x.new_empty(x.shape))  # a bool mask would take seven times as long
    return keep.mul_(scale)


def _scale(rate: float, dtype: torch.dtype) -> float:
    """1 / (1 - rate), rounded to a type."""
    return torch.tensor(1 / (1 - rate), dtype=dtype).item()
