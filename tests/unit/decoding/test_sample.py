"""Drawing tokens: the right distribution, cut where it is asked to be, the same for a seed in any batch."""

import numpy as np
import pytest
import torch

from mtrain.decoding.sample import draw, uniform_numbers
from mtrain.decoding.search import search
from tests.support.search import build, options, sentences

LOGITS = torch.tensor([0.5, 2.0, -1.0, 1.0, 0.0], dtype=torch.float64)


def shares(**changes: object) -> np.ndarray:
    """How often each of five tokens is drawn by evenly spread numbers."""
    count = 20_000
    uniform = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    drawn = draw(LOGITS.expand(count, -1), uniform, options(samples=1, **changes))
    return np.bincount(drawn.numpy(), minlength=5) / count


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_shares_are_the_softmax_at_the_temperature(temperature: float) -> None:
    expected = (LOGITS / temperature).softmax(0).numpy()
    assert shares(temperature=temperature) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(("top_k", "kept"), [(1, [1]), (2, [1, 3]), (4, [1, 3, 0, 4]), (9, [1, 3, 0, 4, 2])])
def test_top_k_keeps_the_likeliest(top_k: int, kept: list[int]) -> None:
    expected = torch.zeros(5, dtype=torch.float64)
    expected[kept] = LOGITS[kept].softmax(0)
    assert shares(top_k=top_k) == pytest.approx(expected.numpy(), abs=1e-3)


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.01, [1]), (0.55, [1]), (0.6, [1, 3]), (0.93, [1, 3, 0, 4]), (1.0, [1, 3, 0, 4, 2])]
)
def test_top_p_keeps_the_fewest_that_reach_it(top_p: float, kept: list[int]) -> None:
    """Probabilities, the likeliest first: 0.566, 0.208, 0.126, 0.077, 0.028."""
    expected = torch.zeros(5, dtype=torch.float64)
    expected[kept] = LOGITS[kept].softmax(0)
    assert shares(top_p=top_p) == pytest.approx(expected.numpy(), abs=1e-3)
    if top_p == 0.93:  # of the three that top_k leaves, two reach it: 0.629 + 0.231 = 0.860, then all
        assert (shares(top_p=0.85, top_k=3) > 0).tolist() == [False, True, False, True, False]


def test_what_is_barred_is_never_drawn() -> None:
    barred = LOGITS.clone()
    barred[1] = -torch.inf
    uniform = torch.linspace(0, 1 - 1e-9, 1000, dtype=torch.float64)
    assert 1 not in draw(barred.expand(1000, -1), uniform, options(samples=1)).tolist()


def test_numbers_depend_on_key_and_seed_alone() -> None:
    both = uniform_numbers(5, [(3, 0), (7, 0)], 2, 6)
    assert torch.equal(uniform_numbers(5, [(7, 0)], 2, 9)[0, :, :6], both[1])
    different = [both[0, 0], both[0, 1], both[1, 0], uniform_numbers(6, [(3, 0)], 1, 6)[0, 0]]
    different.append(uniform_numbers(5, [(3, 1)], 1, 6)[0, 0])
    assert len({tuple(numbers.tolist()) for numbers in different}) == 5
    assert (both >= 0).all() and (both < 1).all()


def test_samples_are_drawn_from_the_model_and_the_same_in_any_batch() -> None:
    model = build(2, vocab=9)
    source, keep = sentences(model, [4, 11, 7, 9])
    config = options(samples=5, max_length_ratio=1.0, seed=3)
    keys = [(n, 0) for n in range(4)]
    together = search([model], source, keep, config, None, keys)
    for row in range(4):
        alone = search([model], source[row : row + 1], keep[row : row + 1], config, None, keys[row : row + 1])
        assert [h.ids for h in alone[0]] == [h.ids for h in together[row]]
    assert len({tuple(h.ids) for hypotheses in together for h in hypotheses}) > 15
    assert together != search([model], source, keep, config.model_copy(update={"seed": 4}), None, keys)
    for hypotheses in together:
        assert [h.score for h in hypotheses] == sorted((h.score for h in hypotheses), reverse=True)


def test_first_tokens_of_many_samples_follow_the_model() -> None:
    model = build(4, vocab=6)
    source, keep = sentences(model, [5])
    count = 4000
    found = search([model], source, keep, options(samples=count, max_length_ratio=0.0), None, [(0, 0)])[0]
    firsts = [(*h.ids, 3)[0] for h in found]
    with torch.no_grad():
        logits = model.project(model(source, keep, torch.tensor([[2]])))[0, 0]
    expected = logits.softmax(0).numpy()
    assert np.bincount(firsts, minlength=6) / count == pytest.approx(expected, abs=4 * 0.5 / count**0.5)
