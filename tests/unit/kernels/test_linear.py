"""Packed linear maps against torch.nn.functional.linear, with and without oneDNN's weight layout."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mtrain.kernels.linear import PackedLinear, linear, pack, padded_rows
from mtrain.model.incremental import PackedMap
from mtrain.model.transformer import Linear
from tests.support.undocumented import documented_only


def assert_close_in_bf16(low: Tensor, exact: Tensor) -> None:
    torch.testing.assert_close(low.float(), exact, rtol=0.01, atol=0.01 * float(exact.abs().max()))


@pytest.fixture(params=["packed", "plain"])
def layout(request: pytest.FixtureRequest) -> Iterator[str]:
    """How the weights are kept: as oneDNN has them, or as usual, if PyTorch lacks the operations for that."""
    if request.param == "packed":
        yield request.param
    else:
        with documented_only():
            yield request.param


@pytest.mark.parametrize("shape", [(1,), (17,), (3, 11), (2, 3, 5)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.inference_mode()
def test_low_precision_approximates_the_original(
    layout: str, shape: tuple[int], bias: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    x, weight, offset = torch.randn(*shape, 24), torch.randn(20, 24), torch.randn(20) if bias else None
    low = PackedLinear(weight, offset, dtype)
    assert low(x).shape == (*shape, 20) and low(x).dtype == dtype
    assert_close_in_bf16(low(x), F.linear(x, weight, offset))
    transposed = torch.randn(24, 7).t()  # not contiguous
    assert_close_in_bf16(low(transposed), F.linear(transposed, weight, offset))
    assert_close_in_bf16(low.slice(5, 12)(x), F.linear(x, weight, offset)[..., 5:12])
    assert low.slice(5, 12) is low.slice(5, 12)  # converted once


@pytest.mark.parametrize("rows", [1, 17])
@torch.inference_mode()
def test_packed_weights_give_the_same_as_plain_ones(rows: int) -> None:
    torch.manual_seed(1)
    x, weight, bias = torch.randn(rows, 64), torch.randn(48, 64), torch.randn(48)
    packed = PackedLinear(weight, bias, torch.bfloat16)(x)
    with documented_only():
        plain = PackedLinear(weight, bias, torch.bfloat16)(x)
    torch.testing.assert_close(packed, plain, rtol=0.01, atol=0.02)  # sums in another order


@torch.inference_mode()
def test_the_result_has_the_type_of_the_input_unless_it_stays_low(monkeypatch) -> None:
    torch.manual_seed(1)
    x, weight = torch.randn(3, 24), torch.randn(20, 24)
    packed = PackedLinear(weight, None, torch.bfloat16)
    assert linear(x, weight, None, packed).dtype == torch.float32
    monkeypatch.setattr(PackedLinear, "stays_low", True)  # as on a GPU
    assert linear(x, weight, None, packed).dtype == torch.bfloat16  # even for so small a product
    assert torch.equal(linear(x, weight, None, None), F.linear(x, weight))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@torch.inference_mode()
def test_relu_changes_only_negative_results(layout: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    packed = PackedLinear(torch.randn(20, 24), torch.randn(20), dtype)
    x = torch.randn(9, 24)
    assert torch.equal(packed.with_relu()(x), packed(x).relu())


@torch.inference_mode()
def test_slices_of_a_layer_are_parts_of_its_output(layout: str) -> None:
    torch.manual_seed(1)
    layer, x = Linear(24, 20), torch.randn(9, 24)
    packed = PackedMap(layer, PackedLinear(layer.weight, layer.bias, torch.bfloat16))
    for each in (layer, packed):
        assert each(x).dtype == each.slice(x, 4).dtype == torch.float32
        torch.testing.assert_close(each.slice(x, 4, 9), layer(x)[:, 4:9], rtol=0.01, atol=0.02)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "shape", [(96, 32), (128, 128), (128, 256), (384, 256), (800, 96), (2000, 512), (512, 2048)], ids=str
)
@torch.inference_mode()
def test_a_row_of_the_result_does_not_depend_on_the_other_rows(
    shape: tuple[int, int], dtype: torch.dtype | None
) -> None:
    torch.manual_seed(2)
    a, b, bias = torch.randn(700, shape[1] // 2), torch.randn(shape[0], shape[1] // 2), torch.zeros(shape[0])
    x, weight = torch.cat([a, a], 1), torch.cat([b, -b], 1)  # only rounding errors are left
    packed = pack(weight, bias, dtype)
    together = linear(x, weight, bias, packed)
    for rows in (4, 5, 9, 16, 23, 37, 64, 129, 300, 550):
        assert torch.equal(linear(x[:rows], weight, bias, packed), together[:rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@torch.inference_mode()
def test_packing_keeps_full_precision(layout: str, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    x, weight, bias = (torch.randn(*shape, dtype=dtype) for shape in ((9, 24), (20, 24), (20,)))
    torch.testing.assert_close(PackedLinear(weight, bias, dtype)(x), F.linear(x, weight, bias))


def test_only_large_weights_are_packed_on_a_cpu() -> None:
    small, large = torch.zeros(100, 24), torch.zeros(2000, 150)
    assert pack(small, None, None) is pack(small, None, torch.bfloat16) is None  # nothing would be faster
    packed = pack(large, None, torch.bfloat16)
    assert packed is not None and packed.dtype == torch.bfloat16 and not packed.stays_low


def test_padding_leaves_few_different_numbers_of_rows() -> None:
    assert [padded_rows(rows) for rows in (1, 7, 15, 16, 17, 64, 65, 300)] == [1, 7, 15, 16, 18, 64, 72, 320]
    assert all(rows <= padded_rows(rows) <= 1.125 * rows for rows in range(1, 5000))
    assert len({padded_rows(rows) for rows in range(1, 1025)}) < 75
