"""Label-masked, label-smoothed cross-entropy, fused with the projection to the vocabulary."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mtrain.kernels.cross_entropy import IGNORE

CHUNK = {"cpu": 2**22, "cuda": 2**26}  # logits at a time: what a cache holds, or what keeps a GPU busy


class LossSums(NamedTuple):
    """Sums over tokens, so that any split into batches, passes or devices adds up to the same."""

    loss: Tensor  # smoothed cross-entropy, and R-Drop's term if asked for, nats; has the gradient
    nll: Tensor  # unsmoothed, nats; has none
    tokens: int  # labels that are not padding


def projected_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    tokens: int,
    smoothing: float,
    r_drop: float = 0.0,
) -> LossSums:
    """The loss of hidden states (.., E) projected by weight (V, E) against labels (..), IGNORE at padding.

    Smoothing spreads its mass over all V, as `torch.nn.functional.cross_entropy` does (Szegedy et al. 2016,
    section 7). Equal to projecting and calling that function, but the logits exist only a chunk at a time:
    their gradient is made on the way forward, where they are still at hand.

    With `r_drop`, alpha of R-Drop (Liang et al., "R-Drop: Regularized Dropout for Neural Networks", 2021),
    hidden (2B, T, E) holds two passes of the B sentences, p and q, one after the other. The paper (section
    2) and its code add alpha * (KL(p || q) + KL(q || p)) / 2 to the *sum* of both cross-entropies. Here loss
    and nll are *means* over both passes, so that term is halved too: alpha means the same, and the loss has
    the scale of ordinary training.
    """
    if r_drop:  # both passes of a token become neighbours
        hidden, labels = torch.stack(hidden.chunk(2), dim=-2), torch.stack([labels, labels], dim=-1)
    passes = 2 if r_drop else 1
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    # Asked here, for inside the function gradients are always off.
    trained = [tensor for tensor in (hidden, weight, bias) if tensor is not None and tensor.requires_grad]
    learning = r_drop > 0 or (torch.is_grad_enabled() and bool(trained))
    arguments = (hidden.flatten(0, -2), weight, bias, labels.flatten(), smoothing, r_drop, dtype, learning)
    loss, nll = _ProjectedCrossEntropy.apply(*arguments)  # type: ignore[no-untyped-call]
    return LossSums(loss / passes, nll / passes, tokens)


def _divergence(logits: Tensor, softmax: Tensor) -> tuple[Tensor, Tensor]:
    """KL(p || q) + KL(q || p) of each pair of neighbouring rows (pairs, 1), and its gradient by the logits
    (2 * pairs, V). Differences of logits serve as log p - log q: what they lack, a constant, cancels."""
    p, q = softmax[0::2], softmax[1::2]
    apart = logits[0::2].to(softmax.dtype) - logits[1::2]
    by_p, by_q = p * apart, q * apart
    mean_p, mean_q = by_p.sum(-1, keepdim=True), by_q.sum(-1, keepdim=True)
    # p * (apart - mean_p) + p - q and q * (mean_q - apart) + q - p, with fewer passes over memory
    grads = by_p.addcmul_(p, 1 - mean_p).sub_(q), by_q.neg_().addcmul_(q, 1 + mean_q).sub_(p)
    return mean_p - mean_q, torch.stack(grads, dim=1).flatten(0, 1)


def _normaliser(logits: Tensor, softmax: Tensor | None, picked: Tensor, label: Tensor) -> Tensor:
    """log sum exp of each row of logits (rows, V): (rows, 1). On a CPU the softmax, if at hand, tells it by
    the probability of the label, which saves four passes over the logits."""
    accurate = picked.dtype
    if softmax is not None and logits.device.type == "cpu":
        chance = softmax.gather(1, label)
        if bool((chance > torch.finfo(accurate).tiny).all()):  # elsewhere, to ask would be to wait
            return picked - chance.log()
    return logits.to(accurate).logsumexp(dim=-1, keepdim=True)


class _ProjectedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        smoothing: float,
        r_drop: float,
        dtype: torch.dtype,
        learning: bool,
    ) -> tuple[Tensor, Tensor]:
        accurate = torch.promote_types(dtype, torch.float32)
        keep = (labels != IGNORE).to(accurate)[:, None]  # (rows, 1)
        labels = labels.clamp(min=0)[:, None]
        weight_cast, mean_weight = weight.to(dtype), weight.mean(0).to(accurate)
        mean_bias = 0 if bias is None else bias.mean()
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        grad_bias = torch.zeros_like(bias) if learning and bias is not None else None
        nll, uniform, divergence = hidden.new_zeros(3, dtype=accurate).unbind()
        rows = 2 * max(1, CHUNK[hidden.device.type] // weight.size(0) // 2)  # R-Drop's pairs stay together
        for chunk in (slice(start, start + rows) for start in range(0, hidden.size(0), rows)):
            x, label = hidden[chunk].to(dtype), labels[chunk]
            logits = F.linear(x, weight_cast)
            if bias is not None:
                logits = logits.to(accurate) + bias
            picked = logits.gather(1, label).to(accurate)
            grad = logits.softmax(dim=-1, dtype=accurate) if learning else None
            normaliser = _normaliser(logits, grad, picked, label)
            # The mean of V logits, without reading them; no product, which autocast would round.
            mean = (x.to(accurate) * mean_weight).sum(-1, keepdim=True) + mean_bias
            nll = nll + ((normaliser - picked) * keep[chunk]).sum()
            uniform = uniform + ((normaliser - mean) * keep[chunk]).sum()
            if grad is None:
                continue
            if r_drop:
                apart, grad_apart = _divergence(logits, grad)
                divergence = divergence + (apart * keep[chunk][0::2]).sum()
                grad += r_drop / 2 * grad_apart
            # d loss / d logits = softmax - (1 - smoothing) * one_hot(label) - smoothing / V, whose last term
            # is the same for all of V and added at the end.
            grad.scatter_add_(1, label, torch.full_like(normaliser, smoothing - 1))
            if grad_bias is not None:
                grad_bias += (grad * keep[chunk]).sum(0)
            grad = grad.to(dtype)
            grad_hidden[chunk] = (grad @ weight_cast) * keep[chunk]
            grad_weight += grad.t() @ (x * keep[chunk]).to(dtype)
        if learning:
            grad_hidden -= smoothing * keep * mean_weight
            grad_weight -= smoothing / weight.size(0) * (hidden * keep).sum(0)
            if grad_bias is not None:
                grad_bias -= smoothing / weight.size(0) * keep.sum()
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        ctx.mark_non_differentiable(nll)
        return (1 - smoothing) * nll + smoothing * uniform + r_drop / 2 * divergence, nll

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grads = [None if grad is None else grad * grad_loss.to(grad.dtype) for grad in ctx.saved_tensors]
        return (*grads, *[None] * 5)
