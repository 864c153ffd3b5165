"""The most precise floating-point numbers of a device."""

import torch

WITHOUT_FP64 = {"mps", "xpu"}  # kinds of devices; some XPU devices have it


def widest_float(device: torch.device) -> torch.dtype:
    """fp64, or fp32 on devices that may not have it."""
    return torch.float32 if device.type in WITHOUT_FP64 else torch.float64
