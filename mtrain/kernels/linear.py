"""Linear maps for inference, with copies of their weights that make products faster."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from mtrain.kernels.precision import cpu_has_amx
from mtrain.kernels.undocumented import undocumented

# On a CPU, smaller weights are used directly: the overhead of a product with a packed copy is larger than
# what the copy saves. The choice ignores the number of rows, so that the result for a row does not depend
# on the other rows.
MIN_WEIGHT_ELEMENTS = 200_000
# On a CPU, matrices with fewer rows are multiplied by other kernels, whose results differ in the last bits.
# Models decode at least this many rows, so that a translation does not depend on the size of its batch.
MIN_ROWS = 4
_MANY_ROWS = 32
_LONG_SUM = 512  # of so many products or more; see `_rows_that_round_alike`
# The numbers of rows that are compared there, and the one that the others are compared with.
_ROWS, _MIDDLE = (4, 8, 16, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256, 320, 384, 512), 128


class PackedLinear:
    """x W^T + b, computed with copies of a weight (out, in) and a bias (out) in `dtype`. With `relu`, it is
    relu(x W^T + b) of x (N, in).

    The first call makes the copies; later changes of the originals do not affect them.

    On a CPU the result for a row does not depend on the other rows, as long as there are at least four.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, relu: bool = False):
        self.weight = weight.detach()
        self.bias = None if bias is None else bias.detach()
        self.dtype = dtype
        self.relu = relu
        self._slices: dict[tuple[int, int | None], PackedLinear] = {}

    def slice(self, start: int, end: int | None) -> "PackedLinear":
        """The same map for the output features from `start` to `end` only."""
        if (start, end) not in self._slices:
            bias = None if self.bias is None else self.bias[start:end]
            self._slices[start, end] = PackedLinear(self.weight[start:end], bias, self.dtype)
        return self._slices[start, end]

    def with_relu(self) -> "PackedLinear":
        """The same map, followed by relu."""
        return PackedLinear(self.weight, self.bias, self.dtype, relu=True)

    @property
    def stays_low(self) -> bool:
        """Whether results stay in `dtype`, which makes the following operations faster, too. Otherwise
        `linear` casts them to the type of the input."""
        return self.weight.is_cuda

    @cached_property
    def _product(self) -> Callable[[Tensor], Tensor]:
        # If two threads compute this at the same time, the results are equal.
        bias = None if self.bias is None else self.bias.to(self.dtype)
        return packed_linear(self.weight.to(self.dtype), bias, self.relu)

    def __call__(self, x: Tensor) -> Tensor:
        """x W^T + b, or its relu, (.., out) in `dtype`."""
        return self._product(x)


def pack(weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None) -> PackedLinear | None:
    """A PackedLinear in `dtype` if that takes less time than the original: for large weights, and for all on
    CUDA devices.

    Otherwise None, or, if the original would round few rows in another way than many, a PackedLinear in the
    type of the weight.
    """
    if dtype is not None and (weight.is_cuda or weight.numel() >= MIN_WEIGHT_ELEMENTS):
        return PackedLinear(weight, bias, dtype)
    outputs, inputs = weight.shape
    # Cross-attention multiplies by two slices of its projection: for queries, and for keys and values.
    sizes = [outputs, inputs, 2 * inputs] if outputs == 3 * inputs else [outputs]
    if not all(_rounds_rows_alike(weight.dtype, weight.device, size, inputs) for size in sizes):
        return PackedLinear(weight, bias, weight.dtype)
    return None


@cache
def _rounds_rows_alike(dtype: torch.dtype, device: torch.device, outputs: int, inputs: int) -> bool:
    """Whether a map of this size rounds the result for a row in the same way for few rows as for many.

    On Intel CPUs, MKL splits the sums of a product with few rows in another way, depending on the sizes.
    """
    if device.type != "cpu":
        return True
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, inputs, generator=generator).to(dtype) for rows in (_MANY_ROWS, outputs))
    many = F.linear(x, weight)
    return all(torch.equal(F.linear(x[:n], weight), many[:n]) for n in range(MIN_ROWS, 2 * MIN_ROWS))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, packed: PackedLinear | None) -> Tensor:
    """x W^T + b, computed by `packed` if it is given."""
    if packed is None:
        return F.linear(x, weight, bias)
    return packed(x) if packed.stays_low else packed(x).to(x.dtype)


