"""Cross-entropy with label smoothing and R-Drop, fused with the projection to the vocabulary.

Symbols in shapes: E model width, V vocabulary size; rows are tokens.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from mtrain.kernels.mixed_linear import pads_rows, shared_rows
from mtrain.kernels.precision import product_dtype, without_autocast
from mtrain.kernels.triton.available import attempt, suits_kernels

# Label of padding and of surplus tokens, the default `ignore_index` of torch.nn.functional.cross_entropy.
IGNORE = -100
# Logits that exist at a time. On a CPU, with more of them, fewer gradients of the weight have to be added up;
# 2**20 took 3% longer than 2**23. On a GPU, as many as keep it busy.
_MAX_LOGITS = {"cpu": 2**23, "cuda": 2**26}
# Bytes of logits that exist at a time in the Triton kernel, where their gradient replaces them: about as many
# as the operators need for _MAX_LOGITS, which they copy several times.
_MAX_LOGIT_BYTES = 2**29
# Logits that R-Drop processes at a time on a CPU, so that they stay in its cache. For 8,000 and 12,000
# words, the loss took 4% and 3% longer with 2**18, 1% longer with 2**20, and 12% longer with 2**17.
_CACHED_LOGITS = 2**19


class LossSums(NamedTuple):
    """Sums over tokens, so that any split into batches, micro-batches or devices adds up to the same."""

    loss: Tensor  # smoothed cross-entropy, plus R-Drop's term if used, in nats; has a gradient
    nll: Tensor  # unsmoothed negative log-likelihood, in nats; has none


def chunk_rows(device_type: str, vocab_size: int, max_logits: int | None = None) -> int:
    """The number of tokens whose logits the loss computes at a time. It is even, so that R-Drop's pairs stay
    together."""
    limit = max_logits or _MAX_LOGITS.get(device_type, _MAX_LOGITS["cuda"])
    return 2 * max(1, limit // vocab_size // 2)


def projected_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, smoothing: float, r_drop: float = 0.0
) -> LossSums:
    """The loss and the negative log-likelihood of labels (rows).

    The logits are hidden (rows, E) projected by weight (V, E) and bias (V). Rows with the label IGNORE do not
    contribute. The result equals `F.cross_entropy(F.linear(hidden, weight, bias), labels,
    label_smoothing=smoothing, reduction="sum")`, but only some logits exist at a time, because their gradient
    is computed in the forward pass. Label smoothing distributes its mass over all of V (Szegedy et
    al. 2016, section 7; Vaswani et al. 2017, section 5.4).

    `r_drop` is alpha of R-Drop (Liang et al., "R-Drop: Regularized Dropout for Neural Networks", 2021). Rows
    2i and 2i + 1 then belong to the same token in two forward passes, p and q, and
    alpha * (KL(p || q) + KL(q || p)) / 2 is added to the loss of each such pair.

    Under autocast the projection and its gradient are computed in the type of autocast. On a CPU, if there is
    neither a bias nor R-Drop, so is the softmax, but its sums are in fp32. Probabilities above 0.998 are
    rounded to 1 in bf16. Without label smoothing, the gradient of such a label is therefore 0. On a GPU, the
    softmax is computed in fp32; without R-Drop by one kernel, where Triton works.
    """
    dtype = product_dtype(hidden)
    if not r_drop and suits_kernels(hidden):
        rows = chunk_rows("cuda", weight.size(0), _MAX_LOGIT_BYTES // dtype.itemsize)
        inputs = hidden, weight, bias, labels, smoothing, dtype, rows
        fused: tuple[Tensor, Tensor] | None
        with without_autocast(hidden):
            fused = attempt("cross_entropy.fused_cross_entropy", (dtype, weight.size(0)), *inputs)
        if fused is not None:
            return LossSums(*fused)
    # Decided here because gradients are always disabled inside an autograd function.
    trained = [tensor for tensor in (hidden, weight, bias) if tensor is not None and tensor.requires_grad]
    with_grad = r_drop > 0 or (torch.is_grad_enabled() and bool(trained))
    rows = chunk_rows(hidden.device.type, weight.size(0))
    last = len(hidden) % rows  # rows of the last chunk
    if pads_rows(hidden.device, dtype) and (surplus := min(shared_rows(last), rows) - last):
        hidden = F.pad(hidden, (0, 0, 0, surplus))
        labels = F.pad(labels, (0, surplus), value=IGNORE)
    with without_autocast(hidden):  # it would compute the softmax in fp32
        settings = smoothing, r_drop, dtype, with_grad, rows
        return LossSums(*_ProjectedCrossEntropy.apply(hidden, weight, bias, labels, settings))  # type: ignore[no-untyped-call]


def r_drop_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, smoothing: float, alpha: float
) -> LossSums:
    """The loss with R-Drop of hidden states (2P, E) at P labels: two forward passes p and q of the same
    tokens, one after the other. Other arguments are as of `projected_cross_entropy`.

    The paper (section 2) and its code add alpha * (KL(p || q) + KL(q || p)) / 2 to the *sum* of both
    cross-entropies. Here loss and nll are *means* over both passes, so that term is halved too: alpha means
    the same, and the loss has its usual scale.
    """
    rows = torch.stack(hidden.chunk(2), dim=1).flatten(0, 1)  # the two passes of a token become adjacent
    both = projected_cross_entropy(rows, weight, bias, labels.repeat_interleave(2), smoothing, alpha)
    return LossSums(both.loss / 2, both.nll / 2)


class _ProjectedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, settings: Any
    ) -> tuple[Tensor, Tensor]:
        smoothing, r_drop, dtype, with_grad, rows = settings
        accurate = torch.promote_types(dtype, torch.float32)
        keep = (labels != IGNORE).to(accurate)[:, None]  # (rows, 1)
        labels = labels.clamp(min=0)[:, None]
        weight_cast, mean_weight = weight.to(dtype), weight.mean(0).to(accurate)
        mean_bias = 0 if bias is None else bias.mean()
        gradients = _Gradients(hidden, weight, bias, [with_grad and each for each in ctx.needs_input_grad])
        nll, uniform, divergence = hidden.new_zeros(3, dtype=accurate).unbind()

        def project(x: Tensor) -> Tensor:
            logits = F.linear(x, weight_cast)  # (rows, V)
            return logits if bias is None else logits.to(accurate).add_(bias)

        for chunk in (slice(start, start + rows) for start in range(0, hidden.size(0), rows)):
            x, label = hidden[chunk].to(dtype), labels[chunk]
            logits = project(x)
            label_logits = logits.gather(1, label).to(accurate)
            grad: Tensor | None = None
            # d loss / d logits = softmax - (1 - smoothing) * one_hot(label) - smoothing / V, plus R-Drop's
            # part. smoothing / V is the same for all logits and is subtracted after the loop.
            if r_drop:
                normalizer, kl = _replace_by_gradient_(
                    logits, label, label_logits, smoothing - 1, keep[chunk], r_drop
                )
                grad, divergence = logits, divergence + (kl * keep[chunk][0::2]).sum()
            elif with_grad:
                again = partial(project, x)
                grad, normalizer = _softmax_and_normalizer(logits, label, label_logits, keep[chunk], again)
                _add_to_labels_(grad, label, smoothing - 1)
            else:
                normalizer = logits.to(accurate).logsumexp(dim=-1, keepdim=True)
            # The mean of the V logits of each row, without reading them.
            mean_logits = (x.to(accurate) * mean_weight).sum(-1, keepdim=True) + mean_bias
            nll = nll + ((normalizer - label_logits) * keep[chunk]).sum()
            uniform = uniform + ((normalizer - mean_logits) * keep[chunk]).sum()
            if grad is not None:
                gradients.add(grad, chunk, x, keep[chunk], weight_cast)
        gradients.smooth(smoothing, hidden, keep, mean_weight)
        ctx.save_for_backward(gradients.hidden, gradients.weight, gradients.bias)
        ctx.mark_non_differentiable(nll)
        return (1 - smoothing) * nll + smoothing * uniform + r_drop / 2 * divergence, nll

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grads = [None if grad is None else grad * grad_loss.to(grad.dtype) for grad in ctx.saved_tensors]
        return (*grads, None, None)


class _Gradients:
    """The gradients of hidden (rows, E), weight (V, E) and bias (V); None where not `needed`."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, needed: Sequence[bool]):
        self.hidden = torch.empty_like(hidden) if needed[0] else None
        self.weight = torch.zeros_like(weight) if needed[1] else None
        self.bias = torch.zeros_like(bias) if bias is not None and needed[2] else None

    def add(self, grad: Tensor, chunk: slice, x: Tensor, keep: Tensor, weight: Tensor) -> None:
        """Add what follows from the gradient of the logits of a chunk of rows, whose hidden states are `x`.
        Products are computed in the type of `x` and `weight`."""
        if self.bias is not None:
            self.bias += (grad * keep).sum(0)
        grad = grad.to(x.dtype)
        if self.hidden is not None:
            self.hidden[chunk] = (grad @ weight) * keep
        if self.weight is not None:
            self.weight += grad.t() @ (x * keep).to(x.dtype)

    def smooth(self, smoothing: float, hidden: Tensor, keep: Tensor, mean_weight: Tensor) -> None:
        """Add the part that the uniform distribution of label smoothing contributes."""
        if self.hidden is not None:
            self.hidden -= smoothing * keep * mean_weight
        if self.weight is not None:
            self.weight -= smoothing / len(self.weight) * (hidden * keep).sum(0)
        if self.bias is not None:
            self.bias -= smoothing / len(self.bias) * keep.sum()


