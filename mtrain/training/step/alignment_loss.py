"""The loss that trains one attention head for word alignments."""

import torch.nn.functional as F
from torch import Tensor

from mtrain.kernels.cross_entropy import IGNORE
from mtrain.kernels.sequences import Sequences

_WEIGHT = 0.1
_SMALLEST = 1e-9  # weights below this get no gradient; otherwise, it could overflow


def alignment_loss(weights: Tensor, labels: Tensor, targets: Sequences, passes: int = 1) -> Tensor:
    """The Kullback-Leibler divergence of the mean of all heads from the first head's attention, in nats,
    summed over labels and multiplied by its weight in the loss.

    Garg et al., "Jointly Learning to Align and Translate with Transformer Models" (EMNLP 2019), section 4.2,
    also train one head to match the mean of all heads. The mean counts as a constant.

    `weights` (N, H, T, S), in fp32 or fp64, are those of cross-attention, with padding, and `targets` are the
    sequences of the queries. Both cover one or more forward `passes` over the same P labels, one pass after
    another; the result is the mean over passes.
    """
    first, mean = weights[:, 0], weights.detach().mean(dim=1)
    divergence = F.kl_div(first.clamp(min=_SMALLEST).log(), mean, reduction="none").sum(dim=-1)  # (N, T)
    counted = (labels.flatten() != IGNORE).to(divergence.dtype).repeat(passes)
    return _WEIGHT / passes * (divergence * targets.pad(counted[:, None]).squeeze(-1)).sum()
