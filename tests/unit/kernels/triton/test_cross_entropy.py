"""The loss with its softmax in one kernel, and by operators, against PyTorch's cross-entropy in fp64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mtrain.kernels.cross_entropy import IGNORE, projected_cross_entropy
from tests.support.logits import limit_logits


def inputs(rows: int, vocabulary: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, bias, and labels, some of which are padding."""
    torch.manual_seed(2)
    hidden, weight, bias = (torch.randn(*shape) for shape in ((rows, 24), (vocabulary, 24), (vocabulary,)))
    labels = torch.randint(vocabulary, (rows,), dtype=torch.int32)
    labels[0], labels[1] = vocabulary - 1, 0
    labels[rows // 2 : rows // 2 + 3] = IGNORE
    hidden, weight, bias = (x.to(device).requires_grad_() for x in (hidden, weight / 5, bias))
    return hidden, weight, bias, labels.to(device)


def reference(trained: list[Tensor], labels: Tensor, smoothing: float) -> Tensor:
    logits = F.linear(*(x.double() for x in trained))
    return F.cross_entropy(logits, labels.long(), label_smoothing=smoothing, reduction="sum")


def relative_error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


# One block of the kernel for each row, or several; the logits of all tokens at a time, or of some
@pytest.mark.parametrize(
    ("vocabulary", "max_logits", "smoothing", "with_bias"),
    [(11, None, 0.1, True), (11, 44, 0.0, False), (1000, 5000, 0.1, False), (8200, None, 0.3, True)],
)
def test_value_and_gradients_equal_torch(
    implementation: str,
    device: torch.device,
    vocabulary: int,
    max_logits: int | None,
    smoothing: float,
    with_bias: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit_logits(monkeypatch, max_logits)
    hidden, weight, bias, labels = inputs(13, vocabulary, device)
    trained = [hidden, weight, *([bias] if with_bias else [])]
    arguments = (hidden, weight, bias if with_bias else None, labels, smoothing)
    labels_of = labels if implementation == "triton" else labels.long()
    loss, nll = projected_cross_entropy(*arguments[:3], labels_of, smoothing)
    expected = reference(trained, labels, smoothing)
    assert relative_error(loss.detach(), expected.detach()) < 1e-6
    assert relative_error(nll, reference(trained, labels, 0.0).detach()) < 1e-6
    assert loss.requires_grad and not nll.requires_grad
    gradients = torch.autograd.grad(loss / 17, trained)
    for found, wanted in zip(gradients, torch.autograd.grad(expected / 17, trained), strict=True):
        assert relative_error(found, wanted) < 1e-6
    assert (gradients[0][labels == IGNORE] == 0).all()
    with torch.no_grad():
        again = projected_cross_entropy(*arguments[:3], labels_of, smoothing)
    torch.testing.assert_close(again, (loss.detach(), nll))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1e-2), (torch.float16, 1e-3)])
def test_products_in_low_precision(
    implementation: str, device: torch.device, dtype: torch.dtype, tolerance: float
) -> None:
    hidden, weight, bias, labels = inputs(13, 1000, device)
    with torch.autocast(device.type, dtype=dtype):
        loss, _ = projected_cross_entropy(hidden, weight, bias, labels.long(), 0.1)
    expected = reference([hidden, weight, bias], labels, 0.1)
    assert relative_error(loss.detach(), expected.detach()) < tolerance
    trained = (hidden, weight, bias)
    gradients = torch.autograd.grad(loss / 17, trained)
    for found, wanted in zip(gradients, torch.autograd.grad(expected / 17, trained), strict=True):
        assert found.dtype == torch.float32 and relative_error(found, wanted) < tolerance


def test_large_logits_stay_finite(implementation: str, device: torch.device) -> None:
    hidden, weight, _, labels = inputs(13, 1000, device)
    loss, _ = projected_cross_entropy(hidden * 1e4, weight, None, labels.long(), 0.1)
    loss.backward()
    assert relative_error(loss.detach(), reference([hidden * 1e4, weight], labels, 0.1).detach()) < 1e-6
    assert hidden.grad.isfinite().all()


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_only_the_gradients_that_are_needed_are_computed(
    implementation: str, device: torch.device, frozen: int
) -> None:
    *tensors, labels = inputs(13, 50, device)
    expected = torch.autograd.grad(reference(tensors, labels, 0.1), tensors)
    tensors[frozen] = tensors[frozen].detach()
    hidden, weight, bias = tensors
    projected_cross_entropy(hidden, weight, bias, labels.long(), 0.1)[0].backward()
    for index, tensor in enumerate(tensors):
        if index == frozen:
            assert tensor.grad is None
        else:
            torch.testing.assert_close(tensor.grad, expected[index].float())


def test_the_gradient_can_be_computed_twice(implementation: str, device: torch.device) -> None:
    hidden, weight, _, labels = inputs(13, 50, device)
    loss, _ = projected_cross_entropy(hidden, weight, None, labels.long(), 0.1)
    first = torch.autograd.grad(loss, hidden, retain_graph=True)
    assert torch.equal(torch.autograd.grad(2 * loss, hidden)[0], 2 * first[0])
