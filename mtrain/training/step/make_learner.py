"""Which learner suits a model, a device and a number of ranks."""

import torch

from mtrain.config.sections.training import TrainingConfig
from mtrain.device import default_worker_count
from mtrain.distributed.ranks import Ranks
from mtrain.model.build import AnyModel
from mtrain.training.step.ddp import ParallelLearner
from mtrain.training.step.graph_learner import GraphLearner
from mtrain.training.step.learner import Learner

BYTES_OF_COPY = 16  # of each parameter in fp32: weight, gradient, and AdamW's two moments
BYTES_OF_AVERAGE = 4  # of each parameter, with `training.ema_decay`
SHARE_OF_COPY = 0.6  # of a GPU's memory; the rest is for activations and validation


def make_learner(model: AnyModel, training: TrainingConfig, ranks: Ranks | None = None) -> Learner:
    """The learner of one rank, which starts with the weights of rank 0. By default, there is one rank.

    Several ranks share the weights (FSDP) if the config says so, or if these do not fit on each GPU.
    Otherwise, a CUDA device uses graphs, unless the config rules them out. Without graphs, several ranks use
    DDP, and a single one has as many workers as suit the device.
    """
    device = next(model.parameters()).device
    ranks = ranks or Ranks(device)
    if ranks.size > 1 and _shards_weights(model, training, ranks):
        from mtrain.training.step.fsdp import ShardedLearner  # takes a second to import

        return ShardedLearner(model, training, ranks)
    if device.type == "cuda" and training.cuda_graphs == "auto":
        return GraphLearner(model, training, ranks)
    if ranks.size > 1:
        return ParallelLearner(model, training, ranks)
    return Learner(model, training, default_worker_count(device))


def _shards_weights(model: AnyModel, config: TrainingConfig, ranks: Ranks) -> bool:
    """Whether the ranks share the weights: as configured, or if weights, gradients, moments and the moving
    average do not fit in SHARE_OF_COPY of a GPU's memory."""
    if config.parallel != "auto" or ranks.device.type != "cuda":
        return config.parallel == "fsdp"
    memory = torch.cuda.get_device_properties(ranks.device).total_memory
    each = BYTES_OF_COPY + (0 if config.ema_decay is None else BYTES_OF_AVERAGE)
    needed = sum(each * parameter.numel() for parameter in model.parameters())
    return bool(ranks.all_reduce_max(needed > SHARE_OF_COPY * memory)[0])
