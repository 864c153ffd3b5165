"""The projected cross-entropy against torch.nn.functional.cross_entropy and kl_div."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from mtrain.kernels.cross_entropy import IGNORE, projected_cross_entropy
from tests.support.logits import limit_logits

torch.set_num_threads(1)
ROWS, E, V = 24, 5, 11
EVERY_CHUNK = pytest.mark.parametrize("max_logits", [1, 3 * V, 7 * V + 1, None])
EVERY_TYPE = pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, bias, and labels, some of which are padding."""
    torch.manual_seed(2)
    hidden, weight, bias = (torch.randn(*shape, dtype=dtype) for shape in ((ROWS, E), (V, E), (V,)))
    labels = torch.randint(V, (ROWS,))
    labels[4:6] = labels[12:18] = IGNORE
    return hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), labels


def reference(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, smoothing: float
) -> Tensor:
    logits = F.linear(hidden, weight, bias)
    return F.cross_entropy(logits, labels, label_smoothing=smoothing, ignore_index=IGNORE, reduction="sum")


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.6])
@pytest.mark.parametrize("with_bias", [False, True])
@EVERY_TYPE
@EVERY_CHUNK
def test_value_and_gradients_equal_torch(
    smoothing: float,
    with_bias: bool,
    dtype: torch.dtype,
    tolerance: float,
    max_logits: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit_logits(monkeypatch, max_logits)
    hidden, weight, bias, labels = inputs(dtype)
    trained = [hidden, weight, *([bias] if with_bias else [])]
    arguments = (hidden, weight, bias if with_bias else None, labels)
    loss, nll = projected_cross_entropy(*arguments, smoothing)
    expected = reference(*arguments, smoothing)
    close = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(loss, expected, **close)
    torch.testing.assert_close(nll, reference(*arguments, 0.0).detach(), **close)
    gradients = torch.autograd.grad(loss / 17, trained)
    for found, wanted in zip(gradients, torch.autograd.grad(expected / 17, trained), strict=True):
        assert found.dtype == dtype
        torch.testing.assert_close(found, wanted, **close)


def test_only_the_gradients_that_are_needed_are_computed() -> None:
    """With frozen embeddings that are tied to the projection, a third of the work is left out."""
    hidden, weight, bias, labels = inputs()
    flops = []
    for frozen in (False, True):
        fixed = (weight.detach(), bias.detach()) if frozen else (weight, bias)
        arguments = (hidden, *fixed, labels)
        with FlopCounterMode(display=False) as counter:
            loss, _ = projected_cross_entropy(*arguments, 0.1)
        flops.append(counter.get_total_flops())
        expected = torch.autograd.grad(reference(*arguments, 0.1), hidden)
        torch.testing.assert_close(torch.autograd.grad(loss, hidden), expected)
    assert flops[1] == flops[0] * 2 / 3


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_gradcheck(smoothing: float) -> None:
    hidden, weight, bias, labels = inputs()
    assert torch.autograd.gradcheck(
        lambda x, w, b: projected_cross_entropy(x, w, b, labels, smoothing)[0], (hidden, weight, bias)
    )


# ------------------------------------------------------------------------------------------------ R-Drop


def r_drop_reference(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, alpha: float
) -> Tensor:
    """The cross-entropies of all rows, plus alpha times the mean of the two KL divergences of each pair."""
    p, q = F.linear(hidden, weight, bias).log_softmax(-1).unflatten(0, (-1, 2)).unbind(1)
    divergence = F.kl_div(p, q, reduction="none", log_target=True)
    divergence = divergence + F.kl_div(q, p, reduction="none", log_target=True)
    kept = labels[::2] != IGNORE
    return reference(hidden, weight, bias, labels, 0.1) + alpha * divergence.sum(-1)[kept].sum() / 2


def two_passes(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows in pairs: two different hidden states of each token."""
    hidden, weight, bias, labels = inputs(dtype)
    other = hidden.detach() + 0.3 * torch.randn_like(hidden)
    pairs = torch.stack([hidden.detach(), other], dim=1).flatten(0, 1)
    return pairs.requires_grad_(), weight, bias, labels.repeat_interleave(2)


@EVERY_CHUNK
@EVERY_TYPE
def test_r_drop_equals_the_formula(
    max_logits: int | None, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_logits(monkeypatch, max_logits)
    hidden, weight, bias, labels = two_passes(dtype)
    loss, nll = projected_cross_entropy(hidden, weight, bias, labels, 0.1, 5.0)
    expected = r_drop_reference(hidden, weight, bias, labels, 5.0)
    close = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(loss, expected, **close)
    torch.testing.assert_close(nll, reference(hidden, weight, bias, labels, 0.0).detach(), **close)
    trained = (hidden, weight, bias)
    gradients = torch.autograd.grad(loss / 17, trained)
    for found, wanted in zip(gradients, torch.autograd.grad(expected / 17, trained), strict=True):
        torch.testing.assert_close(found, wanted, **close)
    assert (gradients[0][labels == IGNORE] == 0).all()
    with torch.no_grad():
        without_gradients = projected_cross_entropy(hidden, weight, bias, labels, 0.1, 5.0)
    torch.testing.assert_close(without_gradients[0], expected.detach(), **close)


def test_r_drop_gradcheck() -> None:
    hidden, weight, bias, labels = two_passes()
    assert torch.autograd.gradcheck(
        lambda x, w, b: projected_cross_entropy(x, w, b, labels, 0.1, 3.0)[0], (hidden, weight, bias)
    )


@pytest.mark.parametrize(
    ("dtype", "tolerance", "has_bias"),
    [
        (torch.float32, 1e-3, True),
        (torch.bfloat16, 0.03, False),
        pytest.param(torch.float64, 1e-6, True, marks=pytest.mark.slow),
        pytest.param(torch.float64, 1e-6, False, marks=pytest.mark.slow),
        pytest.param(torch.float32, 1e-3, False, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, 0.03, True, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_r_drop_with_a_large_vocabulary(dtype: torch.dtype, tolerance: float, has_bias: bool) -> None:
    """A CPU processes only four rows of so many words at a time. bf16: under autocast."""
    hidden, weight, bias, labels = two_passes(torch.float64 if dtype == torch.float64 else torch.float32)
    copies = 2**17 // len(weight)
    weight = (weight.detach().repeat(copies, 1) + torch.randn(1, weight.size(1))).requires_grad_()
    large_bias = bias.detach().repeat(copies).requires_grad_() if has_bias else None
    trained = [tensor for tensor in (hidden, weight, large_bias) if tensor is not None]
    exact = r_drop_reference(hidden, weight, large_bias, labels, 5.0)
    gradients = torch.autograd.grad(exact, trained)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        loss, _ = projected_cross_entropy(hidden, weight, large_bias, labels, 0.1, 5.0)
    torch.testing.assert_close(loss, exact, rtol=tolerance, atol=0)
    for found, expected in zip(torch.autograd.grad(loss, trained), gradients, strict=True):
        assert (found - expected).norm() < tolerance * expected.norm()


def test_large_logits_stay_finite_with_r_drop() -> None:
    hidden, weight, bias, labels = two_passes(torch.float32)
    loss, _ = projected_cross_entropy(hidden * 1e4, weight, bias, labels, 0.1, 5.0)
    loss.backward()
    assert loss.isfinite() and hidden.grad.isfinite().all()


# ------------------------------------------------------------------------------------- special situations


def test_only_the_loss_has_a_gradient() -> None:
    loss, nll = projected_cross_entropy(*inputs(), 0.1)
    assert loss.requires_grad and not nll.requires_grad


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_a_frozen_input_does_not_change_the_other_gradients(frozen: int) -> None:
    hidden, weight, bias, labels = inputs()
    tensors = [hidden, weight, bias]
    expected = torch.autograd.grad(reference(hidden, weight, bias, labels, 0.1), tensors)
    tensors[frozen] = tensors[frozen].detach()
    hidden, weight, bias = tensors
    projected_cross_entropy(hidden, weight, bias, labels, 0.1)[0].backward()
    for index, tensor in enumerate(tensors):
        if index == frozen:
            assert tensor.grad is None
        else:
            torch.testing.assert_close(tensor.grad, expected[index])


def test_padding_alone_has_no_loss_and_no_gradient() -> None:
    hidden, weight, bias, labels = inputs()
    loss, nll = projected_cross_entropy(hidden, weight, bias, torch.full_like(labels, IGNORE), 0.1)
    loss.backward()
    assert loss == nll == 0
    assert all((tensor.grad == 0).all() for tensor in (hidden, weight, bias))


def test_hidden_states_at_padding_have_no_effect() -> None:
    hidden, weight, bias, labels = inputs()
    found = projected_cross_entropy(hidden, weight, bias, labels, 0.1)
    changed = torch.where((labels == IGNORE)[:, None], hidden * 3 + 1, hidden)
    again = projected_cross_entropy(changed, weight, bias, labels, 0.1)
    torch.testing.assert_close(again, found, rtol=0, atol=1e-12)
    found[0].backward()
    assert (hidden.grad[labels == IGNORE] == 0).all()
    assert (hidden.grad[labels != IGNORE] != 0).any(-1).all()


def test_large_logits_stay_finite() -> None:
    hidden, weight, bias, labels = inputs(torch.float32)
    loss, _ = projected_cross_entropy(hidden * 1e4, weight, bias, labels, 0.1)
    loss.backward()
    torch.testing.assert_close(loss, reference(hidden * 1e4, weight, bias, labels, 0.1))
    assert hidden.grad.isfinite().all()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_value_is_the_same_for_one_projection(mode: type) -> None:
    hidden, weight, bias, labels = inputs()
    expected = projected_cross_entropy(hidden, weight, bias, labels, 0.1)
    with mode(), FlopCounterMode(display=False) as flops:
        loss, nll = projected_cross_entropy(hidden, weight, bias, labels, 0.1)
    assert not loss.requires_grad
    torch.testing.assert_close((loss, nll), (expected[0].detach(), expected[1]))
    assert flops.get_total_flops() == 2 * ROWS * E * V


@pytest.mark.parametrize("hidden_type", [torch.float32, torch.bfloat16])
def test_bf16_autocast_rounds_only_the_products(hidden_type: torch.dtype) -> None:
    hidden, weight, bias, labels = inputs(torch.float32)
    exact = reference(hidden, weight, bias, labels, 0.1)
    gradients = torch.autograd.grad(exact, (hidden, weight, bias))
    cast = hidden.detach().to(hidden_type).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, nll = projected_cross_entropy(cast, weight, bias, labels, 0.1)
    loss.backward()
    assert loss.dtype == nll.dtype == torch.float32
    torch.testing.assert_close(loss, exact, rtol=0.01, atol=0)
    logits = F.linear(cast.bfloat16(), weight.bfloat16()).float() + bias
    expected_nll = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")
    torch.testing.assert_close(nll, expected_nll.detach(), rtol=1e-5, atol=0)
    for tensor, expected in zip((cast, weight, bias), gradients, strict=True):
        assert tensor.grad.dtype == tensor.dtype
        assert (tensor.grad - expected).norm() < 0.02 * expected.norm()


def test_without_a_bias_the_softmax_is_rounded_too() -> None:
    hidden, weight, _, labels = inputs(torch.float32)
    exact = reference(hidden, weight, torch.zeros(len(weight)), labels, 0.1)
    gradients = torch.autograd.grad(exact, (hidden, weight))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, nll = projected_cross_entropy(hidden, weight, None, labels, 0.1)
    loss.backward()
    torch.testing.assert_close(loss, exact, rtol=0.01, atol=0)
    logits = F.linear(hidden.bfloat16(), weight.bfloat16()).float()
    expected_nll = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")
    torch.testing.assert_close(nll, expected_nll.detach(), rtol=2e-3, atol=0)
    for tensor, expected in zip((hidden, weight), gradients, strict=True):
        assert (tensor.grad - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize("autocast", [False, True])
def test_large_logits_stay_finite_without_a_bias(autocast: bool) -> None:
    hidden, weight, _, labels = inputs(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        loss, nll = projected_cross_entropy(hidden * 1e4, weight, None, labels, 0.1)
    loss.backward()
    expected = reference(hidden * 1e4, weight, torch.zeros(len(weight)), labels, 0.1)
    torch.testing.assert_close(loss, expected, rtol=0.02 if autocast else 1e-5, atol=0)
    assert nll.isfinite() and hidden.grad.isfinite().all()


def test_rounding_does_not_bias_the_gradient_of_confident_predictions() -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(1000, 64, generator=generator)
    labels = torch.randint(1000, (300,), generator=generator)
    hidden = (weight[labels] * 0.15 + 0.1 * torch.randn(300, 64, generator=generator)).requires_grad_()
    exact = F.cross_entropy(F.linear(hidden, weight), labels, label_smoothing=0.1, reduction="sum")
    (expected,) = torch.autograd.grad(exact, hidden)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, nll = projected_cross_entropy(hidden, weight, None, labels, 0.1)
    assert 0.01 < nll / len(labels) < 0.5
    (found,) = torch.autograd.grad(loss, hidden)
    assert float((found * expected).sum() / expected.square().sum()) == pytest.approx(1, abs=0.003)
