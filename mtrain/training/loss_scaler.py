"""Dynamic loss scaling, with which gradients in fp16 do not vanish."""

import torch
from torch import Tensor


class LossScaler:
    """Dynamic loss scaling for fp16 (Micikevicius et al., "Mixed Precision Training", 2018, section 3.2).

    The scale is halved when a gradient overflows and doubled after `GROWTH_INTERVAL` finite steps. In other
    precisions it is 1. `torch.amp.GradScaler` skips a step only for non-finite gradients and only if enabled,
    whereas here a non-finite loss or gradient norm skips the step in every precision.
    """

    GROWTH_INTERVAL = 2000

    def __init__(self, device: torch.device, enabled: bool):
        self.enabled = enabled
        self.scale = torch.tensor(65536.0 if enabled else 1.0, device=device)
        self.finite_steps = torch.zeros((), device=device)  # finite steps since the scale changed

    def state(self) -> list[float]:
        """The state to save in a checkpoint; empty if disabled. Synchronizes with the device."""
        return [float(self.scale), float(self.finite_steps)] if self.enabled else []

    def restore(self, state: list[float]) -> None:
        """Restore a state that `state` returned."""
        if self.enabled and state:
            self.scale, self.finite_steps = (self.scale.new_tensor(value) for value in state)

    def update(self, found_inf: Tensor) -> None:
        """Update the scale after a step; `found_inf` is 1 if its loss or gradient was not finite, else 0."""
        if self.enabled:
            self.finite_steps = (self.finite_steps + 1) * (1 - found_inf)
            grow = (self.finite_steps >= self.GROWTH_INTERVAL).float()
            self.scale = (self.scale * (1 - found_inf / 2) * (1 + grow)).clamp(min=1.0)
            self.finite_steps = self.finite_steps * (1 - grow)
