"""Products of batches on a CPU with AMX share shapes; the numbers stay the same."""

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mtrain.kernels.cross_entropy import IGNORE, projected_cross_entropy
from mtrain.kernels.mixed_linear import linear

SIZES = [2, 16, 34, 500, *range(514, 1025, 6), 1500]  # tokens of batches


def use_amx(monkeypatch: pytest.MonkeyPatch, has_amx: bool) -> None:
    monkeypatch.setattr("mtrain.kernels.mixed_linear.cpu_has_amx", lambda: has_amx)


class Products(TorchDispatchMode):
    """Collects the shapes of all products of matrices in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[torch.Size, ...]] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        matrices = [x for x in args if isinstance(x, Tensor) and x.dim() == 2 and x.dtype == torch.bfloat16]
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.linear):
            self.shapes.add(tuple(x.shape for x in matrices))
        return function(*args, **(kwargs or {}))


def train_on(
    tokens: int, vocab_size: int = 50, bias: bool = False, r_drop: float = 0.0, frozen: bool = False
) -> list[Tensor]:
    """The loss of two linear maps and a projection to a vocabulary, and its gradients."""
    torch.manual_seed(tokens)
    first, second, vocabulary = torch.randn(24, 16), torch.randn(32, 24), torch.randn(vocab_size, 32)
    biases = torch.randn(24), torch.randn(32), torch.randn(vocab_size) if bias else None
    x, labels = torch.randn(tokens, 16), torch.randint(vocab_size, (tokens,))
    labels[::5] = IGNORE
    if r_drop:
        labels = labels[::2].repeat_interleave(2)
    trained = [part for part in (x, second, vocabulary, *biases) if part is not None]
    trained += [] if frozen else [first]
    for each in trained:
        each.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        hidden = linear(linear(x, first, biases[0]).relu(), second, biases[1])
        sums = projected_cross_entropy(hidden, vocabulary, biases[2], labels, 0.1, r_drop)
    return [sums.loss, sums.nll, *torch.autograd.grad(sums.loss, trained)]


def test_batches_share_the_shapes_of_their_products_with_amx(monkeypatch):
    shapes = {}
    for has_amx in (True, False):
        use_amx(monkeypatch, has_amx)
        with Products() as products:
            for tokens in SIZES:
                train_on(tokens)
        shapes[has_amx] = len(products.shapes)
    products_of_a_batch = 9  # of two maps and the projection: forward, and for the gradients of both factors
    numbers_of_rows = 5 + 16  # 16 of them between 513 and 1,024
    assert shapes[True] == products_of_a_batch * numbers_of_rows < shapes[False]


def test_validation_shares_them_too(monkeypatch):
    use_amx(monkeypatch, True)
    weight, bias = torch.randn(8, 4), torch.randn(8)
    with Products() as products, torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for tokens in range(600, 641):
            linear(torch.randn(tokens, 4), weight, bias)
    assert len(products.shapes) == 2


CASES = [{"tokens": tokens} for tokens in SIZES[::9]]
CASES += [
    {"tokens": 700, "bias": bias, "r_drop": r_drop} for bias, r_drop in product((True, False), (0, 5.0))
]
CASES += [{"tokens": 700, "frozen": True}, {"tokens": 690, "vocab_size": 30_000}]  # three chunks of 278 rows


@pytest.mark.parametrize("case", CASES)
def test_surplus_rows_do_not_change_the_loss_and_its_gradients(monkeypatch, case):
    results = []
    for has_amx in (True, False):
        use_amx(monkeypatch, has_amx)
        results.append(train_on(**case))
    for padded, exact in zip(*results, strict=True):
        assert padded.shape == exact.shape and padded.dtype == exact.dtype
        assert (padded - exact).norm() <= 5e-3 * exact.norm()


@pytest.mark.parametrize("has_amx", [True, False])
@pytest.mark.parametrize("shape", [(0, 4), (2, 3, 4)])
def test_inputs_without_tokens_and_inputs_of_more_dimensions(monkeypatch, has_amx, shape):
    use_amx(monkeypatch, has_amx)
    x, weight, bias = (torch.randn(size, requires_grad=True) for size in (shape, (8, 4), (8,)))
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = (function(x, weight, bias) for function in (linear, F.linear))
    for ours, theirs in zip(
        (found, *torch.autograd.grad(found.sum(), (x, weight, bias))),
        (expected, *torch.autograd.grad(expected.sum(), (x, weight, bias))),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02)
