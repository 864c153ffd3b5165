"""Running the kernels of this package where they work."""

import logging
from collections.abc import Hashable
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mtrain.errors import is_out_of_memory

log = logging.getLogger(__name__)
_warn_once = cache(log.warning)


class Variant(NamedTuple):
    """What a kernel is compiled for."""

    name: str
    device: torch.device
    sizes: tuple[Hashable, ...]
    trained: tuple[bool, ...]  # for each input, whether it needs a gradient; () if none does


outcomes: dict[Variant, bool] = {}  # whether a kernel runs


def suits_kernels(x: Tensor) -> bool:
    """Whether there may be kernels for a tensor: on CUDA devices, except in fp64."""
    return x.is_cuda and x.dtype != torch.float64


def attempt(name: str, sizes: tuple[Hashable, ...], *inputs: Any, in_backward: bool = False) -> Any:
    """What a function of this package, "module.function", returns for some inputs, the first of which is a
    tensor. None where no kernel suits it, or where the kernel cannot be compiled, or needs more of the device
    than there is: the caller then computes the same by operators.

    `sizes` are the types and sizes that the kernel is compiled for. They are tried when they first occur,
    with the backward pass if gradients are needed; a call `in_backward` is itself a part of one. While a CUDA
    graph is captured, nothing is tried, and the result for new sizes is None. A reason is logged once.
    Exhausted memory is an error, and no such reason.
    """
    if not suits_kernels(inputs[0]):
        return None
    variant = Variant(name, inputs[0].device, sizes, (True,) if in_backward else _trained(inputs))
    runs = outcomes.get(variant)
    # Triton uses the current device and its stream, whatever the device of its arguments is.
    with torch.cuda.device_of(inputs[0]):  # type: ignore[no-untyped-call]
        if runs is False or (runs is None and is_capturing(variant.device)):
            return None
        try:
            tries_backward = runs is None and bool(variant.trained) and not in_backward
            outputs = _run(name, inputs, with_backward=tries_backward)
        except Exception as error:  # of Triton or of what it calls: there is no common class
            if runs or is_out_of_memory(error):
                raise
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            _warn_once("slower operators replace Triton kernels on %s (%s)", variant.device, reason)
            outcomes[variant] = False
            return None
    outcomes[variant] = True
    return outputs


def replaced_in_training() -> list[str]:
    """The names of the kernels that operators replace in a training step, as far as they were tried."""
    return sorted({variant.name for variant, runs in outcomes.items() if not runs and variant.trained})


def _trained(inputs: tuple[Any, ...]) -> tuple[bool, ...]:
    if not torch.is_grad_enabled():
        return ()
    trained = tuple(isinstance(x, Tensor) and x.requires_grad for x in inputs)
    return trained if any(trained) else ()


def is_capturing(device: torch.device) -> bool:
    """Whether this thread is capturing a CUDA graph on its current stream."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _run(name: str, inputs: tuple[Any, ...], with_backward: bool) -> Any:
    """Call the function, if `with_backward` once more for its backward pass."""
    module, function = name.split(".")
    kernel = getattr(import_module(f"mtrain.kernels.triton.{module}"), function)
    if with_backward:
        copies = [x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in inputs]
        trained = [x for x in copies if isinstance(x, Tensor) and x.requires_grad]
        outputs = kernel(*copies)
        first = outputs[0] if isinstance(outputs, tuple) else outputs
        torch.autograd.grad(first, trained, torch.zeros_like(first))
    return kernel(*inputs)
