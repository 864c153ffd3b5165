"""The kernels of a decoding step against loops over rows in fp64.

Operators are tested in fp64 on a CPU, Triton's kernels in fp32, on a GPU if there is one, otherwise in
Triton's interpreter.
"""

import math
from importlib import import_module
from itertools import product
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from mtrain.kernels.decoding_step import (
    Allowed,
    add_norm,
    append_tokens,
    best_continuations,
    best_tokens,
    cross_attention,
    self_attention,
)

GPU = torch.cuda.is_available()
try:
    import_module("mtrain.kernels.triton.decoding")
    import_module("mtrain.kernels.triton.next_tokens")
    IMPLEMENTATIONS = ["operators", "triton"]
except ModuleNotFoundError:  # there is no Triton for this platform
    IMPLEMENTATIONS = ["operators"]


class Place(NamedTuple):
    """Where an implementation is tested."""

    implementation: str
    dtype: torch.dtype
    device: torch.device

    def random(self, *shape: int, seed: int = 1) -> Tensor:
        """Normally distributed numbers, the same for all implementations."""
        numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        return numbers.to(self.device, self.dtype)

    def integers(self, numbers: list[int] | list[list[int]], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(numbers, dtype=dtype, device=self.device)


@pytest.fixture(params=IMPLEMENTATIONS)
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Place:
    if request.param == "operators":
        return Place("operators", torch.float64, torch.device("cpu"))
    monkeypatch.setattr("mtrain.kernels.triton.available.suits_kernels", lambda x: True)
    return Place("triton", torch.float32, torch.device("cuda" if GPU else "cpu"))


def assert_close(found: Tensor, expected: Tensor) -> None:
    """Equal to 1e-6 of the norm."""
    found, expected = found.double().cpu(), expected.cpu()
    assert found.shape == expected.shape
    assert (found - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.parametrize("replace", [False, True])
def test_add_norm_changes_the_residual_stream_in_place(place: Place, replace: bool) -> None:
    x, y = place.random(2, 5, 24)
    norm = nn.LayerNorm(24, dtype=place.dtype, device=place.device).requires_grad_(False)
    norm.weight.copy_(place.random(24, seed=2))
    norm.bias.copy_(place.random(24, seed=3))
    added, stream = x + y, x.clone()
    precise = added.double()
    variance = precise.var(dim=1, unbiased=False, keepdim=True)
    expected = (precise - precise.mean(dim=1, keepdim=True)) / (variance + norm.eps).sqrt()
    expected = expected * norm.weight + norm.bias
    assert_close(add_norm(stream, y, norm, place.dtype, replace), expected)
    assert_close(stream, expected if replace else precise)
    torch.testing.assert_close(add_norm(added, None, norm, torch.bfloat16), expected.bfloat16())
    assert_close(added, precise)


def attended(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attention (D) of one query (D) to keys and values (X, D)."""
    return (keys @ query / math.sqrt(len(query))).softmax(dim=0) @ values


# Numbers of beams, head widths and positions.
SOME = {(1, 8, 0), (2, 24, 1), (5, 64, 15), (16, 8, 16), (1, 24, 64), (2, 64, 63), (40, 8, 1)}
ALL = product([1, 2, 5, 16, 40], [8, 24, 64], [0, 1, 15, 16, 63, 64])


@pytest.mark.parametrize(
    ("beams", "width", "position"),
    [pytest.param(*case, marks=() if case in SOME else pytest.mark.slow) for case in ALL],
)
def test_a_beam_attends_to_its_own_past(place: Place, beams: int, width: int, position: int) -> None:
    sentences, heads, positions = 2, 2, position + 2
    cache = place.random(2, sentences, heads, positions * beams, width)
    cache[:, :, :, position * beams :] = math.nan  # not yet written
    before = cache.double()
    past = (place.random(sentences, beams, positions * beams) > 0).to(torch.uint8)
    if beams == 1:
        past.fill_(1)
    projected = place.random(sentences, beams, 3, heads, width, seed=2)
    rows, given = projected.view(sentences * beams, -1), past if beams > 1 else None
    out = self_attention(rows, cache, given, place.integers([position]))
    expected = projected[:, :, 0].double()
    for sentence, beam, head in product(range(sentences), range(beams), range(heads)):
        query, key, value = projected[sentence, beam, :, head].double()
        slots = past[sentence, beam, : position * beams].nonzero()[:, 0]
        keys, values = before[:, sentence, head, slots]
        keys, values = torch.cat([keys, key[None]]), torch.cat([values, value[None]])
        expected[sentence, beam, head] = attended(query, keys, values)
    assert_close(out, expected.view(sentences * beams, -1))
    new = projected[:, :, 1:].permute(2, 0, 3, 1, 4).double()
    before[:, :, :, position * beams : (position + 1) * beams] = new
    torch.testing.assert_close(cache.double(), before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("beams", "width"), [(1, 24), (3, 64), (16, 8), (40, 8)])
def test_rows_attend_to_the_tokens_of_their_source(place: Place, beams: int, width: int) -> None:
    lengths, heads = [3, 0, 40], 2
    queries = place.random(len(lengths), beams, heads, width)
    firsts = [45, 5, 4]  # in any order; there are tokens between those of sentences, and the last one ends
    memory = place.random(48, 2, heads, width, seed=2)
    memory[[*range(4), 44]] = math.nan
    rows = queries.view(len(lengths) * beams, -1)
    spans = place.integers([[first, length] for first, length in zip(firsts, lengths, strict=True)])
    out = cross_attention(rows, memory, spans, 40)
    expected = torch.zeros_like(queries, dtype=torch.float64)
    for sentence, beam, head in product(range(len(lengths)), range(beams), range(heads)):
        span = slice(firsts[sentence], firsts[sentence] + lengths[sentence])
        keys, values = memory[span, :, head].double().unbind(1)
        expected[sentence, beam, head] = attended(queries[sentence, beam, head].double(), keys, values)
    assert_close(out, expected.view(len(rows), -1))


def permitted(allowed: Allowed, sentence: int, vocabulary: int) -> list[int]:
    """The tokens that may be generated in a sentence."""
    position = int(allowed.position)
    if allowed.prefixes is not None and position < allowed.prefixes.size(1):
        token = int(allowed.prefixes[sentence, position])
        if token >= 0:
            return [token]
    eos = [allowed.eos_id] if position + 1 < allowed.min_lengths[sentence] else []
    forbidden = [] if allowed.forbidden is None else allowed.forbidden.nonzero()[:, 0].tolist()
    return sorted({*range(vocabulary)} - {*eos, *forbidden})


@pytest.mark.parametrize(
    ("beams", "vocabulary", "prefixes"),
    [(1, 300, None), (1, 300, [[2], [2]]), (2, 1030, [[5, -1], [-1, -1]]), (3, 7, [[5, 3], [4, -1]])],
)
def test_the_best_continuations_obey_constraints_that_do_not_change_probabilities(
    place: Place, beams: int, vocabulary: int, prefixes: list[list[int]] | None
) -> None:
    k = min(2 * beams, vocabulary)
    logits = place.random(2 * beams, vocabulary)
    logits[:, 3] = 9  # EOS
    live, forbidden = place.random(2, beams, seed=2), place.random(vocabulary, seed=3) > 0.5
    forbidden[3] = False
    allowed = Allowed(
        position=place.integers([1]),
        min_lengths=place.integers([2, 3]),
        eos_id=3,
        forbidden=forbidden if prefixes else None,
        prefixes=None if prefixes is None else place.integers(prefixes),
    )
    log_probs = logits.double().log_softmax(dim=-1).view(2, beams, vocabulary)
    found = best_continuations(logits.clone(), live, k, allowed)
    for sentence in range(2):
        tokens = permitted(allowed, sentence, vocabulary)
        scores = live[sentence, :, None] + log_probs[sentence][:, tokens]
        expected = scores.flatten().sort(descending=True)
        count = min(k, len(expected.values))
        values, of_beam, chosen = (part[sentence] for part in found)
        torch.testing.assert_close(values[:count].double(), expected.values[:count], rtol=0, atol=2e-6)
        assert (values[count:] == -math.inf).all() and (chosen < vocabulary).all()
        assert of_beam[:count].tolist() == (expected.indices[:count] // len(tokens)).tolist()
        assert chosen[:count].tolist() == [tokens[i % len(tokens)] for i in expected.indices[:count].tolist()]
    if beams == 1:
        tokens, log_probs = best_tokens(logits.clone(), allowed)
        assert torch.equal(tokens, found[2][:, 0])
        torch.testing.assert_close(log_probs, found[0][:, 0] - live[:, 0], rtol=0, atol=2e-6)


@pytest.mark.parametrize("beams", [1, 90])
def test_tokens_are_appended_to_all_rows_and_probabilities_to_unfinished_ones(
    place: Place, beams: int
) -> None:
    limits, position = [4, 3], 2
    tokens = place.integers([[7] * 5 * beams] * 2).view(2, beams, 5)
    chosen = place.random(2 * beams) > 0
    chosen, unfinished = torch.where(chosen, 3, 6), place.random(2, beams, seed=2) > 0  # 3: EOS
    log_probs, gained = place.random(2, beams, seed=3), place.random(2 * beams, seed=4)
    gained[~unfinished.flatten()] = math.nan
    expected = log_probs + torch.where(unfinished, gained.view(2, beams), 0)
    going = unfinished & (chosen.view(2, beams) == 6) & (place.integers(limits) > 3)[:, None]
    last = torch.zeros_like(tokens[:, :, 0])
    state = last, tokens, log_probs, unfinished
    append_tokens(gained, chosen, state, place.integers(limits), place.integers([position]), eos_id=3)
    assert torch.equal(last.flatten(), chosen)
    assert torch.equal(tokens[:, :, position], last)
    assert (tokens[:, :, [0, 1, 3, 4]] == 7).all()
    assert torch.equal(log_probs, expected) and torch.equal(unfinished, going)


def unconstrained(place: Place) -> Allowed:
    return Allowed(position=place.integers([0]), min_lengths=place.integers([0, 0]), eos_id=3)


def test_the_first_of_equal_tokens_is_chosen(place: Place) -> None:
    logits = torch.zeros_like(place.random(2, 600))
    logits[0, [40, 41, 500]] = logits[1, [555, 599]] = 1
    allowed = unconstrained(place)
    assert best_tokens(logits.clone(), allowed)[0].tolist() == [40, 555]
    if place.implementation == "triton":  # operators choose any of them if there are several beams
        live = logits.new_zeros(2, 2)
        _, beams, tokens = best_continuations(logits[[0, 0, 1, 1]], live, 5, allowed)
        assert beams.tolist() == [[0, 0, 0, 1, 1], [0, 0, 1, 1, 0]]
        assert tokens.tolist() == [[40, 41, 500, 40, 41], [555, 599, 555, 599, 0]]


def test_failures_are_visible_and_concern_one_sentence(place: Place) -> None:
    logits, allowed = place.random(4, 150), unconstrained(place)
    live = torch.zeros_like(logits[:2, :2])
    live[1, 1] = -math.inf  # as in the first step of a beam search
    logits[0, 7] = math.nan
    log_probs, beams, tokens = best_continuations(logits, live, 2, allowed)
    assert log_probs[0].isnan().any() and log_probs[1].isfinite().all()
    assert (beams[1] == 0).all() and ((tokens >= 0) & (tokens < 150)).all()
    nothing = allowed._replace(forbidden=torch.ones_like(logits[0], dtype=torch.bool))
    log_probs, _, tokens = best_continuations(place.random(4, 150), live, 2, nothing)
    assert (log_probs == -math.inf).all() and ((tokens >= 0) & (tokens < 150)).all()
