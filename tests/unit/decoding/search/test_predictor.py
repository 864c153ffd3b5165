"""Rounded logits lead to the same candidates and scores as logits in full precision, and finished sentences
leave the batch."""

import pytest
import torch
from torch import Tensor

from mtrain.config.sections.decoding import DecodingConfig
from mtrain.config.sections.model import ModelConfig
from mtrain.decoding.search.forced import all_attention, cross_attention, forced_log_probs, layer_attention
from mtrain.decoding.search.predictor import Predictor, remaining_sentences
from mtrain.decoding.search.search import search
from mtrain.kernels.attention.dispatch import recording
from mtrain.kernels.topk import logsumexp
from mtrain.model.incremental import DecodingTransformer
from mtrain.model.transformer import Transformer
from tests.support.search import EOS, build, options
from tests.support.transformer import hidden_states


def predictor_of(model: DecodingTransformer, beams: int) -> Predictor:
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
    for sentence in search([DecodingTransformer(model, torch.bfloat16)], source, kept, config):
        best = sentence[0]
        assert best.finished and len(best.ids) == 5 and -30 < best.log_prob < 0


def exact_and_rounded(monkeypatch, vocab_size: int = 2000) -> tuple[Transformer, DecodingTransformer]:
    """A model, and a copy that projects to logits in bf16."""
    torch.manual_seed(0)
    sizes = {"d_model": 32, "heads": 2, "encoder_layers": 1, "decoder_layers": 1, "output_bias": True}
    vocabulary = {"source_vocab_size": vocab_size, "target_vocab_size": vocab_size, "max_positions": 9}
    model = Transformer(ModelConfig(**sizes, **vocabulary)).eval()
    model.source_embedding.weight.data *= 8  # logits as large as a trained model's, where bf16 is coarse
    model.output_bias.data.normal_()
    monkeypatch.setattr("mtrain.kernels.linear.MIN_WEIGHT_ELEMENTS", vocab_size * 32)
    return model, DecodingTransformer(model, torch.bfloat16)  # only the projection is rounded


@torch.inference_mode()
def test_candidates_of_a_rounded_projection_are_those_of_full_precision(monkeypatch) -> None:
    model, low = exact_and_rounded(monkeypatch)
    beams, live = 3, -torch.rand(6, 3).sort(dim=1).values
    last = torch.randint(4, 2000, (6 * beams,))
    exact, rough = predictor_of(DecodingTransformer(model), beams), predictor_of(low, beams)
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


@torch.inference_mode()
def test_scores_and_samples_of_a_rounded_projection_are_those_of_full_precision(monkeypatch) -> None:
    model, low = exact_and_rounded(monkeypatch)
    source, keep = torch.randint(4, 2000, (20, 5)), torch.ones(20, 5, dtype=torch.bool)
    # At a high temperature, or the most probable tokens, whose probabilities are close to 1, would be drawn.
    config = options(samples=1, temperature=8.0, max_length_ratio=0.0, max_length_offset=6)
    samples = [best for [best] in search([low], source, keep, config, keys=[(n, 0) for n in range(20)])]
    targets = torch.tensor([[*best.ids, EOS, *[EOS] * 6][:6] for best in samples])
    lengths = torch.tensor([len(best.ids) + best.finished for best in samples])
    generated = torch.arange(6) < lengths[:, None]

    bos = torch.full((20, 1), model.config.bos_id)
    hidden = hidden_states(model, source, keep, torch.cat([bos, targets[:, :-1]], dim=1))
    rounded = low.project(hidden).float().log_softmax(dim=-1).gather(2, targets[..., None])[..., 0]
    expected = forced_log_probs([DecodingTransformer(model)], source, keep, targets)
    scored = forced_log_probs([low], source, keep, targets)
    errors = [(steps - expected)[generated].abs() for steps in (rounded, scored)]
    assert errors[0].max() > 0.1 and errors[1].max() < 2e-3
    of_samples = torch.tensor([best.log_prob for best in samples])
    torch.testing.assert_close(of_samples, (scored * generated).sum(dim=1), rtol=0, atol=2e-3)


