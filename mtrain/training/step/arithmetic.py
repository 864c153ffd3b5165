"""What determines the exact results of a step: a resumed run is bit-identical only if it has not changed."""

import logging
import math
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

import torch

from mtrain.checkpoint.state import TrainState
from mtrain.device import describe_device
from mtrain.distributed.ranks import Ranks
from mtrain.kernels.mixed_linear import pads_rows
from mtrain.kernels.precision import cpu_has_bf16
from mtrain.kernels.reproducible import can_reproduce
from mtrain.kernels.triton.available import replaced_in_training
from mtrain.training.step.learner import Learner

log = logging.getLogger(__name__)


def describe_arithmetic(learner: Learner, ranks: Ranks, micro_batch_tokens: int | None) -> str:
    """Describe everything that determines the exact results of a step and is not in a checkpoint. Which
    kernels a GPU does not run is known after `Learner.dry_run`."""
    # Sums are rounded differently with other instructions of the CPU, and another GPU or number of threads.
    machine = f"{describe_device(learner.device)}, {learner.precision}, torch {torch.__version__}"
    workers = len(learner.replicas)
    machine += f", {workers} worker{'s' if workers > 1 else ''}"
    if learner.precision == "bf16" and pads_rows(learner.device, torch.bfloat16):
        machine += ", products with surplus rows"
    if learner.precision == "bf16" and learner.device.type == "cpu" and not cpu_has_bf16():
        machine += ", bf16 emulated"
    if learner.device.type == "cuda":
        machine = ", ".join([machine, *_describe_cuda(learner.device)])
    machine += "".join(f", without {kernel}" for kernel in replaced_in_training())
    if ranks.size > 1:
        machine += f", {ranks.size} ranks"
    if learner.describe_shapes():
        machine += ", fixed shapes"
    if learner.shares_weights:
        machine += " that share the weights"
    limit = learner.max_micro_batch_positions
    reduced = "" if limit == math.inf else f", reduced to {limit:g} positions"
    return f"{machine}, micro-batches of {micro_batch_tokens} tokens{reduced}"


def _describe_cuda(device: torch.device) -> Iterator[str]:
    """What chooses the kernels of a GPU, besides PyTorch."""
    yield "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    if torch.version.cuda is not None:  # None: AMD
        yield f"CUDA {torch.version.cuda}"
    with suppress(PackageNotFoundError):
        yield f"Triton {version('triton')}"
    yield "version 2 of dropout masks"


def log_changes(state: TrainState, arithmetic: str, learner: Learner, ranks: Ranks) -> None:
    """Log a message if a run that resumes from a state will not be bit-identical to an uninterrupted one."""
    if not ranks.is_first:
        return
    on_gpu = learner.device.type != "cpu"
    if state.arithmetic != arithmetic:
        log.warning("resuming, but not bit-identically: %s; before: %s", arithmetic, state.arithmetic)
    elif on_gpu and not can_reproduce(learner.device):
        log.info("resuming, but not bit-identically: the order of GPU operations varies")
    elif on_gpu and ranks.size > 1:  # equal in practice, with the same connections; NCCL does not promise it
        log.info("resuming, but not bit-identically: the order in which NCCL adds up gradients may vary")
