"""Chooses `training.micro_batch_tokens` by the memory of the device, before training starts.

A rank that must end because memory ran out leaves a limit in the run folder: rank 0 may have ended before it
could save the limit, and a checkpoint may be older.
"""

import json
import logging
import math
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from mtrain.checkpoint.state import TrainState
from mtrain.config.schema import Config
from mtrain.data.epochs.packed_batch import AnyBatch, batch_type
from mtrain.data.epochs.windows import WindowedCorpus
from mtrain.device import describe_device, preserved_random_states
from mtrain.distributed.ranks import Ranks
from mtrain.distributed.shards import own_part
from mtrain.errors import StorageError
from mtrain.processes.cores import control_groups
from mtrain.storage.atomic import write_atomically
from mtrain.storage.manifest import read_json
from mtrain.training.step.learner import Learner

log = logging.getLogger(__name__)

LIMIT = "memory-limit.json"  # in the run folder
ACTIVATION_SHARE = 0.5  # of the memory; the rest is for weights, optimizer and, on a CPU, other programs
MAX_CPU_TOKENS = 16384  # larger micro-batches are not faster on a CPU; 1,024 and 4,096 differed by 10%


def available_memory(device: torch.device, root: Path = Path("/")) -> int:
    """Bytes of memory that this process may use on a device: on a CUDA device, all that other programs leave
    free.

    On a CPU, this is the smallest of the machine's memory, RLIMIT_AS, and the limits of the process's cgroups
    and their parents (versions 1 and 2), which containers set. `root` contains /proc and /sys.
    """
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    if device.type != "cpu":
        return int(torch.get_device_module(device).get_device_properties(device).total_memory)
    return min([*_machine_limits(), *_cgroup_limits(root)])


def _machine_limits() -> Iterator[int]:
    """Yield the memory of the machine, and RLIMIT_AS if it is set."""
    try:
        yield os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # Windows
        yield 8 * 2**30
    if sys.platform != "win32":
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit != resource.RLIM_INFINITY:
            yield limit


def _cgroup_limits(root: Path) -> Iterator[int]:
    """Yield the memory limits of the process's cgroups and of all their parents."""
    folders = [root / "sys/fs/cgroup", root / "sys/fs/cgroup/memory"]
    with suppress(OSError, ValueError):
        folders += control_groups(root, "memory")
    for folder in folders:
        for name in ("memory.max", "memory.limit_in_bytes"):
            with suppress(OSError, ValueError):  # "max" means no limit
                yield int((folder / name).read_text())


def activation_bytes(learner: Learner, batch: AnyBatch) -> int:
    """Bytes of the activations that a forward pass saves for the backward pass."""
    weights = {own_part(p).untyped_storage().data_ptr() for p in learner.model.parameters()}
    saved: dict[int, Tensor] = {}  # by address, which is unique as long as the tensors are alive

    def save(tensor: Tensor) -> Tensor:
        kept = tensor.detach()  # else, an operation that saves its result would refer to itself for ever
        saved[tensor.untyped_storage().data_ptr()] = kept
        return kept

    with preserved_random_states(learner.device), saved_tensors_hooks(save, lambda tensor: tensor):
        sums = learner.loss(learner.model, batch)
    activations = [tensor for address, tensor in saved.items() if address not in weights]
    size = sum(tensor.untyped_storage().nbytes() for tensor in activations)
    learner.discard(sums)
    return size


def choose_micro_batch_tokens(learner: Learner, longest: int, batch_tokens: int, memory: int) -> int:
    """Choose the number of padded tokens of a micro-batch: `batch_tokens` (on a CPU, at most MAX_CPU_TOKENS),
    halved until the activations of all workers fit in half of `memory` bytes, but no less than `longest`.

    `longest` is the length of the longest sentence. On a CPU, the number depends only on the recipe, the
    longest sentence and the machine, so that a resumed run has the same micro-batches; for CUDA devices, see
    `agree_on_micro_batches`.
    """
    of_size = batch_type(learner.device).of_size
    if learner.device.type == "cuda":
        activation_bytes(learner, of_size(2, longest))  # tries the kernels, which would count
    small, large = (activation_bytes(learner, of_size(pairs, longest)) for pairs in (2, 4))
    workers, on_cpu = len(learner.replicas), learner.device.type == "cpu"
    return fit_micro_batch_tokens(small, large, longest, batch_tokens, memory, workers, on_cpu)


