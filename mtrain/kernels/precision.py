"""Types of floating-point numbers and products. The meta device does not support autocast: products on it are
computed in the types of their arguments."""

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
from torch import Tensor

from mtrain.kernels.undocumented import undocumented

WITHOUT_FP64 = {"mps", "xpu"}  # kinds of devices; some XPU devices have it


def widest_float(device: torch.device) -> torch.dtype:
    """fp64, or fp32 on devices that may not have it."""
    return torch.float32 if device.type in WITHOUT_FP64 else torch.float64


def cpu_has_bf16() -> bool:
    """Whether the CPU has instructions for matrix products in bf16. False if PyTorch cannot tell."""
    return cpu_has_amx() or _cpu_has("avx512_bf16", "cpu._is_avx512_bf16_supported")


def cpu_has_amx() -> bool:
    """Whether the CPU has Intel's AMX instructions. False if PyTorch cannot tell."""
    return _cpu_has("amx_tile", "cpu._is_amx_tile_supported")


def _cpu_has(capability: str, query: str) -> bool:
    """Whether the CPU has a capability. Newer versions of PyTorch list them; older ones have a `query`."""
    if hasattr(torch.cpu, "get_capabilities"):
        return bool(torch.cpu.get_capabilities().get(capability))
    function = undocumented(query)
    return function is not None and bool(function())


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """A context in which products on the device of x are computed in the type of their arguments."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def product_dtype(x: Tensor) -> torch.dtype:
    """The type in which products with x are computed: the type of autocast if enabled, else the type of x."""
    device = x.device.type
    enabled = not x.is_meta and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if enabled else x.dtype


def product_fp32(a: Tensor, b: Tensor) -> Tensor:
    """The product of two matrices of the same type. If that is lower than fp32, the product is in fp32, and
    is not rounded in between."""
    if a.dtype.itemsize >= torch.float32.itemsize:
        return a @ b
    if _can_return_fp32(a.device, a.dtype):
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


@cache
def _can_return_fp32(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products of matrices of this type can be returned in fp32; not on every device."""
    try:
        ones = torch.ones(16, 16, dtype=dtype, device=device)
        torch.mm(ones, ones, out_dtype=torch.float32)
    except RuntimeError:
        return False
    return True
