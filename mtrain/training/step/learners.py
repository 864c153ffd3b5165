"""The learner of a rank: alone, with DDP, or with FSDP."""

import torch
from torch import nn

from mtrain.config.sections.training import TrainingConfig
from mtrain.distributed.ranks import Ranks
from mtrain.model.build import AnyModel
from mtrain.training.step.ddp import ParallelLearner
from mtrain.training.step.learner import Learner, make_learner

BYTES_OF_COPY = 16  # of each parameter in fp32: weight, gradient, and AdamW's two moments
BYTES_OF_AVERAGE = 4  # of each parameter, with `training.ema_decay`
SHARE_OF_COPY = 0.6  # of a GPU's memory; the rest is for activations and validation


def make_learner_of_rank(model: AnyModel, config: TrainingConfig, ranks: Ranks) -> Learner:
    """The learner of this rank. If there are several ranks, all start with the weights of rank 0."""
    if ranks.size == 1:
        return make_learner(model, config)
    if not shards_weights(model, config, ranks):
        return ParallelLearner(model, config, ranks)
    from mtrain.training.step.fsdp import ShardedLearner  # takes a second to import

    return ShardedLearner(model, config, ranks)


def shards_weights(model: nn.Module, config: TrainingConfig, ranks: Ranks) -> bool:
    """Whether the ranks share the weights: as configured, or if weights, gradients, moments and the moving
    average do not fit in SHARE_OF_COPY of a GPU's memory."""
    if config.parallel != "auto" or ranks.device.type != "cuda":
        return config.parallel == "fsdp"
    memory = torch.cuda.get_device_properties(ranks.device).total_memory
    each = BYTES_OF_COPY + (0 if config.ema_decay is None else BYTES_OF_AVERAGE)
    needed = sum(each * parameter.numel() for parameter in model.parameters())
    return bool(ranks.all_reduce_max(needed > SHARE_OF_COPY * memory)[0])
