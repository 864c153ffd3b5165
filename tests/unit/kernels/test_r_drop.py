"""R-Drop over two forward passes."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mtrain.kernels.cross_entropy import IGNORE, projected_cross_entropy, r_drop_loss

torch.set_num_threads(1)
P, E, V = 24, 5, 11


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, bias, and labels, some of which are padding."""
    torch.manual_seed(2)
    hidden, weight, bias = (torch.randn(*shape).double() for shape in ((P, E), (V, E), (V,)))
    labels = torch.randint(V, (P,))
    labels[4:6] = labels[12:18] = IGNORE
    return hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), labels


def cross_entropy(hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    logits = F.linear(hidden, weight, bias)
    return F.cross_entropy(logits, labels, label_smoothing=smoothing, ignore_index=IGNORE, reduction="sum")


def test_r_drop_is_half_of_the_paper_s_sum() -> None:
    """Section 2 of the paper: two cross-entropies plus alpha times the mean of two KL divergences."""
    hidden, weight, bias, labels = inputs()
    hidden = torch.cat([hidden, hidden + 0.3 * torch.randn_like(hidden)]).detach().requires_grad_()
    p, q = F.linear(hidden, weight, bias).log_softmax(-1).chunk(2)
    divergence = F.kl_div(p, q, reduction="none", log_target=True)
    divergence = divergence + F.kl_div(q, p, reduction="none", log_target=True)
    both = sum(cross_entropy(half, weight, bias, labels, 0.1) for half in hidden.chunk(2))
    expected = (both + 5 * divergence.sum(-1)[labels != IGNORE].sum() / 2) / 2
    sums = r_drop_loss(hidden, weight, bias, labels, 0.1, 5.0)
    nll = sum(cross_entropy(half, weight, bias, labels, 0.0) for half in hidden.chunk(2)) / 2
    torch.testing.assert_close((sums.loss, sums.nll), (expected, nll.detach()))
    trained = (hidden, weight, bias)
    torch.testing.assert_close(
        torch.autograd.grad(sums.loss, trained), torch.autograd.grad(expected, trained)
    )


@pytest.mark.parametrize("with_bias", [False, True])
def test_r_drop_of_many_tokens_is_the_sum_over_its_tokens(with_bias: bool) -> None:
    """A CPU processes few of them at a time."""
    torch.manual_seed(5)
    hidden, weight, bias = torch.randn(2 * 90, 6), torch.randn(1000, 6), torch.randn(1000)
    hidden, weight, bias = (each.double().requires_grad_() for each in (hidden, weight, bias))
    labels = torch.randint(0, 1000, (90,))
    labels[::7] = IGNORE
    arguments = weight, bias if with_bias else None
    trained = (hidden, weight, bias) if with_bias else (hidden, weight)
    whole = r_drop_loss(hidden, *arguments, labels, 0.1, 5.0)
    parts = [r_drop_loss(hidden[[row, 90 + row]], *arguments, labels[[row]], 0.1, 5.0) for row in range(90)]
    loss, nll = sum(part.loss for part in parts), sum(part.nll for part in parts)
    torch.testing.assert_close((whole.loss, whole.nll), (loss, nll))
    torch.testing.assert_close(torch.autograd.grad(whole.loss, trained), torch.autograd.grad(loss, trained))


def test_r_drop_in_low_precision_is_precise_where_labels_are_likely() -> None:
    """There, most of the gradient of a logit cancels."""
    labels = torch.arange(16)
    noise = torch.randint(-1, 2, (2 * 16, 16), generator=torch.Generator().manual_seed(1))
    hidden = 9 * torch.eye(16).repeat(2, 1) + noise
    gradients = []
    for dtype, low in ((torch.float64, False), (torch.float32, True)):
        logits, weight = hidden.to(dtype).requires_grad_(), torch.eye(16, dtype=dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            loss = r_drop_loss(logits, weight, None, labels, 0.0, 5.0).loss
        gradients.append(torch.autograd.grad(loss, logits)[0].double())
    expected, found = gradients
    assert (found - expected).norm() < 0.01 * expected.norm()


def test_r_drop_of_equal_passes_is_the_ordinary_loss() -> None:
    hidden, weight, bias, labels = inputs()
    ordinary = projected_cross_entropy(hidden, weight, bias, labels, 0.1)
    twice = r_drop_loss(torch.cat([hidden, hidden]), weight, bias, labels, 0.1, 5.0)
    torch.testing.assert_close(twice, ordinary, rtol=1e-12, atol=0)
    gradients = [torch.autograd.grad(sums.loss, (hidden, weight, bias)) for sums in (ordinary, twice)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)
