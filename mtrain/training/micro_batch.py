"""Choosing `training.micro_batch_tokens` from the memory of the device, before training starts."""

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from mtrain.data.batch import Batch
from mtrain.training.step import Learner

SHARE = 0.5  # of the memory, for activations; the rest is for weights, optimizer and other programs
CPU_TOKENS = 16384  # larger micro-batches are not faster on a CPU; 1,024 and 4,096 differed by a tenth


def available_memory(device: torch.device, root: Path = Path("/")) -> int:
    """Bytes of memory that this process may use on a device.

    On a CPU, this is the machine's memory or the lowest limit of this process: RLIMIT_AS, or that of its
    cgroup or of one above it (versions 1 and 2), as containers have. `root` is where /proc and /sys are.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return min([_machine_memory(), *_cgroup_limits(root), *_address_space_limit()])


def _machine_memory() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # Windows
        return 8 * 2**30


def _address_space_limit() -> list[int]:
    if sys.platform == "win32":
        return []
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return [] if limit == resource.RLIM_INFINITY else [limit]


def _cgroup_limits(root: Path) -> Iterator[int]:
    """The memory limits of the process's cgroups and of all cgroups above them."""
    mount = root / "sys/fs/cgroup"
    groups = [(mount, "memory.max", "/"), (mount / "memory", "memory.limit_in_bytes", "/")]
    with suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                groups.append((mount, "memory.max", path))
            elif "memory" in controllers.split(","):
                groups.append((mount / "memory", "memory.limit_in_bytes", path))
    for folder, name, path in groups:
        group = folder / path.strip("/")
        for place in (group, *group.parents):
            with suppress(OSError, ValueError):  # "max" means no limit
                yield int((place / name).read_text())
            if place == folder:
                break


def activation_bytes(learner: Learner, batch: Batch) -> int:
    """Bytes that a forward pass keeps for the backward pass, not counting the weights."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in learner.model.parameters()}
    kept: dict[int, Tensor] = {}  # by address; keeping the tensors alive makes addresses unique

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with (
        learner.preserve_rng_state(),
        torch.compiler.set_stance("force_eager"),  # do not compile for this shape
        saved_tensors_hooks(note, lambda tensor: tensor),
    ):
        learner.loss(learner.model, batch)
    return sum(tensor.untyped_storage().nbytes() for at, tensor in kept.items() if at not in weights)


def choose_micro_batch_tokens(learner: Learner, longest: int, batch_tokens: int, memory: int) -> int:
    """Padded tokens of a micro-batch: `batch_tokens`, on a CPU at most CPU_TOKENS, halved until the
    activations of all workers fit in `memory` bytes; at least the length of the longest sentence.

    It depends on the recipe, the longest sentence and the machine only, so that a resumed run splits its
    steps as before.
    """

    def batch(rows: int) -> Batch:
        ids = torch.zeros(rows, longest, dtype=torch.int64)
        return Batch(ids, torch.ones_like(ids, dtype=torch.bool), ids, ids, ids.numel(), [0] * rows)

    few, more = (activation_bytes(learner, batch(rows)) for rows in (2, 4))
    each = (more - few) / (2 * longest)  # bytes per token, without those of the whole batch
    workers, once = len(learner.replicas), max(0, few - 2 * longest * each)
    tokens = batch_tokens if learner.device.type == "cuda" else min(batch_tokens, max(longest, CPU_TOKENS))
    while tokens // 2 >= longest and (tokens * each + once) * workers > SHARE * memory:
        tokens //= 2
    return tokens
