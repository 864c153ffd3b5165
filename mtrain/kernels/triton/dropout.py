"""Dropout with hashed masks in one pass over memory; see `mtrain.kernels.dropout`."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from mtrain.kernels.hashing import threshold

_BLOCK = 1024  # with four warps, a thread loads 16 bytes of bf16 at a time


def hashed_dropout(
    x: Tensor, rate: float, key: Tensor, salt: Tensor, relu: bool = False, residual: Tensor | None = None
) -> Tensor:
    """Dropout of x, or with `relu` of relu(x), or plus the residual if given. The mask is `hashing.kept` of
    the index of each element."""
    assert not (relu and residual is not None)
    return _HashedDropout.apply(x, residual, key, salt, rate, relu)  # type: ignore[no-any-return]


class _HashedDropout(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, key: Tensor, salt: Tensor, rate: float, relu: bool
    ) -> Tensor:
        out = torch.empty(x.shape, dtype=(x if residual is None else residual).dtype, device=x.device)
        _launch(out, rate, relu, x, residual, key, salt)
        ctx.save_for_backward(*((out, None, None) if relu else (None, key, salt)))
        ctx.rate, ctx.dtype = rate, x.dtype
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x = torch.empty(grad.shape, dtype=ctx.dtype, device=grad.device)
        _launch(grad_x, ctx.rate, False, grad, *ctx.saved_tensors)
        return grad_x, grad if ctx.needs_input_grad[1] else None, None, None, None, None


def _launch(out: Tensor, rate: float, relu: bool, x: Tensor, *others: Tensor | None) -> None:
    tensors = [None if tensor is None else tensor.contiguous() for tensor in (x, *others)]
    if grid := triton.cdiv(x.numel(), _BLOCK):
        numbers = threshold(rate), 1 / (1 - rate), x.numel()
        dropout_kernel[(grid,)](out, *tensors, *numbers, RELU=relu, BLOCK=_BLOCK, num_warps=4)


@triton.jit(do_not_specialize=["limit"])
def dropout_kernel(out, x, other, key, salt, limit, scale, size, RELU: tl.constexpr, BLOCK: tl.constexpr):
    """Dropout of x, or of relu(x), plus `other` unless that is None. Without a key, x is the gradient of
    dropout(relu(..)) with the result `other`, and `out` the gradient of its argument."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    value = tl.load(x + places, mask=inside, other=0.0).to(tl.float32) * scale
    if key is None:  # positive where neither dropout nor relu has zeroed it
        keep = tl.load(other + places, mask=inside, other=0.0) > 0
    else:
        keep = kept(places.to(tl.uint32), key, salt, limit)
    value = tl.where(keep, value, 0.0)
    if RELU:
        value = tl.where(value < 0, 0.0, value)  # NaN remains, as in PyTorch
    if key is not None and other is not None:
        value += tl.load(other + places, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + places, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def kept(index, key, salt, limit):
    """`mtrain.kernels.hashing.kept` of uint32 numbers; `limit` is the threshold of the rate."""
    seed = _lowbias32((tl.load(key) ^ tl.load(salt)).to(tl.uint32, bitcast=True), 0)
    return _lowbias32(index ^ seed, seed).to(tl.int32, bitcast=True) >= limit


@triton.jit
def _lowbias32(x, seed):
    x = (x ^ (x >> 16)) * 0x7FEB352D + seed
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)
