"""Rounded logits lead to the same candidates and scores as logits in full precision."""

import pytest
import torch

from mtrain.config.decoding import DecodingConfig
from mtrain.config.model import ModelConfig
from mtrain.decoding.predictor import Predictor
from mtrain.decoding.search import search
from mtrain.kernels.topk import logsumexp
from mtrain.model.transformer import Transformer


def predictor_of(model: Transformer, beams: int) -> Predictor:
    torch.manual_seed(1)
    return Predictor([model], torch.randint(4, 2000, (6, 5)), torch.ones(6, 5, dtype=torch.bool), beams, 9)


@pytest.mark.parametrize("beam_size", [1, 4])
def test_a_forced_eos_has_probability_one_in_low_precision(monkeypatch, beam_size: int) -> None:
    torch.manual_seed(0)
    sizes = {"d_model": 32, "heads": 2, "encoder_layers": 1, "decoder_layers": 1, "output_bias": True}
    vocabulary = {"source_vocab_size": 50, "target_vocab_size": 50, "max_positions": 9}
    model = Transformer(ModelConfig(**sizes, **vocabulary)).eval()
    model.output_bias.data[3] = -30  # EOS is improbable unless forced
    config = DecodingConfig(
        beam_size=beam_size, max_length_ratio=0.0, max_length_offset=6, force_eos=True, length_penalty=0.0
    )
    monkeypatch.setattr("mtrain.kernels.linear.MIN_WEIGHT_ELEMENTS", 0)
    source, kept = torch.randint(4, 50, (5, 4)), torch.ones(5, 4, dtype=torch.bool)
    for sentence in search([model.for_decoding(torch.bfloat16)], source, kept, config):
        best = sentence[0]
        assert best.finished and len(best.ids) == 5 and -30 < best.log_prob < 0


@torch.inference_mode()
def test_candidates_of_a_rounded_projection_are_those_of_full_precision(monkeypatch) -> None:
    torch.manual_seed(0)
    sizes = {"d_model": 32, "heads": 2, "encoder_layers": 1, "decoder_layers": 1, "output_bias": True}
    model = Transformer(
        ModelConfig(**sizes, source_vocab_size=2000, target_vocab_size=2000, max_positions=9)
    ).eval()
    model.source_embedding.weight.data *= 8  # logits as large as a trained model's, where bf16 is coarse
    model.output_bias.data.normal_()
    monkeypatch.setattr("mtrain.kernels.linear.MIN_WEIGHT_ELEMENTS", 0)
    low = model.for_decoding(torch.bfloat16)
    for layer in low.modules():
        layer.packed = None  # only the projection is rounded
    beams, live = 3, -torch.rand(6, 3).sort(dim=1).values
    last = torch.randint(4, 2000, (6 * beams,))
    exact, rough = predictor_of(model, beams), predictor_of(low, beams)
    logits, coarse = exact.step(last), rough.step(last)
    assert (logits - coarse).abs().max() > 0.05
    totals, coarse_totals = logsumexp(logits), logsumexp(coarse)
    logits[:, 7] = coarse[:, 7] = -torch.inf  # forbidden
    best, values = rough.argmax(coarse)
    assert (best == exact.argmax(logits)[0]).float().mean() > 0.9
    there = best[:, None]
    torch.testing.assert_close(values, logits.gather(1, there)[:, 0], rtol=0, atol=1e-4)
    assert (coarse.gather(1, there)[:, 0] - values).abs().max() > 0.02  # the rounding that was undone
    scores, parents, tokens = exact.topk(logits, totals, live, 6)
    found, their_parents, their_tokens = rough.topk(coarse, coarse_totals, live, 6)
    torch.testing.assert_close(found[:, :4], scores[:, :4], rtol=0, atol=2e-3)
    assert (their_tokens[:, :4] == tokens[:, :4]).float().mean() > 0.9
    assert (their_parents[:, :4] == parents[:, :4]).float().mean() > 0.9
    uncorrected = live - coarse_totals.view_as(live)
    rows = their_parents + torch.arange(6)[:, None] * beams
    plain = uncorrected.gather(1, their_parents) + coarse[rows, their_tokens]
    assert (plain - found).abs().max() > 0.02  # the rounding that was undone


@pytest.mark.parametrize("biases", [(90.0, 90.004), (90.004, 90.0)])
@torch.inference_mode()
def test_the_better_of_two_tokens_with_equal_rounded_logits_is_found(
    monkeypatch, biases: tuple[float, float]
) -> None:
    torch.manual_seed(0)
    sizes = {"d_model": 32, "heads": 2, "encoder_layers": 1, "decoder_layers": 1, "output_bias": True}
    vocabulary = {"source_vocab_size": 2000, "target_vocab_size": 2000, "max_positions": 9}
    model = Transformer(ModelConfig(**sizes, **vocabulary)).eval()
    model.source_embedding.weight.data[11] = model.source_embedding.weight.data[10]
    model.output_bias.data[10:12] = torch.tensor(biases)
    monkeypatch.setattr("mtrain.kernels.linear.MIN_WEIGHT_ELEMENTS", 0)
    predictor = predictor_of(model.for_decoding(torch.bfloat16), 1)
    tokens, _ = predictor.argmax(predictor.step(torch.full((6,), 2)))
    assert tokens.tolist() == [10 + (biases[1] > biases[0])] * 6


@pytest.mark.parametrize("scored", [True, False])
def test_logits_that_overflow_in_fp16_are_not_taken_for_finite(monkeypatch, scored: bool) -> None:
    torch.manual_seed(0)
    sizes = {"d_model": 32, "heads": 2, "encoder_layers": 1, "decoder_layers": 1, "tie_embeddings": "none"}
    vocabulary = {"source_vocab_size": 50, "target_vocab_size": 50, "max_positions": 9}
    model = Transformer(ModelConfig(**sizes, **vocabulary)).eval()
    model.output_weight.data *= 60_000
    monkeypatch.setattr("mtrain.kernels.linear.MIN_WEIGHT_ELEMENTS", 0)
    source, kept = torch.randint(4, 50, (2, 4)), torch.ones(2, 4, dtype=torch.bool)
    config = DecodingConfig(beam_size=1, max_length_ratio=0.0, max_length_offset=6)
    for [best] in search([model.for_decoding(torch.float16)], source, kept, config, scored=scored):
        assert not best.log_prob < torch.inf
