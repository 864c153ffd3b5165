"""Sums in a fixed order on CUDA devices, so that equal steps have equal results, bit for bit.

Kernels that add to memory atomically add in an order that varies: in the backward pass of fused attention, of
`gather` and of `index_select`. Others work in an order that depends on the workspaces of cuBLAS. PyTorch's
deterministic mode avoids all of these; see `torch.use_deterministic_algorithms` for what it changes. The
gradients of embeddings, norms and sums have a fixed order without it.
"""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch


def fix_workspaces() -> None:
    """Let cuBLAS have workspaces of a fixed size, in the whole process, unless the environment configures
    them. Call this before the first matrix product on a CUDA device: `reproducible` requires it.

    The size is what PyTorch uses on Hopper, 32 MiB, and more than on other GPUs.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def reproducible(device: torch.device) -> AbstractContextManager[None]:
    """A context manager in which the results of operations on a device do not vary, if `can_reproduce`.

    On CUDA devices, it applies to the whole process. An operation that cannot do without atomic additions
    raises RuntimeError; training has none.
    """
    return _deterministic_mode() if device.type == "cuda" and can_reproduce(device) else nullcontext()


@cache
def can_reproduce(device: torch.device) -> bool:
    """Whether `reproducible` makes results equal: on a CPU without it, and on NVIDIA's GPUs if cuBLAS has
    workspaces of a fixed size, and had them at its first product."""
    if device.type != "cuda" or torch.version.hip is not None:  # others were never tried
        return device.type == "cpu"
    x = torch.ones(8, 8, device=device)
    try:
        with _deterministic_mode():
            x @ x  # some versions of PyTorch refuse it if the workspaces are not fixed
    except RuntimeError:
        return False
    return True


@contextmanager
def _deterministic_mode() -> Iterator[None]:
    mode = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    fills = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False  # it would only find errors, and cost time
    try:
        yield
    finally:
        memory.fill_uninitialized_memory = fills
        torch.use_deterministic_algorithms(mode, warn_only=warns)
