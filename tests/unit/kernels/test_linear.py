"""Products in fewer bits are those of PyTorch, in whatever layout the weights are kept."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mtrain.model.linear import Linear, Low, padded_rows


def close(low: Tensor, exact: Tensor) -> None:
    """As near as bf16, with 8 bits, comes."""
    torch.testing.assert_close(low.float(), exact, rtol=0.01, atol=0.01 * float(exact.abs().max()))


@pytest.fixture(params=["packed", "plain"])
def layout(request: pytest.FixtureRequest, monkeypatch) -> str:
    if request.param == "plain":
        monkeypatch.setattr("mtrain.model.linear._PACKING", ["no_such"])  # as in a PyTorch without
    return request.param


@pytest.mark.parametrize("shape", [(1,), (17,), (3, 11), (2, 3, 5)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.inference_mode()
def test_low_weights_multiply_as_those_they_are_copies_of(
    layout: str, shape: tuple[int], bias: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    x, weight, offset = torch.randn(*shape, 24), torch.randn(20, 24), torch.randn(20) if bias else None
    low = Low(weight, offset, dtype)
    assert low(x).shape == (*shape, 20) and low(x).dtype == dtype
    close(low(x), F.linear(x, weight, offset))
    crossed = torch.randn(24, 7).t()  # not contiguous
    close(low(crossed), F.linear(crossed, weight, offset))
    close(low.rows(5, 12)(x), F.linear(x, weight, offset)[..., 5:12])
    assert low.rows(5, 12) is low.rows(5, 12)


@torch.inference_mode()
def test_rows_of_a_linear_map_are_a_part_of_its_output(layout: str, monkeypatch) -> None:
    monkeypatch.setattr("mtrain.model.linear.WORTH_LOWERING", 0)
    torch.manual_seed(1)
    layer, x = Linear(24, 20), torch.randn(9, 24)
    for few in (False, True):
        layer.low = Low(layer.weight, layer.bias, torch.bfloat16) if few else None
        assert layer(x).dtype == layer.rows(x, 4).dtype == torch.float32
        torch.testing.assert_close(layer.rows(x, 4, 9), layer(x)[:, 4:9], rtol=0.01, atol=0.02)


@torch.inference_mode()
def test_a_small_product_stays_exact_after_a_large_one(monkeypatch) -> None:
    monkeypatch.setattr(
        "mtrain.model.linear.WORTH_LOWERING", 100 * 5
    )  # what five outputs of 100 numbers take
    torch.manual_seed(2)
    layer, x = Linear(24, 20), torch.randn(9, 24)
    torch.nn.init.normal_(layer.bias)
    expected = F.linear(x, layer.weight[4:9], layer.bias[4:9])
    layer.low = Low(layer.weight, layer.bias, torch.bfloat16)
    assert not torch.equal(layer.rows(x, 4, 9), expected)  # 216 numbers
    torch.testing.assert_close(layer.rows(x[:2], 4, 9), expected[:2])  # 48


def test_few_different_numbers_of_rows_are_multiplied() -> None:
    assert [padded_rows(rows) for rows in (1, 7, 15, 16, 17, 64, 65, 300)] == [1, 7, 15, 16, 18, 64, 72, 320]
    assert all(rows <= padded_rows(rows) <= 1.125 * rows for rows in range(1, 5000))
    assert len({padded_rows(rows) for rows in range(1, 1025)}) < 75


def test_large_products_are_lowered() -> None:
    small, large = (Low(torch.empty(size, size), None, torch.bfloat16) for size in (100, 2000))
    assert not small.is_worth(torch.empty(3, 100)) and small.is_worth(torch.empty(300, 100))
    assert large.is_worth(torch.empty(1, 2000))
    for width, is_worth in ((50, False), (150, True)):  # few multiplications, of many numbers that are read
        assert Low(torch.empty(2000, width), None, torch.bfloat16).is_worth(torch.empty(1, width)) is is_worth