@torch.inference_mode()
def test_candidates_that_do_not_exist_are_not_taken_for_the_last_token(monkeypatch) -> None:
    """If more candidates are asked for than there are tokens, `beam_topk` repeats the last token."""
    _, low = exact_and_rounded(monkeypatch, vocab_size=2003)
    predictor = predictor_of(low, 3)
    logits = predictor.step(torch.full((18,), 2))
    normalizers = logsumexp(logits)
    logits[:, :2002] = -torch.inf
    log_probs, _, tokens = predictor.topk(logits, normalizers, torch.zeros(6, 3), 10_000)
    assert (tokens[:, :3] == 2002).all() and tokens.max() == 2002
    assert (log_probs[:, :3] > -torch.inf).all() and (log_probs[:, 3:] == -torch.inf).all()


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
    predictor = predictor_of(DecodingTransformer(model, torch.bfloat16), 1)
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
    for [best] in search([DecodingTransformer(model, torch.float16)], source, kept, config, scored=scored):
        assert not best.log_prob < torch.inf


@torch.inference_mode()
def test_the_attention_of_one_layer_is_that_of_all_layers() -> None:
    model = DecodingTransformer(build(0, decoder_layers=3))
    source, keep = torch.randint(5, (4, 3)), torch.ones(4, 3, dtype=torch.bool)
    targets = torch.randint(5, (4, 4))
    layers = layer_attention(model, source, keep, targets)
    for layer, expected in ((0, layers[0]), (1, layers[1]), (None, layers[2]), (7, layers[2])):
        torch.testing.assert_close(cross_attention([model], source, keep, targets, layer), expected)


@torch.inference_mode()
def test_attention_in_low_precision_is_averaged_in_full_precision() -> None:
    model = DecodingTransformer(build(0, dtype=torch.float16))
    source, keep = torch.randint(5, (4, 3)), torch.ones(4, 3, dtype=torch.bool)
    targets = torch.randint(5, (4, 4))
    [averaged] = layer_attention(model, source, keep, targets)
    [of_heads] = all_attention(model, source, keep, targets)["cross"]
    assert averaged.dtype == torch.float32 and (averaged.half() != averaged).any()  # it is not rounded
    torch.testing.assert_close(averaged, of_heads.mean(dim=1), rtol=0, atol=2e-3)
    one, other = (Predictor([model], source, keep, 1, 4) for _ in range(2))
    with recording(cross_from=0) as weights:
        model.decode_next(targets[:, 0], other.caches[0])
    _, averaged = one.step_with_attention(targets[:, 0])
    assert torch.equal(averaged, weights[-1][:, :, -1].float().mean(dim=1))


class OnGpu(Tensor):
    """A tensor that claims to be on a GPU."""

    device = torch.device("cuda")


@pytest.mark.parametrize(
    ("active", "rows", "kept"),
    [
        ([1] * 9 + [0], 1, None),  # few have finished
        ([1] * 6 + [0] * 4, 1, [0, 1, 2, 3, 4, 5]),
        ([0, 1, 0, 0, 1, 0, 0, 0], 1, [0, 1, 2, 4]),  # on a CPU, two finished ones complete the four rows
        ([0, 1, 0, 0, 0, 0, 0, 1], 2, [1, 7]),
        ([0, 0, 0, 1], 3, [0, 3]),
        ([0, 1, 0, 0], 1, None),
        ([0, 0, 0, 0], 1, []),
    ],
)
def test_finished_sentences_are_removed_as_far_as_enough_rows_remain(active, rows, kept) -> None:
    mask = torch.tensor(active, dtype=torch.bool)
    found = remaining_sentences(mask, rows)
    assert (None if found is None else found.tolist()) == kept
    found = remaining_sentences(mask.as_subclass(OnGpu), rows)  # where the number of rows does not matter
    if sum(active) > 0.8 * len(active):
        assert found is None
    else:
        assert found is not None and found.tolist() == [i for i, is_active in enumerate(active) if is_active]