def packed_linear(weight: Tensor, bias: Tensor | None, relu: bool = False) -> Callable[[Tensor], Tensor]:
    """The function of x (.., in) that computes x W^T + b in the type of the weight. With `relu`, it
    computes relu(x W^T + b) of x (N, in), in one kernel.

    On a CPU, the weight would be reordered for each product, which takes half of the time if x has few rows.
    It is therefore reordered once, by the operations that torch.compile uses. If PyTorch lacks operations
    that this function needs, or they fail, it uses `torch.nn.functional.linear`.
    """
    if (product := _reordered_linear(weight, bias, relu)) is not None:
        is_long = weight.dtype == torch.bfloat16 and weight.size(1) >= _LONG_SUM

        def padded_product(x: Tensor) -> Tensor:
            # Threads that decode together with others may use fewer threads than the first caller.
            sizes = _rows_that_round_alike(*weight.shape, torch.get_num_threads()) if is_long else ()
            return _with_padded_rows(product, x, weight.dtype, sizes)

        return padded_product
    if not relu:
        return lambda x: F.linear(x.to(weight.dtype), weight, bias)
    fused = undocumented("_addmm_activation")
    if weight.device.type == "cuda" and bias is not None and fused is not None:
        return lambda x: fused(bias, x.to(weight.dtype), weight.t())
    return lambda x: F.linear(x.to(weight.dtype), weight, bias).relu_()


def _reordered_linear(
    weight: Tensor, bias: Tensor | None, relu: bool = False
) -> Callable[[Tensor], Tensor] | None:
    """The same function, by oneDNN on a CPU; None if that is not possible."""
    has_bf16 = undocumented("ops.mkldnn._is_mkldnn_bf16_supported")
    reorder = undocumented("ops.mkldnn._reorder_linear_weight")
    linear_pointwise = undocumented("ops.mkldnn._linear_pointwise")
    available = has_bf16 and reorder and linear_pointwise
    if weight.device.type != "cpu" or weight.dtype not in (torch.bfloat16, torch.float32) or not available:
        return None

    def product(x: Tensor) -> Tensor:
        out: Tensor = linear_pointwise(x, packed, bias, "relu" if relu else "none", [], "")
        return out

    with suppress(TypeError, RuntimeError):  # this version of PyTorch has changed the arguments
        if weight.dtype == torch.float32 or has_bf16():
            packed = reorder(weight)
            product(weight.new_zeros(1, weight.size(1)))
            return product
    return None


@cache
def _rows_that_round_alike(outputs: int, inputs: int, threads: int) -> Sequence[int]:
    """Numbers of rows, in ascending order, with which bf16 products of this size on a CPU round each row in
    the same way; none if all numbers do.

    On CPUs with AMX, oneDNN splits long sums in a way that depends on the sizes, on the number of `threads`
    and on the number of rows.
    """
    if not cpu_has_amx():
        return ()
    # Products that cancel each other leave nothing but rounding errors, so every difference shows.
    generator = torch.Generator().manual_seed(0)
    order, half = torch.randperm(inputs, generator=generator), -(-inputs // 2)
    a, b = (torch.randn(n, half, generator=generator).bfloat16() for n in (_ROWS[-1], outputs))
    x, weight = torch.cat([a, a], 1)[:, order], torch.cat([b, -b], 1)[:, order]
    product = _reordered_linear(weight, None)
    assert product is not None
    middle = product(x[:_MIDDLE])
    alike = [n for n in _ROWS if torch.equal(product(x[:n])[:_MIDDLE], middle[:n])]
    return () if len(alike) == len(_ROWS) else alike


def _with_padded_rows(
    product: Callable[[Tensor], Tensor], x: Tensor, dtype: torch.dtype, sizes: Sequence[int]
) -> Tensor:
    """product(x) for x (.., in) converted to `dtype`, with rows padded to the number `padded_rows` or, if
    there are `sizes`, to one of them. More rows than the last one are multiplied in blocks."""
    rows = x.numel() // x.size(-1)
    if sizes and rows > (most := sizes[-1]):
        all_rows = x.reshape(rows, -1)
        blocks = (all_rows[start : start + most] for start in range(0, rows, most))
        found = [_with_padded_rows(product, block, dtype, sizes) for block in blocks]
        return torch.cat(found).view(*x.shape[:-1], -1)
    total = next((size for size in sizes if size >= rows), padded_rows(rows))
    if total == rows:
        return product(x.to(dtype))
    padded = x.new_empty(total, x.size(-1), dtype=dtype)
    padded[:rows] = x.reshape(rows, -1)
    return product(padded)[:rows].view(*x.shape[:-1], -1)


def padded_rows(rows: int, significant_bits: int = 4) -> int:
    """The number of rows rounded up to some significant bits (4: by at most an eighth), so that few different
    numbers occur.

    oneDNN compiles a kernel for each different number of rows, which takes as long as several products.
    """
    step: int = 1 << max(0, rows.bit_length() - significant_bits)
    return -(-rows // step) * step
