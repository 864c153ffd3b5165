"""Layer norm in front of a branch that returns to its input; see `mtrain.kernels.norm`.

Symbols in shapes: P tokens, E model width, N programs.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

_ELEMENTS = 2048  # of a tile
# Of the backward pass: each program adds up the gradients of gain and bias for some tiles.
_TILES, _PROGRAMS = 8, 512  # at least; at most


def norm_branch(
    x: Tensor, gain: Tensor, bias: Tensor, epsilon: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The layer norm of x (P, E) in `dtype`, and x itself. Their gradients are added up in fp32."""
    return _NormBranch.apply(x, gain, bias, epsilon, dtype)  # type: ignore[no-any-return]


class _NormBranch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gain: Tensor, bias: Tensor, epsilon: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        rows = x.contiguous()
        normed = torch.empty_like(rows, dtype=dtype)
        sizes, tiles = _sizes(rows)
        if tiles:
            norm_kernel[(tiles,)](rows, gain, bias, normed, *rows.shape, epsilon, **sizes)
        ctx.save_for_backward(rows, gain)
        ctx.epsilon = epsilon
        return normed, x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_normed: Tensor, grad_x: Tensor) -> tuple[Tensor | None, ...]:
        x, gain = ctx.saved_tensors
        total = torch.empty_like(x)
        sizes, tiles = _sizes(x)
        programs = min(triton.cdiv(tiles, _TILES), _PROGRAMS)
        sums = gain.new_empty(2, programs, x.size(1))  # of the gradients of gain and bias
        if programs:
            tensors = x, gain, grad_normed.contiguous(), grad_x.contiguous(), total, sums
            norm_backward_kernel[(programs,)](*tensors, *x.shape, ctx.epsilon, **sizes)
        return total, *sums.sum(1).unbind(), None, None


def _sizes(x: Tensor) -> tuple[dict[str, int], int]:
    """The sizes of a tile, and the number of tiles."""
    columns = triton.next_power_of_2(x.size(1))
    rows = max(1, _ELEMENTS // columns)
    return {"ROWS": rows, "COLUMNS": columns, "num_warps": 4}, triton.cdiv(len(x), rows)


@triton.jit
def _place(tile, rows, width, ROWS, COLUMNS):
    """Where the elements of a tile are, and which ones exist, (ROWS, COLUMNS)."""
    row = tile * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    return row.to(tl.int64) * width + column, (row < rows) & (column < width)


@triton.jit
def _normalized(x, inside, width, epsilon):
    """The rows of x without their mean, divided by their standard deviation, and 1 / the latter (ROWS, 1)."""
    centered = tl.where(inside, x - tl.sum(x, 1)[:, None] / width, 0.0)
    factor = 1 / tl.sqrt(tl.sum(centered * centered, 1) / width + epsilon)[:, None]
    return centered * factor, factor


@triton.jit(do_not_specialize=["rows"])
def norm_kernel(
    x, gain, bias, out, rows, width, epsilon, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """A program for each tile of x (P, E)."""
    place, inside = _place(tl.program_id(0), rows, width, ROWS, COLUMNS)
    column = tl.arange(0, COLUMNS)
    normed, _ = _normalized(tl.load(x + place, mask=inside, other=0.0).to(tl.float32), inside, width, epsilon)
    normed *= tl.load(gain + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    normed += tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    tl.store(out + place, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def norm_backward_kernel(
    x, gain, grad_normed, grad_x, out, sums, rows, width, epsilon, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """The gradient `out` of x (P, E): that of its norm, and `grad_x`. Each program takes every N-th tile, and
    writes its sums (2, N, E) of the gradients of gain and bias."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, COLUMNS)
    weight = tl.load(gain + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    of_gain = tl.zeros((ROWS, COLUMNS), tl.float32)
    of_bias = tl.zeros((ROWS, COLUMNS), tl.float32)
    for tile in range(program, tl.cdiv(rows, ROWS), programs):
        place, inside = _place(tile, rows, width, ROWS, COLUMNS)
        loaded = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        normed, factor = _normalized(loaded, inside, width, epsilon)
        grad = tl.load(grad_normed + place, mask=inside, other=0.0).to(tl.float32)
        of_gain += grad * normed
        of_bias += grad
        grad *= weight
        mean, along = tl.sum(grad, 1)[:, None] / width, tl.sum(grad * normed, 1)[:, None] / width
        total = (grad - mean - normed * along) * factor
        total += tl.load(grad_x + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)
    sums += program * width + column
    tl.store(sums, tl.sum(of_gain, 0), mask=column < width)
    tl.store(sums + programs * width, tl.sum(of_bias, 0), mask=column < width)
