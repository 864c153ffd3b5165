"""Whether the kernels of this package run on a device."""

import logging
from functools import cache

import torch

log = logging.getLogger(__name__)


@cache
def triton_works(device: torch.device) -> bool:
    """Whether Triton can compile kernels for a device and run them there. If it cannot do so for a CUDA
    device, the reason is logged once. The first call for a device waits for it."""
    if device.type != "cuda":
        return False
    try:
        from mtrain.kernels.triton.dropout import hashed_dropout

        zero = torch.zeros(1, dtype=torch.int32, device=device)
        ones = hashed_dropout(torch.ones(1, device=device), 0.0, zero, zero)
        if ones.item() != 1:
            raise RuntimeError(f"a kernel returned {ones.item()} instead of 1")
    except Exception as error:  # a missing package, C compiler or driver, or an unsupported GPU
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        log.warning("Triton does not work on %s, so slower operators are used (%s)", device, reason)
        return False
    return True
