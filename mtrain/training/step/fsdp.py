"""Data-parallel training in which each rank has a part of the weights, gradients and moments (FSDP; Zhao et
al., "PyTorch FSDP", 2023; ZeRO stage 3 of Rajbhandari et al. 2020).

The weights of a layer are gathered before its forward and its backward pass and freed afterwards. Each pass
therefore communicates, and all ranks make the same number of passes.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from mtrain.config.sections.training import TrainingConfig
from mtrain.data.epochs.packed_batch import AnyBatch, batch_type, split_batches
from mtrain.device import resolve_precision
from mtrain.distributed.ranks import Ranks
from mtrain.kernels.cross_entropy import LossSums
from mtrain.model.build import AnyModel
from mtrain.model.transformer import DecoderLayer, EncoderLayer
from mtrain.training.step.learner import BatchLoss, Learner, SynchronizationMemoryError


class ShardedLearner(Learner):
    """The learner of one of several ranks, which share the weights of `model` from now on: its parameters are
    `DTensor`s. All ranks start with the weights of rank 0. For `step`, see `ParallelLearner`."""

    shares_weights = True

    def __init__(self, model: AnyModel, training: TrainingConfig, ranks: Ranks):
        self.ranks = ranks
        with ranks.watched():
            for parameter in model.parameters():
                dist.broadcast(parameter.detach(), src=0)
            self._root = _divide(model, BatchLoss(model, super().loss), training, ranks)
        super().__init__(model, training)

    def loss(self, model: AnyModel, batch: AnyBatch) -> LossSums:
        """The loss of a batch. Its backward pass adds up the gradients over the ranks."""
        return self._root(batch)  # type: ignore[no-any-return, operator]

    def _accumulate_alone(self, batches: list[AnyBatch], tokens: int) -> Tensor:
        """See `Learner`, but no rank can do it alone, not even in a dry run: each micro-batch adds up its
        gradients, so that no rank keeps all of them.

        Raises SynchronizationMemoryError if memory runs out, because the other ranks wait for this one.
        """
        batches = split_batches(batches, self.max_micro_batch_positions)
        count = int(self.ranks.all_reduce_max(len(batches))[0])
        batches += [batch_type(self.device).without_pairs()] * (count - len(batches))
        try:
            with self.ranks.watched():
                sums = self._forward_backward(self.model, batches, tokens)
        except (RuntimeError, MemoryError) as error:
            self._reduce_micro_batches(error, batches)
            raise SynchronizationMemoryError from error
        self.ranks.start_all_reduce(sums)()
        return sums

    def discard(self, sums: LossSums) -> None:
        """Run the backward pass, after which the weights are divided again."""
        self._backward(sums, 1)
        self._release_memory()


def _divide(model: AnyModel, root: nn.Module, training: TrainingConfig, ranks: Ranks) -> FSDPModule:
    """Divide the parameters of a model among the ranks, and let `root` gather them.

    As with autocast, matrices are gathered in the precision of their products; everything else, and the sum
    of gradients, stay in the precision of the weights.
    """
    precision = resolve_precision(ranks.device, training.precision)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    of_weights = next(model.parameters()).dtype
    exact = MixedPrecisionPolicy(cast_forward_inputs=False)
    low = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=of_weights, cast_forward_inputs=False)
    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    layers = [m for m in model.modules() if isinstance(m, (EncoderLayer, DecoderLayer))]
    norms: list[nn.Module] = [m for layer in layers for m in layer.modules() if isinstance(m, nn.LayerNorm)]
    fully_shard(norms, mesh=mesh, mp_policy=exact)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=low)
    divided = fully_shard(root, mesh=mesh, mp_policy=exact)
    for module in root.modules():
        if isinstance(module, FSDPModule):  # the loss already divides by the number of tokens
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return divided
