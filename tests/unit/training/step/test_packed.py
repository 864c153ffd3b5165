"""Packed batches give the loss and the gradients of padded ones."""

import pytest
import torch
from torch import Tensor

from mtrain.config.sections.model import ModelConfig
from mtrain.config.sections.training import TrainingConfig
from mtrain.data.epochs.batching import collate
from mtrain.data.epochs.packed_batch import AnyBatch, Layout, PackedBatch, pack, split_batches
from mtrain.model.build import build_model
from mtrain.tokenizer.rows import Rows
from mtrain.training.step.learner import Learner
from tests.support.transformer import KINDS

VOCABULARY = {"source_vocab_size": 20, "target_vocab_size": 20, "max_positions": 25}
SIZES = {"d_model": 8, "heads": 2, "ffn_dim": 12, "encoder_layers": 1, "decoder_layers": 1, "dropout": 0.0}
LENGTHS = [5, 1, 9, 3], [4, 6, 1, 2]
OTHERS = [
    *({"activation": activation} for activation in ("relu", "gelu", "silu", "swiglu")),
    {"output_bias": True, "heads": 4, "norm": "post"},
    {"encoder_layers": 2, "decoder_layers": 3, "heads": 1},
    {"encoder_layers": 3, "decoder_layers": 2, "activation_dropout": 0.0},
    {"decoder_layers": 2, "alignment_head": True},
]
CLASSIFIERS = [
    {"head": "pair_classifier", "decoder_layers": 0, "positions": positions, "norm": norm}
    for positions in ("sinusoidal", "sinusoidal_interleaved", "learned", "rotary")
    for norm in ("pre", "post")
]


def learner_of(model: dict[str, object], **recipe: object) -> Learner:
    torch.manual_seed(1)
    built = build_model(ModelConfig(**{**SIZES, **VOCABULARY, **model})).double().train()
    for parameter in built.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)  # so that no bias or norm stays at 0 or 1
    return Learner(built, TrainingConfig(max_steps=1, precision="fp32", **recipe))


def sides(is_classifier: bool = False) -> tuple[Rows, Rows]:
    generator = torch.Generator().manual_seed(2)
    source, target = (
        [[*torch.randint(4, 20, (n - 1,), generator=generator).tolist(), 3] for n in lengths]
        for lengths in LENGTHS
    )
    if is_classifier:
        source = [ids + other for ids, other in zip(source, target, strict=True)]
        target = [[1], [0], [0], [1]]
    return Rows.from_lists(source), Rows.from_lists(target)


def results(learner: Learner, batches: list[AnyBatch]) -> list[Tensor]:
    """Loss, nll and gradients of some batches, without the gradients of biases of keys, which are 0 but for
    rounding."""
    learner.model.zero_grad()
    sums = [learner.loss(learner.model, batch) for batch in batches]
    for each in sums:
        each.loss.backward()
    gradients = []
    for name, parameter in learner.model.named_parameters():
        assert parameter.grad is not None, name
        of_keys = name.endswith("query_key_value.bias")
        gradients.append(torch.cat(parameter.grad.chunk(3)[::2]) if of_keys else parameter.grad.clone())
    return [sum(each.loss.detach() for each in sums), sum(each.nll for each in sums), *gradients]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert float((ours - theirs).norm()) <= 1e-10 * float(theirs.norm())


def check(model: dict[str, object], **recipe: object) -> None:
    """Compare batches in an exact layout, in larger ones, and in parts, with the padded batch."""
    learner, rows = learner_of(model, **recipe), [0, 1, 2, 3]
    source, target = sides("head" in model)
    expected = results(learner, [collate(source, target, 0, 2, rows)])
    used = len(source.ids), len(target.ids)
    spread = Layout(used[0] + 12, used[1] + 12, 9, 20)  # surplus tokens on both sides
    empty = Layout(used[0], used[1] + 7, 8, 20)  # sequences without a source, and without anything
    for layout in (None, spread, empty):
        batch = pack(source, target, 2, rows, layout)
        assert_same(results(learner, [batch]), expected)
    assert_same(results(learner, split_batches([batch], 15)), expected)
    without = PackedBatch.without_pairs()
    assert_same(results(learner, [without, batch]), expected)
    assert not any(result.any() for result in results(learner, [without]))


@pytest.mark.parametrize("model", [*KINDS, *OTHERS, *CLASSIFIERS], ids=str)
def test_loss_and_gradients_equal_those_of_padded_batches(model):
    check(model)


@pytest.mark.parametrize(
    "model", [{}, *OTHERS[3:5], OTHERS[-1], {"positions": "rotary"}, {"positions": "learned"}], ids=str
)
@pytest.mark.parametrize("recipe", [{"r_drop": 2.0}, {"label_smoothing": 0.0}], ids=str)
def test_so_do_they_with_r_drop_and_without_label_smoothing(model, recipe):
    check(model, **recipe)


def test_words_are_dropped_in_whole_sentences():
    """The embeddings of a word in a sentence are all dropped, or none."""
    learner = learner_of({"word_dropout": 0.5, "positions": "rotary"})
    source = Rows.from_lists([[5, 6, 5, 5, 3], [5, 6, 6, 3]])
    inputs = pack(source, source, 2, [0, 1], Layout(14, 14, 4, 5)).inputs()
    model, patterns = learner.model, set()
    for _ in range(40):
        x = model.embed(inputs.source, inputs.sources, model.source_embedding, None)
        kept = x.detach().ne(0).any(dim=1).tolist()
        assert kept[0] == kept[2] == kept[3] and kept[6] == kept[7]
        patterns.add((kept[0], kept[1], kept[5], kept[6]))
    assert len(patterns) > 8  # the same word is dropped independently in each sentence


@pytest.mark.parametrize("model", [{}, CLASSIFIERS[0]], ids=str)
def test_steps_equal_those_on_padded_batches(model):
    """Equal also if memory does not suffice at first, and after a dry run."""
    source, target = sides("head" in model)
    found = []
    for batch in (collate(source, target, 0, 2, [0, 1, 2, 3]), pack(source, target, 2, [0, 1, 2, 3])):
        learner = learner_of(model, clip_norm=1.0)
        learner.dry_run(batch)
        learner.max_micro_batch_positions = batch.positions / 2
        metrics = [learner.step([batch, batch], 2 * batch.target_tokens, 1e-3).values for _ in range(3)]
        found.append([*metrics, *(parameter.detach() for parameter in learner.model.parameters())])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8)
