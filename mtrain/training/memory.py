"""How many tokens a device takes in a pass, found before training starts rather than hours after."""

import os

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from mtrain.data.batch import Batch
from mtrain.training.step import Learner

SHARE = 0.5  # of the memory, for what passes keep; the rest is for weights, optimizer, and other programs


def memory_of(device: torch.device) -> int:
    """Bytes of memory that a device has in all."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def kept_bytes(learner: Learner, batch: Batch) -> int:
    """Bytes that a forward pass keeps for its backward pass."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in learner.model.parameters()}
    kept: dict[int, Tensor] = {}  # by address; the tensors live on, so that no address comes twice

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.random.fork_rng(), saved_tensors_hooks(note, lambda tensor: tensor):
        learner.loss(learner.model, batch)
    return sum(tensor.untyped_storage().nbytes() for at, tensor in kept.items() if at not in weights)


def fit_pass(learner: Learner, longest: int, most: int, memory: int) -> int:
    """Padded tokens of a pass: `most`, or so many times half of it that what all workers keep fits `memory`.

    It depends on the model, the longest sentence (tokens) and the machine alone, so that a run that is
    resumed cuts its steps as before. A pass holds at least one sentence.
    """
    ids = torch.zeros(1, longest, dtype=torch.int64)
    batch = Batch(ids, torch.ones_like(ids, dtype=torch.bool), ids, ids, longest, [0])
    each = kept_bytes(learner, batch) / longest * len(learner.replicas)
    while most // 2 >= longest and most * each > SHARE * memory:
        most //= 2
    return most
