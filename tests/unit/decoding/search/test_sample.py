"""Sampling: the right distribution, truncated as requested, and the same samples for a seed in any batch."""

import numpy as np
import pytest
import torch
from torch import Tensor

from mtrain.decoding.search.sample import draw, gumbel_noise, noise_keys
from mtrain.decoding.search.search import search
from mtrain.model.incremental import DecodingTransformer
from tests.support.search import build, options, sentences
from tests.support.transformer import hidden_states

LOGITS = torch.tensor([0.5, 2.0, -1.0, 1.0, 0.0], dtype=torch.float64)
DRAWS = 100_000


def keys(count: int) -> Tensor:
    return noise_keys(1, [(0, 0)], 1, count)[0, 0]


def shares(logits: Tensor = LOGITS, **changes: object) -> np.ndarray:
    """How often each of five tokens is drawn."""
    drawn = draw(logits.expand(DRAWS, -1), keys(DRAWS), options(samples=1, **changes))
    return np.bincount(drawn.numpy(), minlength=5) / DRAWS


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_shares_are_the_softmax_at_the_temperature(temperature: float) -> None:
    expected = (LOGITS / temperature).softmax(0).numpy()
    assert shares(temperature=temperature) == pytest.approx(expected, abs=6e-3)


@pytest.mark.parametrize(("top_k", "kept"), [(1, [1]), (2, [1, 3]), (4, [1, 3, 0, 4]), (9, [1, 3, 0, 4, 2])])
def test_top_k_keeps_the_most_probable(top_k: int, kept: list[int]) -> None:
    expected = torch.zeros(5, dtype=torch.float64)
    expected[kept] = LOGITS[kept].softmax(0)
    found = shares(top_k=top_k)
    assert found == pytest.approx(expected.numpy(), abs=6e-3)
    assert set(np.flatnonzero(found)) == set(kept)


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.01, [1]), (0.55, [1]), (0.6, [1, 3]), (0.93, [1, 3, 0, 4]), (1.0, [1, 3, 0, 4, 2])]
)
def test_top_p_keeps_the_fewest_that_reach_it(top_p: float, kept: list[int]) -> None:
    """Probabilities in descending order: 0.566, 0.208, 0.126, 0.077, 0.028."""
    expected = torch.zeros(5, dtype=torch.float64)
    expected[kept] = LOGITS[kept].softmax(0)
    found = shares(top_p=top_p)
    assert found == pytest.approx(expected.numpy(), abs=6e-3)
    assert set(np.flatnonzero(found)) == set(kept)


def test_top_p_applies_to_what_top_k_leaves() -> None:
    """The three tokens that top_k leaves have probabilities 0.629, 0.231 and 0.140: two reach 0.85."""
    assert (shares(top_p=0.85, top_k=3) > 0).tolist() == [False, True, False, True, False]


def test_a_forbidden_token_is_never_drawn() -> None:
    masked = LOGITS.clone()
    masked[1] = -torch.inf
    assert shares(masked)[1] == 0


def test_noise_has_the_gumbel_distribution_and_independent_entries() -> None:
    noise = gumbel_noise(keys(500), 2000).double()
    assert noise.isfinite().all()
    uniform = (-(-noise).exp()).exp().flatten().sort().values  # by the distribution function of Gumbel
    expected = torch.linspace(0, 1, uniform.numel(), dtype=torch.float64)
    assert (uniform - expected).abs().max() < 3 / uniform.numel() ** 0.5
    assert torch.corrcoef(noise[:50]).fill_diagonal_(0).abs().max() < 0.12  # of 50 keys
    assert torch.corrcoef(noise.T[:50]).fill_diagonal_(0).abs().max() < 0.24  # of 50 neighboring tokens


def test_noise_is_finite_where_fp32_rounds_to_one() -> None:
    """Otherwise, the only token that is allowed would not be drawn."""
    key, token = torch.tensor([35508564], dtype=torch.int32), 7
    assert gumbel_noise(key, 8).isfinite().all()
    only = torch.full((1, 8), -torch.inf)
    only[0, token] = 0.0
    assert draw(only, key, options(samples=1)).item() == token


def test_rounding_hardly_ever_changes_a_draw() -> None:
    """As a batch of another size may round a model's logits, on a GPU for example."""
    torch.manual_seed(0)
    logits = 3 * torch.randn(1000, 8000)
    rounded = logits + 1e-5 * torch.randn_like(logits)
    drawn, again = (draw(rows, keys(1000), options(samples=1)) for rows in (logits, rounded))
    assert (drawn != again).sum() <= 1
    assert len(drawn.unique()) > 300


def test_noise_depends_on_key_and_seed_alone() -> None:
    both = noise_keys(5, [(3, 0), (7, 0)], 2, 6)
    assert torch.equal(noise_keys(5, [(7, 0)], 2, 9)[0, :, :6], both[1])
    different = [both[0, 0], both[0, 1], both[1, 0], noise_keys(6, [(3, 0)], 1, 6)[0, 0]]
    different.append(noise_keys(5, [(3, 1)], 1, 6)[0, 0])
    assert len({tuple(numbers.tolist()) for numbers in different}) == 5


def test_samples_are_drawn_from_the_model_and_the_same_in_any_batch() -> None:
    model = build(2, vocab=9)
    source, keep = sentences(model, [4, 11, 7, 9])
    config = options(samples=5, max_length_ratio=1.0, seed=3)
    numbers = [(n, 0) for n in range(4)]
    together = search([DecodingTransformer(model)], source, keep, config, None, numbers)
    for row in range(4):
        rows = slice(row, row + 1)
        alone = search([DecodingTransformer(model)], source[rows], keep[rows], config, None, numbers[rows])
        assert [h.ids for h in alone[0]] == [h.ids for h in together[row]]
    assert len({tuple(h.ids) for hypotheses in together for h in hypotheses}) > 15
    assert together != search(
        [DecodingTransformer(model)], source, keep, config.model_copy(update={"seed": 4}), None, numbers
    )
    for hypotheses in together:
        assert [h.score for h in hypotheses] == sorted((h.score for h in hypotheses), reverse=True)


def test_first_tokens_of_many_samples_follow_the_model() -> None:
    model = build(4, vocab=6)
    source, keep = sentences(model, [5])
    count = 4000
    found = search(
        [DecodingTransformer(model)],
        source,
        keep,
        options(samples=count, max_length_ratio=0.0),
        None,
        [(0, 0)],
    )[0]
    firsts = [(*h.ids, 3)[0] for h in found]
    with torch.no_grad():
        logits = model.project(hidden_states(model, source, keep, torch.tensor([[2]])))[0, 0]
    expected = logits.softmax(0).numpy()
    assert np.bincount(firsts, minlength=6) / count == pytest.approx(expected, abs=4 * 0.5 / count**0.5)
