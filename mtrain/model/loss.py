"""The training loss. Symbols in shapes: see `mtrain.model`."""

from typing import NamedTuple

import torch
from torch import Tensor

from mtrain.kernels.cross_entropy import projected_cross_entropy


class LossSums(NamedTuple):
    """Sums over tokens, so that any split into batches, micro-batches or devices adds up to the same."""

    loss: Tensor  # smoothed cross-entropy, plus R-Drop's term if used, in nats; has a gradient
    nll: Tensor  # unsmoothed negative log-likelihood, in nats; has none


def translation_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, smoothing: float
) -> LossSums:
    """The loss of hidden states (.., E), projected by weight (V, E) and bias (V), at labels (..).

    Labels that are IGNORE do not count. Label smoothing distributes its mass over all of V,
    as in `torch.nn.functional.cross_entropy` (Szegedy et al. 2016, section 7; Vaswani et al., section 5.4).
    """
    rows = hidden.flatten(0, -2)
    return LossSums(*projected_cross_entropy(rows, weight, bias, labels.flatten(), smoothing))


def r_drop_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, smoothing: float, alpha: float
) -> LossSums:
    """The loss with R-Drop (Liang et al. 2021) of hidden states (2P, E) at labels (P): two forward passes p
    and q of the same tokens, one after the other. Other arguments are as of `translation_loss`.

    The paper (section 2) and its code add alpha * (KL(p || q) + KL(q || p)) / 2 to the *sum* of both
    cross-entropies. Here loss and nll are *means* over both passes, so that term is halved too: alpha means
    the same, and the loss has its usual scale.
    """
    rows = torch.stack(hidden.chunk(2), dim=-2).flatten(0, -2)  # the two passes of a token become adjacent
    labels = torch.stack([labels, labels], dim=-1).flatten()
    loss, nll = projected_cross_entropy(rows, weight, bias, labels, smoothing, alpha)
    return LossSums(loss / 2, nll / 2)
