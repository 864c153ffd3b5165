"""Whether DDP and FSDP work with one rank: NCCL is called, though nothing is communicated.

torchrun starts this part.
"""

import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

from gpu.scale import CheckFailed, Scale
from mtrain.config.training import TrainingConfig
from mtrain.data.loader import Step
from mtrain.distributed.launch import read_launch
from mtrain.distributed.many_ranks import ManyRanks, abort_gpu_communication
from mtrain.distributed.store import RankStore
from mtrain.model.transformer import Transformer
from mtrain.training.parallel import ParallelLearner
from mtrain.training.step import Learner

TOLERANCE = 0.01  # nats per token
RATE = 1e-3


def check(scale: Scale) -> None:
    """Compare the losses of a few steps with the losses of a single process. Ends the process.

    Raises CheckFailed if they differ.
    """
    launch = read_launch()
    store = RankStore(launch)
    with store.answering():
        device = torch.device("cuda", launch.local_rank) if scale.on_gpu else scale.device
        group = ManyRanks(device, launch, store)
        group.expect_steps()
        print("backend", dist.get_backend(), "device", device, flush=True)
        worst = max(_differences(Scale(device, scale.tiny), group))
        group.barrier()
        abort_gpu_communication()
    print("communication was aborted without an error")
    if not worst <= TOLERANCE:
        raise CheckFailed(
            f"losses of ranks differ by up to {worst:.5f} nats per token from those of one process"
        )
    sys.stdout.flush()
    os._exit(0)  # as after an error: nothing may wait for the aborted GPU


def _differences(scale: Scale, group: ManyRanks) -> list[float]:
    """Train each kind of learner, and return how much its losses differ from those of a single process."""

    def alone(model: Transformer, recipe: TrainingConfig) -> Learner:
        return Learner(model, recipe)

    def parallel(model: Transformer, recipe: TrainingConfig) -> Learner:
        return ParallelLearner(model, recipe, group)

    def sharded(model: Transformer, recipe: TrainingConfig) -> Learner:
        from mtrain.training.sharded import ShardedLearner  # takes a second

        return ShardedLearner(model, recipe, group)

    config = scale.model_config("micro", dropout=0.0)
    steps = scale.steps(config, 2048, 4)
    expected, differences = None, []
    for name, make in (("alone", alone), ("DDP", parallel), ("FSDP", sharded)):
        losses = _losses(scale.model(config).train(), make, steps)
        expected = expected or losses
        differences.append(max(abs(a - b) for a, b in zip(losses, expected, strict=True)))
        rounded = [round(loss, 4) for loss in losses]
        print(
            f"{name}: losses {rounded}, at most {differences[-1]:.5f} from those of one process", flush=True
        )
    return differences


def _losses(
    model: Transformer, make: Callable[[Transformer, TrainingConfig], Learner], steps: list[Step]
) -> list[float]:
    """The losses of training steps, in nats per token."""
    learner = make(model, TrainingConfig(max_steps=1, compile="off", clip_norm=1.0))
    return [learner.step(s.batches, s.tokens, RATE).values.tolist()[0] / s.tokens for s in steps]
