"""Copies of tensors in host memory, so that a checkpoint is written while training changes the tensors."""

from typing import Any

import torch
from torch import Tensor

from mtrain.checkpoint.checkpoint import CheckpointTensors


class HostCopy:
    """A copy of the tensors of a checkpoint in host memory, which each new copy overwrites."""

    def __init__(self) -> None:
        self._memory: dict[tuple[int, str], Tensor] = {}  # by part of the checkpoint and name
        self._copied: Any = None  # event of a GPU

    def take(self, tensors: CheckpointTensors) -> CheckpointTensors:
        """The copy, which is complete after `wait`. The host need not wait for it before it goes on training:
        a GPU copies after the work that is queued, and before the work that follows.

        Raises RuntimeError or MemoryError if memory runs out.
        """
        copies = (
            {name: self._copy((part, name), tensor) for name, tensor in group.items()}
            for part, group in enumerate(tensors)
        )
        complete = CheckpointTensors(*copies)
        if any(tensor.is_cuda for tensor in tensors.weights.values()):
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()
        return complete

    def wait(self) -> None:
        """Wait until the copy is complete."""
        if self._copied is not None:
            self._copied.synchronize()

    def _copy(self, key: tuple[int, str], tensor: Tensor) -> Tensor:
        found = self._memory.get(key)
        if found is None or found.shape != tensor.shape:
            # A GPU copies to pinned memory by itself; for other memory, the host waits.
            found = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._memory[key] = found
        return found.copy_(tensor.detach(), non_blocking=True)