def fit_micro_batch_tokens(
    small: int, large: int, longest: int, batch_tokens: int, memory: float, workers: int, on_cpu: bool
) -> int:
    """Like `choose_micro_batch_tokens`, given the bytes of the activations of a `small` batch of two, and of
    a `large` one of four pairs of the longest sentences."""
    per_token = (large - small) / (2 * longest)
    per_batch = max(0, small - 2 * longest * per_token)
    tokens = min(batch_tokens, max(longest, MAX_CPU_TOKENS)) if on_cpu else batch_tokens
    while tokens // 2 >= longest and (tokens * per_token + per_batch) * workers > ACTIVATION_SHARE * memory:
        tokens //= 2
    return tokens


def micro_batch_tokens(config: Config, train: WindowedCorpus, learner: Learner, sharing: int) -> int:
    """Padded tokens of a micro-batch: as configured, or as many as fit in memory. The memory of a CPU is
    shared by `sharing` processes."""
    training = config.training
    if training.micro_batch_tokens != "auto":
        return training.micro_batch_limit
    longest = _longest(config, train)
    memory = available_memory(learner.device)
    if learner.device.type == "cpu":
        memory //= sharing
    return choose_micro_batch_tokens(learner, longest, training.micro_batch_limit, memory)


def _longest(config: Config, train: WindowedCorpus) -> int:
    """The tokens of the longest sequence, which each micro-batch must have room for."""
    if not train.has_fixed_lengths:
        return config.longest_sequence  # other windows and other epochs may have pairs as long
    lengths = train.encoded().source_lengths, train.encoded().target_lengths
    return max(int(side.max()) for side in lengths)


def write_limit(run_dir: Path, micro_batch_tokens: int | None, positions: float) -> None:
    """Record a limit for the micro-batches of later starts with the same `micro_batch_tokens`, in padded
    tokens of both sides."""
    try:
        values = {"micro_batch_tokens": micro_batch_tokens, "max_micro_batch_positions": positions}
        write_atomically(run_dir / LIMIT, json.dumps(values) + "\n")
    except StorageError as error:
        log.warning("%s; the next start does not know that memory ran out", error)


def read_limit(run_dir: Path, micro_batch_tokens: int) -> float:
    """The limit for micro-batches of some tokens; infinite if memory has sufficed."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        values = read_json(run_dir / LIMIT)
        if values["micro_batch_tokens"] == micro_batch_tokens:
            return float(values["max_micro_batch_positions"])
    return math.inf


def agree_on_micro_batches(
    config: Config, train: WindowedCorpus, learner: Learner, state: TrainState, ranks: Ranks
) -> int:
    """The padded tokens of a micro-batch, which all ranks use: the smallest of their numbers. Restores the
    limit that memory has required, from the state or from the file.

    With `auto`, a run that resumes on the same kind of GPU keeps the size of its micro-batches if it still
    fits, so that results stay the same.
    """
    own = micro_batch_tokens(config, train, learner, ranks.local_size)
    if config.training.micro_batch_tokens == "auto" and learner.device.type == "cuda":
        same_gpu = state.arithmetic.startswith(f"{describe_device(learner.device)},")
        if same_gpu and state.micro_batch_tokens:
            own = min(own, max(state.micro_batch_tokens, _longest(config, train)))
    tokens = -int(ranks.all_reduce_max(-own)[0])
    known = state.max_micro_batch_positions if state.micro_batch_tokens == tokens else None
    written = ranks.broadcast(read_limit(Path(config.run_dir), tokens))
    learner.max_micro_batch_positions = min(math.inf if known is None else known, written)
    return tokens
