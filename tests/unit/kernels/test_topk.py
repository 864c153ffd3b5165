"""The likeliest tokens are those that sorting finds, whatever the size of the vocabulary."""

import math

import pytest
import torch

from mtrain.kernels.topk import likeliest, likeliest_of_rows, normalizer


@pytest.mark.parametrize("vocabulary", [5, 64, 97, 160, 331, 1000, 8000])
@pytest.mark.parametrize(("beams", "count"), [(1, 1), (1, 10), (5, 10), (3, 200)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_they_are_those_of_a_full_sort(vocabulary: int, beams: int, count: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    scores = torch.randn(4 * beams, vocabulary, generator=generator, dtype=dtype)
    offsets = torch.randn(4, beams, generator=generator, dtype=dtype)
    offsets[1, 1:] = -math.inf  # as in the first step
    scores[2 * beams, : vocabulary // 2] = -math.inf  # barred
    every = (scores.view(4, beams, -1) + offsets[:, :, None]).flatten(1)
    expected = every.topk(min(count, beams * vocabulary)).values
    values, rows, tokens = likeliest(scores, offsets, count)
    finite = torch.isfinite(expected)
    width = min(values.size(1), expected.size(1))
    assert finite[:, width:].logical_not().all()
    assert torch.equal(values[:, :width], expected[:, :width])
    again = every.gather(1, (rows * vocabulary + tokens).clamp(max=every.size(1) - 1))
    assert torch.equal(again[torch.isfinite(values)], values[torch.isfinite(values)])
    picked = (rows * vocabulary + tokens)[torch.isfinite(values).all(dim=1)]
    assert all(len(set(row)) == len(row) for row in picked.tolist())
    assert (tokens[torch.isfinite(values)] < vocabulary).all()


def test_the_normalizer_is_logsumexp() -> None:
    logits = torch.randn(7, 331, dtype=torch.float64) * 30
    logits[3, :200] = -math.inf
    torch.testing.assert_close(normalizer(logits), logits.logsumexp(dim=-1, keepdim=True))


@pytest.mark.parametrize("rows", [1, 3, 4, 9])
def test_of_each_row_they_are_those_of_a_full_sort(rows: int) -> None:
    logits = torch.randn(rows, 331, generator=torch.Generator().manual_seed(rows))
    for count in (1, 2):
        for found, expected in zip(
            likeliest_of_rows(logits, count), logits.sort(descending=True), strict=True
        ):
            assert torch.equal(found, expected[:, :count])
