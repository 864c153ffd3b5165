"""Dropout, from a generator that training can seed for each of its threads."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Dropout(nn.Module):
    """Dropout (Srivastava et al. 2014). On CPUs, where drawing the mask costs more than the layer around it,
    four elements share a 64-bit draw: rates are then exact to 1/65536."""

    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate
        self.generator: torch.Generator | None = None  # of the CPU; None: PyTorch's own

    @staticmethod
    def seed(model: nn.Module, seed: int) -> None:
        """Let every dropout of a model draw from one generator of their own, which starts at `seed`."""
        generator = torch.Generator().manual_seed(seed)
        for module in model.modules():
            if isinstance(module, Dropout):
                module.generator = generator

    @property
    def active(self) -> bool:
        """Whether it drops anything now."""
        return self.training and self.rate > 0

    def forward(self, x: Tensor) -> Tensor:
        if not self.active:
            return x
        if x.device.type != "cpu":
            return F.dropout(x, self.rate)
        draws = torch.empty((x.numel() + 3) // 4, dtype=torch.int64)
        draws.random_(-(2**63), None, generator=self.generator)
        # What is kept grows by 1 / (1 - rate), as x can hold it; the rate follows, so that no bias is left.
        scale = torch.tensor(1 / (1 - self.rate), dtype=x.dtype).item()
        threshold = min(round((0.5 - 1 / scale) * 65536), 32767)
        draws = draws.view(torch.int16)[: x.numel()].view(x.shape)
        keep = torch.ge(draws, threshold, out=x.new_empty(x.shape))  # by way of bool: seven times as long
        return x * keep.mul_(scale)
