"""Products of training on a CPU with AMX have few shapes; the numbers stay the same."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mtrain.kernels.cross_entropy import IGNORE, projected_cross_entropy
from mtrain.kernels.mixed_linear import linear

SIZES = [1, 16, 33, 500, *range(513, 1025, 7), 1500]  # tokens of batches


class Products(TorchDispatchMode):
    """Collects the shapes of all products of matrices in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[torch.Size, ...]] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        matrices = [x for x in args if isinstance(x, Tensor) and x.dim() == 2 and x.dtype == torch.bfloat16]
        if function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.shapes.add(tuple(x.shape for x in matrices))
        return function(*args, **(kwargs or {}))


def train_on(tokens: int) -> list[Tensor]:
    """The loss of a linear map and a projection to a vocabulary, and its gradients."""
    torch.manual_seed(tokens)
    x = torch.randn(tokens, 16).requires_grad_()
    weight, bias = torch.randn(32, 16).requires_grad_(), torch.randn(32).requires_grad_()
    vocabulary = torch.randn(50, 32).requires_grad_()
    labels = torch.randint(50, (tokens,))
    labels[::5] = IGNORE
    with torch.autocast("cpu", torch.bfloat16):
        sums = projected_cross_entropy(linear(x, weight, bias), vocabulary, None, labels, 0.1)
    return [sums.loss, sums.nll, *torch.autograd.grad(sums.loss, (x, weight, bias, vocabulary))]


def test_batches_share_the_kernels_of_their_products_with_amx(monkeypatch):
    shapes = {}
    for has_amx in (True, False):
        monkeypatch.setattr("mtrain.kernels.mixed_linear.cpu_has_amx", lambda has_amx=has_amx: has_amx)
        with Products() as products:
            for tokens in SIZES:
                train_on(tokens)
        shapes[has_amx] = len(products.shapes)
    products_of_a_batch = 6  # of the map and of the projection: forward, and for the two gradients
    numbers_of_rows = 4 + 16  # 16 of them between 513 and 1,024
    assert shapes == {True: products_of_a_batch * numbers_of_rows, False: products_of_a_batch * len(SIZES)}


@pytest.mark.parametrize("tokens", SIZES)
def test_loss_and_gradients_do_not_depend_on_the_surplus_rows(monkeypatch, tokens):
    results = []
    for has_amx in (True, False):
        monkeypatch.setattr("mtrain.kernels.mixed_linear.cpu_has_amx", lambda has_amx=has_amx: has_amx)
        results.append(train_on(tokens))
    for rounded, exact in zip(*results, strict=True):
        assert rounded.shape == exact.shape and rounded.dtype == exact.dtype
        torch.testing.assert_close(rounded, exact, rtol=0.02, atol=0.02 * exact.abs().max().item())


@pytest.mark.parametrize("has_amx", [True, False])
def test_empty_inputs_and_inputs_of_more_dimensions(monkeypatch, has_amx):
    monkeypatch.setattr("mtrain.kernels.mixed_linear.cpu_has_amx", lambda: has_amx)
    weight, bias = torch.randn(8, 4, requires_grad=True), torch.randn(8, requires_grad=True)
    for shape in ((0, 4), (2, 3, 4)):
        x = torch.randn(shape, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            out = linear(x, weight, bias)
            torch.testing.assert_close(out, F.linear(x, weight, bias))
        (gradient,) = torch.autograd.grad(out.sum(), x)
        expected = weight.detach().bfloat16().sum(0).float().expand(shape)
        torch.testing.assert_close(gradient, expected, rtol=0.02, atol=0.02)
