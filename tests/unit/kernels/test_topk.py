"""Top-k selection against a full sort with torch.topk."""

import math

import pytest
import torch

from mtrain.kernels import topk
from mtrain.kernels.topk import beam_topk, logsumexp, row_topk


@pytest.mark.parametrize("vocab_size", [5, 64, 97, 160, 331, 1000, 8000])
@pytest.mark.parametrize(("beams", "k"), [(1, 1), (1, 10), (5, 10), (3, 200)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_beam_topk_equals_topk_over_all_beams(
    vocab_size: int, beams: int, k: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    scores = torch.randn(4 * beams, vocab_size, generator=generator, dtype=dtype)
    offsets = torch.randn(4, beams, generator=generator, dtype=dtype)
    offsets[1, 1:] = -math.inf  # as in the first step of a beam search
    scores[2 * beams, : vocab_size // 2] = -math.inf  # forbidden tokens
    totals = (scores.view(4, beams, -1) + offsets[:, :, None]).flatten(1)
    expected = totals.topk(min(k, beams * vocab_size)).values
    values, rows, tokens = beam_topk(scores, offsets, k)
    finite = torch.isfinite(expected)
    width = min(values.size(1), expected.size(1))
    assert finite[:, width:].logical_not().all()
    assert torch.equal(values[:, :width], expected[:, :width])
    again = totals.gather(1, (rows * vocab_size + tokens).clamp(max=totals.size(1) - 1))
    assert torch.equal(again[torch.isfinite(values)], values[torch.isfinite(values)])
    index = (rows * vocab_size + tokens)[torch.isfinite(values).all(dim=1)]
    assert all(len(set(row)) == len(row) for row in index.tolist())
    assert (tokens < vocab_size).all()


def test_logsumexp_equals_torch() -> None:
    logits = torch.randn(7, 331, dtype=torch.float64) * 30
    logits[3, :200] = -math.inf
    torch.testing.assert_close(logsumexp(logits), logits.logsumexp(dim=-1, keepdim=True))


def test_logsumexp_in_chunks_equals_that_of_single_rows() -> None:
    logits = torch.randn(7, topk.CHUNK // 3)  # chunks of three rows and one
    assert torch.equal(logsumexp(logits), torch.cat([logsumexp(row[None]) for row in logits]))
    assert logsumexp(logits[:0]).shape == (0, 1)


@pytest.mark.parametrize("rows", [1, 3, 4, 9])
@pytest.mark.parametrize("k", [1, 2])
def test_row_topk_equals_a_full_sort(rows: int, k: int) -> None:
    logits = torch.randn(rows, 331, generator=torch.Generator().manual_seed(rows))
    for found, expected in zip(row_topk(logits, k), logits.sort(descending=True), strict=True):
        assert torch.equal(found, expected[:, :k])


@pytest.mark.parametrize("rows", [3, 20])
@pytest.mark.parametrize("k", [1, 2, 400])
def test_all_tokens_are_in_the_vocabulary_even_if_few_are_allowed(rows: int, k: int) -> None:
    logits = torch.full((rows, 331), -math.inf)
    logits[:, 330] = 1.0
    values, tokens = row_topk(logits, k)
    assert (tokens[:, 0] == 330).all() and (values[:, 0] == 1).all()
    assert (tokens <= 330).all() and (values[:, 1:] == -math.inf).all()
    _, _, tokens = beam_topk(logits, torch.zeros(1, rows), max(k, rows + 1))
    assert (tokens[:, :rows] == 330).all() and (tokens <= 330).all()


@pytest.mark.parametrize("vocab_size", [331, 8000])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_choice_among_equal_entries_does_not_depend_on_the_other_rows(vocab_size: int, k: int) -> None:
    logits = torch.randint(0, 5, (40, vocab_size), generator=torch.Generator().manual_seed(k)).float()
    _, tokens = row_topk(logits, k)
    for rows in (1, 3, 4, 15, 16):
        assert torch.equal(row_topk(logits[:rows], k)[1], tokens[:rows])
        for beams in (1, 3):
            offsets = torch.zeros(39 // beams, beams)
            _, _, together = beam_topk(logits[:39], offsets, k)
            alone = beam_topk(logits[: rows * beams], offsets[:rows], k)[2] if rows * beams < 39 else together
            assert torch.equal(alone, together[: len(alone)])
