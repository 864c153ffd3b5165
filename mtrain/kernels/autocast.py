"""What autocast does to a tensor, also on the meta device, which does not support autocast. (Asking PyTorch
whether a device supports it would break the graph of `torch.compile`.)"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """A context in which products on the device of x are computed in the type of their arguments."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def product_dtype(x: Tensor) -> torch.dtype:
    """The type in which products with x are computed: the type of autocast if enabled, else the type of x."""
    device = x.device.type
    enabled = not x.is_meta and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if enabled else x.dtype
