"""How many tokens a device takes in a pass, found before training starts rather than hours after."""

import os
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from mtrain.data.batch import Batch
from mtrain.training.step import Learner

SHARE = 0.5  # of the memory, for what passes keep; the rest is for weights, optimizer, and other programs
CPU_TOKENS = 16384  # keep a CPU busy; passes of 1,024 and 4,096 were timed, and differ by a tenth


def memory_of(device: torch.device) -> int:
    """Bytes of memory that a device has in all; of a CPU, as many as its container may use."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for limit in ("memory.max", "memory/memory.limit_in_bytes"):  # of cgroups, version 2 and 1
        with suppress(OSError, ValueError):  # "max" is no limit
            sizes.append(int(Path("/sys/fs/cgroup", limit).read_text()))
    return min(sizes)


def kept_bytes(learner: Learner, batch: Batch) -> int:
    """Bytes that a forward pass keeps for its backward pass, besides the weights."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in learner.model.parameters()}
    kept: dict[int, Tensor] = {}  # by address; the tensors live on, so that no address comes twice

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with (
        learner.generators_restored(),
        torch.compiler.set_stance("force_eager"),  # not compiled for a batch of sizes that never come again
        saved_tensors_hooks(note, lambda tensor: tensor),
    ):
        learner.loss(learner.model, batch)
    return sum(tensor.untyped_storage().nbytes() for at, tensor in kept.items() if at not in weights)


def fit_micro_batch(learner: Learner, longest: int, batch_tokens: int, memory: int) -> int:
    """Padded tokens of a pass: `batch_tokens`, on a CPU no more than keep it busy, halved until what all
    workers keep fits `memory` bytes; but as many as the longest sentence (tokens) has.

    It depends on the recipe, the longest sentence and the machine alone, so that a run that is resumed cuts
    its steps as before.
    """

    def batch(rows: int) -> Batch:
        ids = torch.zeros(rows, longest, dtype=torch.int64)
        return Batch(ids, torch.ones_like(ids, dtype=torch.bool), ids, ids, ids.numel(), [0] * rows)

    few, more = (kept_bytes(learner, batch(rows)) for rows in (2, 4))
    each = (more - few) / (2 * longest)  # bytes a token; the rest is there once
    workers, once = len(learner.replicas), max(0, few - 2 * longest * each)
    tokens = batch_tokens if learner.device.type == "cuda" else min(batch_tokens, max(longest, CPU_TOKENS))
    while tokens // 2 >= longest and (tokens * each + once) * workers > SHARE * memory:
        tokens //= 2
    return tokens
