"""What autocast does to a tensor, also on devices that do not support autocast (such as "meta")."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """A context in which products on the device of x are computed in the type of their arguments."""
    device = x.device.type
    supported = torch.amp.is_autocast_available(device)
    return torch.autocast(device, enabled=False) if supported else nullcontext()


def product_dtype(x: Tensor) -> torch.dtype:
    """The type in which products with x are computed: that of autocast if it is enabled, else that of x."""
    device = x.device.type
    enabled = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if enabled else x.dtype
