"""Linear maps with low-precision copies of their weights, for inference."""

from collections.abc import Callable
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from mtrain.kernels.undocumented import undocumented

# With fewer multiplications than this a product in bf16, including the casts around it, takes a CPU longer
# than one in fp32,
MIN_MULTIPLICATIONS = 2_000_000
# unless the weight has at least this many elements: reading half of the bytes then saves more.
MIN_WEIGHT_ELEMENTS = 200_000


class LowPrecisionLinear:
    """x W^T + b, computed in `dtype` by copies of a weight (out, in) and a bias (out).

    The copies are made by the first call and do not follow later changes of the originals. `stays_low` says
    whether results stay in `dtype`, which also saves time in the operations that follow, and all products are
    computed in it, however small. By default this is so on a GPU. On a CPU `linear` casts results back to the
    type of the input.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, stays_low: bool | None = None
    ):
        self.weight, self.bias, self.dtype = weight.detach(), None if bias is None else bias.detach(), dtype
        self.stays_low = weight.is_cuda if stays_low is None else stays_low
        always = self.stays_low or weight.numel() >= MIN_WEIGHT_ELEMENTS
        self.min_input_elements = 0 if always else MIN_MULTIPLICATIONS / len(weight)
        self._slices: dict[tuple[int, int | None], LowPrecisionLinear] = {}

    def slice(self, start: int, end: int | None) -> "LowPrecisionLinear":
        """The same map for the output features from `start` to `end` only."""
        if (start, end) not in self._slices:
            bias = None if self.bias is None else self.bias[start:end]
            part = LowPrecisionLinear(self.weight[start:end], bias, self.dtype, self.stays_low)
            self._slices[start, end] = part
        return self._slices[start, end]

    def is_worthwhile(self, x: Tensor) -> bool:
        """Whether the product with x (.., in) is large enough to take less time in low precision."""
        return x.numel() >= self.min_input_elements

    @cached_property
    def _product(self) -> Callable[[Tensor], Tensor]:
        # Two threads may both compute this; they compute the same.
        bias = None if self.bias is None else self.bias.to(self.dtype)
        return packed_linear(self.weight.to(self.dtype), bias)

    def __call__(self, x: Tensor) -> Tensor:
        """x W^T + b (.., out) in `dtype`."""
        return self._product(x)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, low_precision: LowPrecisionLinear | None
) -> Tensor:
    """x W^T + b, by `low_precision` where that is given and worthwhile."""
    if low_precision is None or not low_precision.is_worthwhile(x):
        return F.linear(x, weight, bias)
    return low_precision(x) if low_precision.stays_low else low_precision(x).to(x.dtype)


def packed_linear(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """The function of x (.., in) that computes x W^T + b in the type of the weight.

    For a weight in bf16 on a CPU, oneDNN would reorder the weight for each product, which takes half of the
    time of one with few rows. The weight is therefore reordered once, by the operations that torch.compile
    uses. Where PyTorch lacks them or they fail, this is `torch.nn.functional.linear`.
    """
    is_supported = undocumented("ops.mkldnn._is_mkldnn_bf16_supported")
    reorder = undocumented("ops.mkldnn._reorder_linear_weight")
    linear_pointwise = undocumented("ops.mkldnn._linear_pointwise")
    exist = is_supported and reorder and linear_pointwise
    if weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and exist:

        def product(x: Tensor) -> Tensor:
            out: Tensor = linear_pointwise(x, packed, bias, "none", [], "")
            return out

        try:
            if is_supported():
                packed = reorder(weight)
                product(weight.new_zeros(1, weight.size(1)))
                return lambda x: _with_padded_rows(product, x, weight.dtype)
        except (TypeError, RuntimeError):  # the operations take other arguments by now
            pass
    return lambda x: F.linear(x.to(weight.dtype), weight, bias)


def _with_padded_rows(product: Callable[[Tensor], Tensor], x: Tensor, dtype: torch.dtype) -> Tensor:
    """product(x) of x (.., in) converted to `dtype`, computed with `padded_rows` rows."""
    rows = x.numel() // x.size(-1)
    room = padded_rows(rows)
    if room == rows:
        return product(x.to(dtype))
    padded = x.new_empty(room, x.size(-1), dtype=dtype)
    padded[:rows] = x.reshape(rows, -1)
    return product(padded)[:rows].view(*x.shape[:-1], -1)


def padded_rows(rows: int) -> int:
    """The number of rows rounded up, by at most an eighth, to one of few values.

    oneDNN compiles a kernel for each number of rows, which takes as long as several products.
    """
    step: int = 1 << max(0, rows.bit_length() - 4)
    return -(-rows // step) * step
