"""Whether the kernels of this package run on a device."""

import logging
from collections.abc import Callable, Hashable
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

log = logging.getLogger(__name__)
_warn_once = cache(log.warning)

Outputs = TypeVar("Outputs")
_runs: dict[Hashable, bool] = {}  # whether a kernel runs, by what it is compiled for


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


def attempt(
    kernel: Callable[..., Outputs], device: torch.device, sizes: tuple[Hashable, ...], *inputs: Any
) -> Outputs | None:
    """What a function of this package returns for some inputs. None if its kernel cannot be compiled for the
    device, or needs more of it than there is: the caller then computes the same by operators.

    `sizes` are the types and sizes that the kernel is compiled for. They are tried when they first occur,
    with the backward pass if gradients are needed. While a CUDA graph is captured, nothing is tried, and the
    result for new sizes is None. A reason is logged once.
    """
    key = kernel, device, sizes, torch.is_grad_enabled()
    if _runs.get(key):
        return kernel(*inputs)
    if key in _runs or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return None
    outputs: Outputs | None
    try:
        _try_backward(kernel, inputs)
        outputs = kernel(*inputs)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of Triton or of what it calls: there is no common class
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        _warn_once("slower operators replace %s on %s (%s)", kernel.__name__, device, reason)
        outputs = None
    _runs[key] = outputs is not None
    return outputs


def _try_backward(kernel: Callable[..., Any], inputs: tuple[Any, ...]) -> None:
    """Run a function and its backward pass, if inputs are trained."""
    copies = [x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in inputs]
    trained = [x for x in copies if isinstance(x, Tensor) and x.requires_grad]
    if trained and torch.is_grad_enabled():
        outputs = kernel(*copies)
        first = outputs[0] if isinstance(outputs, tuple) else outputs
        torch.autograd.grad(first, trained, torch.zeros_like(first))
