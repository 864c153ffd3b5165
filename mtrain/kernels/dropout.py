"""Dropout with masks that are cheap to draw on a CPU."""

import torch
import torch.nn.functional as F
from torch import Tensor


def dropout(x: Tensor, rate: float, generator: torch.Generator | None = None) -> Tensor:
    """Dropout (Srivastava et al. 2014): zero each element with probability `rate`, scale the others.

    On a CPU the mask is drawn from `generator` (None: PyTorch's default one). Drawing one number per element
    takes longer than the layer around it, so four elements share a 64-bit draw, and the rate is exact to
    1/65536. On other devices this is `torch.nn.functional.dropout`, which ignores `generator`.
    """
    if x.device.type != "cpu":
        return F.dropout(x, rate)
    draws = torch.empty((x.numel() + 3) // 4, dtype=torch.int64)
    draws.random_(-(2**63), None, generator=generator)
    # The scale is rounded to the type of x. The rate is then derived from it, so that the mean is unbiased.
    scale = torch.tensor(1 / (1 - rate), dtype=x.dtype).item()
    threshold = min(round((0.5 - 1 / scale) * 65536), 32767)
    draws = draws.view(torch.int16)[: x.numel()].view(x.shape)
    keep = torch.ge(draws, threshold, out=x.new_empty(x.shape))  # a bool mask would take seven times as long
    return x * keep.mul_(scale)