def _softmax_and_normalizer(
    logits: Tensor, label: Tensor, label_logits: Tensor, keep: Tensor, again: Callable[[], Tensor] | None
) -> tuple[Tensor, Tensor]:
    """softmax (rows, V) and logsumexp (rows, 1) of each row of logits (rows, V), given the logits at the
    labels. Where `keep` (rows, 1) is 0, the logsumexp does not matter.

    On a CPU, the softmax replaces the logits, in their type, if `again` can compute them once more. `again`
    is only called if the probability of a label underflows: otherwise the normalizer is derived from that
    probability, which saves four passes over the logits. On other devices, this check would make the host
    wait.
    """
    accurate = label_logits.dtype
    if logits.device.type != "cpu":
        log_softmax = logits.log_softmax(dim=-1, dtype=accurate)
        normalizer = label_logits - log_softmax.gather(1, label)
        return log_softmax.exp_(), normalizer
    if again is None:
        softmax = logits.softmax(dim=-1, dtype=accurate)
    else:
        softmax = torch.softmax(logits, -1, out=logits)
    probability = softmax.gather(1, label).to(accurate)
    probability = torch.where(keep > 0, probability, 1)
    if bool((probability > torch.finfo(softmax.dtype).tiny).all()):
        return softmax, label_logits - probability.log()
    intact = logits if again is None else again()
    return softmax, intact.to(accurate).logsumexp(dim=-1, keepdim=True)


