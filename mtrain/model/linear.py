"""Linear maps that may also keep their weights in fewer bits, for decoding."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Multiplications below which a product in bf16, with what surrounds it, takes a CPU longer than in fp32.
WORTH_LOWERING = 5_000_000

Low = tuple[Tensor, Tensor | None]  # weight and bias in fewer bits


def lowered(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Low:
    """Copies that do not follow when the weights are trained further."""
    return weight.detach().to(dtype), None if bias is None else bias.detach().to(dtype)


def worth_lowering(x: Tensor, weight: Tensor) -> bool:
    """Whether a product is so large that it takes less time in fewer bits, casts included."""
    return x.numel() * weight.size(0) >= WORTH_LOWERING


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, low: Low | None) -> Tensor:
    """x W^T + b in x's own precision, but by `low` if there is one and the product is large."""
    if low is None or not worth_lowering(x, weight):
        return F.linear(x, weight, bias)
    return F.linear(x.to(low[0].dtype), *low).to(x.dtype)


class Linear(nn.Linear):
    """As PyTorch's, with `low` copies of its weights if it was given them."""

    low: Low | None = None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias, self.low)

    def rows(self, x: Tensor, start: int, end: int | None = None) -> Tensor:
        """Some of the output's features alone."""
        part = slice(start, end)
        low = None if self.low is None or self.low[1] is None else (self.low[0][part], self.low[1][part])
        return linear(x, self.weight[part], self.bias[part], low)
