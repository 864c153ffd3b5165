"""Copies of tensors in host memory, so that a checkpoint is written while training changes the tensors."""

from collections.abc import Callable

import torch
from torch import Tensor

from mtrain.checkpoint.checkpoint import CheckpointTensors
from mtrain.device import queued_work


class HostCopy:
    """A copy of the tensors of a checkpoint in host memory, which each new copy overwrites."""

    def __init__(self) -> None:
        self._memory: dict[tuple[int, str], Tensor] = {}  # by part of the checkpoint and name
        self.wait: Callable[[], None] = lambda: None  # until the copy is complete

    def take(self, tensors: CheckpointTensors) -> CheckpointTensors:
        """The copy, which is complete after `wait`. Training can continue at once: a GPU copies after the
        work that is already queued, and before any later work.

        Raises RuntimeError or MemoryError if memory runs out.
        """
        copies = [
            {name: self._copy((part, name), tensor) for name, tensor in group.items()}
            for part, group in enumerate(tensors)
        ]
        self.wait = queued_work(next(iter(tensors.weights.values())).device)
        return CheckpointTensors(*copies)

    def _copy(self, key: tuple[int, str], tensor: Tensor) -> Tensor:
        found = self._memory.get(key)
        if found is None or found.shape != tensor.shape:
            # A GPU copies to pinned memory by itself; for other memory, the host waits.
            found = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._memory[key] = found
        return found.copy_(tensor.detach(), non_blocking=True)
