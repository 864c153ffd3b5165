"""Linear maps that may also keep their weights in fewer bits, for decoding."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Multiplications below which a product in bf16, with what surrounds it, takes a CPU longer than in fp32,
WORTH_LOWERING = 2_000_000
# unless the weight has so many numbers that to read half of the bytes saves more, however few rows there are.
WORTH_READING = 200_000


class Low:
    """Copies of a weight and bias in fewer bits, `packed` and `packed_bias`, rounded when they are first
    needed; from then on they do not follow when `weight` and `bias`, the originals, are trained further."""

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype):
        self.weight, self.bias, self.dtype = weight.detach(), None if bias is None else bias.detach(), dtype
        self.on_gpu = _on_gpu(weight)
        # On a GPU all are lowered, as autocast would have it; from which size on it pays was not timed.
        always = self.on_gpu or weight.numel() >= WORTH_READING
        self.least = 0 if always else WORTH_LOWERING / len(weight)
        self.packed: Tensor | None = None
        self.packed_bias: Tensor | None = None
        self.parts: dict[tuple[int, int | None], Low] = {}

    def rows(self, start: int, end: int | None) -> "Low":
        """Those of some of the output's features."""
        if (start, end) not in self.parts:
            bias = None if self.bias is None else self.bias[start:end]
            self.parts[start, end] = Low(self.weight[start:end], bias, self.dtype)
        return self.parts[start, end]

    def is_worth(self, x: Tensor) -> bool:
        """Whether a product with x is so large that it takes less time in fewer bits, casts included."""
        return x.numel() >= self.least

    def __call__(self, x: Tensor) -> Tensor:
        """x W^T + b, in as few bits."""
        if self.packed is None:  # two threads may both make them, and make the same; who sees one has both
            self.packed_bias = None if self.bias is None else self.bias.to(self.dtype)
            self.packed = pack(self.weight.to(self.dtype))
        if not self.packed.is_mkldnn:
            return F.linear(x.to(self.dtype), self.packed, self.packed_bias)
        rows = x.numel() // x.size(-1)
        room = padded_rows(rows)
        if room == rows:
            return self._product(x.to(self.dtype))
        low = x.new_empty(room, x.size(-1), dtype=self.dtype)
        low[:rows] = x.reshape(rows, -1)
        return self._product(low)[:rows].view(*x.shape[:-1], -1)

    def _product(self, x: Tensor) -> Tensor:
        """x W^T + b of packed weights."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.packed_bias, "none", [], "")
        return out


def padded_rows(rows: int) -> int:
    """As many rows or up to an eighth more, so that there are few different numbers: for each oneDNN compiles
    a kernel, which takes it as long as several products."""
    step: int = 1 << max(0, rows.bit_length() - 4)
    return -(-rows // step) * step


def pack(weight: Tensor) -> Tensor:
    """A weight in bf16 as oneDNN wants it, who would otherwise lay it out anew for each product: half of the
    time of one with few rows. By what torch.compile packs with; where there is no such, it stays as it is."""
    ops = torch.ops.mkldnn
    if _on_gpu(weight) or weight.dtype != torch.bfloat16 or not all(hasattr(ops, name) for name in _PACKING):
        return weight
    return ops._reorder_linear_weight(weight) if ops._is_mkldnn_bf16_supported() else weight


_PACKING = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, low: Low | None) -> Tensor:
    """x W^T + b, computed by `low` if there is one and the product is large. On a CPU it is of x's own
    precision; a GPU leaves it in few bits, by which attention and the cache gain, too."""
    if low is None or not low.is_worth(x):
        return F.linear(x, weight, bias)
    return low(x) if low.on_gpu else low(x).to(x.dtype)


def _on_gpu(weight: Tensor) -> bool:
    return weight.is_cuda


class Linear(nn.Linear):
    """As PyTorch's, with `low` copies of its weights if it was given them."""

    low: Low | None = None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias, self.low)

    def rows(self, x: Tensor, start: int, end: int | None = None) -> Tensor:
        """Some of the output's features alone."""
        if self.low is None:
            return F.linear(x, self.weight[start:end], self.bias[start:end])
        low = self.low.rows(start, end)  # sliced once
        return linear(x, low.weight, low.bias, low)