def _add_to_labels_(grad: Tensor, label: Tensor, number: float) -> None:
    """Add a number to the entry of grad (rows, V) at the label (rows, 1) of each row, and round the sum once.

    In low precision on a CPU, `scatter_add_` would copy the whole matrix.
    """
    rows, size = grad.shape
    places = torch.arange(rows, device=grad.device) * size + label[:, 0]
    flat = grad.view(-1)
    sums = flat[places].to(torch.promote_types(grad.dtype, torch.float32)) + number
    flat[places] = sums.to(grad.dtype)


def _replace_by_gradient_(
    logits: Tensor, label: Tensor, label_logits: Tensor, at_label: float, keep: Tensor, r_drop: float
) -> tuple[Tensor, Tensor]:
    """Replace the logits (rows, V) by their softmax plus `r_drop` / 2 times the gradient of
    KL(p || q) + KL(q || p), where p and q are the softmax of rows 2i and 2i + 1, and add `at_label` to the
    entry at the label (rows, 1) of each row. Returns the logsumexp (rows, 1) of each row and the divergence
    (rows / 2, 1) of each pair of rows.

    On a CPU, only some rows at a time, so that intermediate results stay in its cache.
    """
    on_cpu = logits.device.type == "cpu"
    rows = chunk_rows("cpu", logits.size(1), _CACHED_LOGITS) if on_cpu else logits.size(0)
    normalizers, divergences = [], []
    for part in (slice(start, start + rows) for start in range(0, logits.size(0), rows)):
        accurate = logits[part].to(label_logits.dtype)  # a view if the logits already have this type
        softmax, normalizer = _softmax_and_normalizer(
            accurate, label[part], label_logits[part], keep[part], None
        )
        normalizers.append(normalizer)
        divergences.append(_replace_by_r_drop_gradient_(accurate, softmax, r_drop / 2))
        _add_to_labels_(accurate, label[part], at_label)
        # Rounded to the type of the logits only now: most of the gradient cancels where a label is likely.
        logits[part] = accurate
    return torch.cat(normalizers), torch.cat(divergences)


def _replace_by_r_drop_gradient_(logits: Tensor, softmax: Tensor, scale: float) -> Tensor:
    """Replace the logits (2 * pairs, V) by their softmax plus `scale` times the gradient of
    KL(p || q) + KL(q || p), where p and q are rows 2i and 2i + 1 of the softmax. Returns the divergence
    (pairs, 1).

    The difference of the logits replaces log p - log q: the two differ by a constant, which cancels.
    """
    p, q = softmax[0::2], softmax[1::2]
    log_ratio = logits[0::2].sub_(logits[1::2]).mul_(scale)
    by_q = logits[1::2].copy_(log_ratio).mul_(q)
    by_p = log_ratio.mul_(p)
    mean_p, mean_q = by_p.sum(-1, keepdim=True), by_q.sum(-1, keepdim=True)
    # p + p * (log_ratio - mean_p) + scale * (p - q), and q + q * (mean_q - log_ratio) + scale * (q - p)
    by_p.addcmul_(p, 1 + scale - mean_p).sub_(q, alpha=scale)
    by_q.neg_().addcmul_(q, 1 + scale + mean_q).sub_(p, alpha=scale)
    return (mean_p - mean_q) / scale
