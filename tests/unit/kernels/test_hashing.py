"""Hashed masks: their rate, and that elements, seeds and neighbors are independent."""

import math

import pytest
import torch
from torch import Tensor

from mtrain.kernels.hashing import kept, lowbias32, threshold

SIZE = 2**19
INDEX = torch.arange(SIZE, dtype=torch.int32)


def mask(key: int, rate: float, salt: int = 0) -> Tensor:
    keys, salts = torch.tensor([[key], [salt]], dtype=torch.int32)
    return kept(INDEX, keys, salts, rate).double()


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.3, 0.5, 0.9])
def test_the_share_of_zeros(rate: float) -> None:
    deviation = math.sqrt(rate * (1 - rate) / SIZE)
    for key in (0, 1, -1, 123456789):
        assert mask(key, rate).mean().item() == pytest.approx(1 - rate, abs=4 * deviation)
    assert (threshold(rate) + 2**31) / 2**32 == pytest.approx(rate, abs=1e-9)


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_neighbors_are_independent(rate: float) -> None:
    flat = mask(42, rate)
    for distance in (1, 2, 3, 4, 8, 16, 64, 128, 512, 2048, 65536):
        both = (flat[distance:] * flat[:-distance]).mean().item()
        assert both == pytest.approx((1 - rate) ** 2, abs=4 / math.sqrt(SIZE - distance))


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_masks_of_different_keys_and_salts_are_independent(rate: float) -> None:
    """Also for keys that differ in one bit only, and at other indices."""
    first = mask(42, rate)
    for key, salt in ((43, 0), (42 - 2**31, 0), (-43, 0), (42, 1), (42, 2), (42, 31)):
        second = mask(key, rate, salt)
        for shift in (0, 1, 2, 3, 31, 64, 1 << 16):
            both = (first * second[INDEX ^ shift]).mean().item()
            assert both == pytest.approx((1 - rate) ** 2, abs=4 / math.sqrt(SIZE))


def test_rows_and_columns_of_a_matrix_have_the_same_rate() -> None:
    by_row = mask(7, 0.1).view(-1, 512)
    for dim, size in ((0, len(by_row)), (1, 512)):
        deviation = by_row.mean(dim).std().item()
        assert deviation == pytest.approx(math.sqrt(0.09 / size), rel=0.15)


def test_the_hash_is_a_bijection_for_each_seed() -> None:
    x = torch.arange(-(2**16), 2**16, dtype=torch.int32)
    for seed in (None, torch.tensor([99], dtype=torch.int32)):
        assert len(lowbias32(x, seed).unique()) == len(x)
