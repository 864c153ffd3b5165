"""The kernels of a decoding step against loops over rows in fp64."""

import math

import pytest
import torch
from torch import Tensor, nn

from mtrain.kernels.decoding_step import (
    Allowed,
    add_norm,
    best_continuations,
    best_tokens,
    cross_attention,
    own_attention,
    wide_product,
)


@pytest.mark.parametrize("replace", [False, True])
def test_add_norm_changes_the_residual_stream_in_place(replace: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, 5, 24, generator=generator, dtype=torch.float64)
    norm = nn.LayerNorm(24, dtype=torch.float64)
    nn.init.normal_(norm.weight, generator=generator)
    nn.init.normal_(norm.bias, generator=generator)
    added, stream = x + y, x.clone()
    expected = (added - added.mean(1, keepdim=True)) / (
        added.var(1, unbiased=False, keepdim=True) + norm.eps
    ).sqrt()
    expected = expected * norm.weight + norm.bias
    torch.testing.assert_close(add_norm(stream, y, norm, torch.float64, replace), expected)
    torch.testing.assert_close(stream, expected if replace else added)
    assert torch.equal(add_norm(added, None, norm, torch.bfloat16), expected.bfloat16())


def attended(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attention (D) of one query (D) to keys and values (X, D)."""
    return (keys @ query / math.sqrt(len(query))).softmax(dim=0) @ values


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("position", [0, 1, 4])
def test_a_beam_attends_to_its_own_past(beams: int, position: int) -> None:
    generator = torch.Generator().manual_seed(beams)
    sentences, heads, width, positions = 2, 2, 6, 6
    cache = torch.randn(
        2, sentences, heads, positions * beams, width, generator=generator, dtype=torch.float64
    )
    cache[:, :, :, position * beams :] = math.nan  # not yet written
    before = cache.clone()
    past = torch.randint(2, (sentences, beams, positions * beams), generator=generator, dtype=torch.uint8)
    if beams == 1:
        past.fill_(1)
    shape = (sentences, beams, 3, heads, width)
    projected = torch.randn(shape, generator=generator, dtype=torch.float64)
    given = past if beams > 1 else None
    out = own_attention(projected.view(sentences * beams, -1), cache, given, torch.tensor([position]), 5)
    out = out.view(sentences, beams, heads, width)
    for sentence, beam, head in torch.cartesian_prod(*map(torch.arange, (sentences, beams, heads))).tolist():
        query, key, value = projected[sentence, beam, :, head]
        slots = past[sentence, beam, : position * beams].nonzero()[:, 0]
        keys, values = before[:, sentence, head, slots]
        expected = attended(query, torch.cat([keys, key[None]]), torch.cat([values, value[None]]))
        torch.testing.assert_close(out[sentence, beam, head], expected)
        assert torch.equal(cache[:, sentence, head, position * beams + beam], torch.stack([key, value]))
    assert torch.equal(cache[:, :, :, : position * beams], before[:, :, :, : position * beams])


@pytest.mark.parametrize("beams", [1, 3])
def test_rows_attend_to_the_tokens_of_their_source(beams: int) -> None:
    generator = torch.Generator().manual_seed(beams)
    lengths, heads, width = [3, 0, 5], 2, 6
    queries = torch.randn(3, beams, heads, width, generator=generator, dtype=torch.float64)
    memory = torch.randn(2, 3, heads, 5, width, generator=generator, dtype=torch.float64)
    for sentence, length in enumerate(lengths):
        memory[:, sentence, :, length:] = math.nan
    out = cross_attention(queries.view(3 * beams, -1), memory, torch.tensor(lengths, dtype=torch.int32))
    out = out.view(3, beams, heads, width)
    for sentence, beam, head in torch.cartesian_prod(*map(torch.arange, (3, beams, heads))).tolist():
        keys, values = memory[:, sentence, head, : lengths[sentence]]
        expected = attended(queries[sentence, beam, head], keys, values)
        torch.testing.assert_close(out[sentence, beam, head], expected)
    assert not out[1].any()


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


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("prefixes", [None, [[5, -1], [-1, -1]], [[5, 3], [4, -1]]])
def test_the_best_continuations_obey_constraints_that_do_not_change_probabilities(
    beams: int, prefixes: list[list[int]] | None
) -> None:
    generator = torch.Generator().manual_seed(beams)
    vocabulary, k = 300, 2 * beams
    logits = torch.randn(2 * beams, vocabulary, generator=generator, dtype=torch.float64)
    logits[:, 3] = 9  # EOS
    bias = torch.randn(vocabulary, generator=generator, dtype=torch.float64)
    live = torch.randn(2, beams, generator=generator, dtype=torch.float64)
    allowed = Allowed(
        position=torch.tensor([1]),
        min_lengths=torch.tensor([2, 3]),
        eos_id=3,
        forbidden=torch.randint(2, (vocabulary,), generator=generator, dtype=torch.bool).index_fill_(
            0, torch.tensor([3]), 0
        ),
        prefixes=None if prefixes is None else torch.tensor(prefixes),
    )
    log_probs = (logits + bias).log_softmax(dim=-1).view(2, beams, vocabulary)
    found = best_continuations(logits.clone(), live, k, allowed, bias)
    for sentence in range(2):
        tokens = permitted(allowed, sentence, vocabulary)
        scores = live[sentence, :, None] + log_probs[sentence][:, tokens]
        expected = scores.flatten().sort(descending=True)
        count = min(k, len(expected.values))
        values, of_beam, chosen = (part[sentence] for part in found)
        torch.testing.assert_close(values[:count], expected.values[:count])
        assert (values[count:] == -math.inf).all() and (chosen < vocabulary).all()
        assert of_beam[:count].tolist() == (expected.indices[:count] // len(tokens)).tolist()
        assert chosen[:count].tolist() == [tokens[i % len(tokens)] for i in expected.indices[:count].tolist()]
        if beams == 1:
            token, log_prob = best_tokens(logits.clone(), allowed, bias)
            assert token[sentence] == chosen[0]
            torch.testing.assert_close(log_prob[sentence], values[0] - live[sentence, 0])


def test_logits_in_low_precision_are_not_rounded() -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(rows, 64, generator=generator).bfloat16() for rows in (7, 50))
    logits = wide_product(x, weight)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, (x.double() @ weight.double().t()).float())
    assert wide_product(x.double(), weight.double()).dtype == torch.float64
