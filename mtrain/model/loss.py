"""Label-masked, label-smoothed cross-entropy, fused with the projection to the vocabulary."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = -100  # label of padding, as torch.nn.functional.cross_entropy has it
CHUNK = 2**23  # logits that exist at a time: 32 MiB in fp32


class LossSums(NamedTuple):
    """Sums over tokens, so that any split into batches, passes or devices adds up to the same."""

    loss: Tensor  # smoothed cross-entropy, nats; has the gradient
    nll: Tensor  # unsmoothed, nats; has none
    tokens: int  # labels that are not padding


def projected_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, tokens: int, smoothing: float
) -> LossSums:
    """The loss of hidden states (.., E) projected by weight (V, E) against labels (..), IGNORE at padding.

    Smoothing spreads its mass over all V, as `torch.nn.functional.cross_entropy` does (Szegedy et al. 2016,
    section 7). Equal to projecting and calling that function, but the logits exist only a chunk at a time:
    their gradient is made on the way forward, where they are still at hand.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    # Asked here, for inside the function gradients are always off.
    learning = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    arguments = (hidden.flatten(0, -2), weight, bias, labels.flatten(), smoothing, dtype, learning)
    loss, nll = _ProjectedCrossEntropy.apply(*arguments)  # type: ignore[no-untyped-call]
    return LossSums(loss, nll, tokens)


class _ProjectedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        smoothing: float,
        dtype: torch.dtype,
        learning: bool,
    ) -> tuple[Tensor, Tensor]:
        vocab = weight.size(0)
        weight_cast = weight.to(dtype)
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        grad_bias = torch.zeros_like(bias) if learning and bias is not None else None
        accurate = torch.promote_types(dtype, torch.float32)
        nll, uniform = hidden.new_zeros(2, dtype=accurate).unbind()
        rows = max(1, CHUNK // vocab)
        for start in range(0, hidden.size(0), rows):
            chunk = slice(start, start + rows)
            x, label = hidden[chunk].to(dtype), labels[chunk, None]
            keep = (label != IGNORE).to(accurate)  # (rows, 1)
            label = label.clamp(min=0)
            logits = F.linear(x, weight_cast).to(accurate)
            if bias is not None:
                logits += bias
            normaliser = logits.logsumexp(dim=-1, keepdim=True)
            nll = nll + ((normaliser - logits.gather(1, label)) * keep).sum()
            uniform = uniform + ((normaliser - logits.mean(dim=-1, keepdim=True)) * keep).sum()
            if not learning:
                continue
            # d loss / d logits = softmax - (1 - smoothing) * one_hot(label) - smoothing / V
            grad = logits.sub_(normaliser).exp_().sub_(smoothing / vocab)
            grad.scatter_add_(1, label, torch.full_like(normaliser, smoothing - 1)).mul_(keep)
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            grad = grad.to(dtype)
            grad_hidden[chunk] = grad @ weight_cast
            grad_weight += grad.t() @ x
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        ctx.mark_non_differentiable(nll)
        return (1 - smoothing) * nll + smoothing * uniform, nll

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grads = [None if grad is None else grad * grad_loss.to(grad.dtype) for grad in ctx.saved_tensors]
        return (*grads, None, None, None, None)
