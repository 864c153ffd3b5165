"""The loss of the alignment head."""

import pytest
import torch

from mtrain.decoding.alignment_layer import choose_alignment_layer
from mtrain.decoding.search.forced import all_attention, layer_attention
from mtrain.kernels.cross_entropy import IGNORE
from mtrain.kernels.sequences import Packed, Padded
from mtrain.model.incremental import DecodingTransformer
from mtrain.training.step.alignment_loss import alignment_loss
from mtrain.training.step.learner import Learner
from tests.support.training import batches_of

LENGTHS = [3, 1]  # of targets
LABELS = torch.tensor([[5, 6, 3], [3, IGNORE, IGNORE]])


@pytest.fixture
def weights() -> torch.Tensor:
    """(N, H, T, S); the second sentence has two source tokens."""
    scores = torch.randn(2, 4, 3, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    scores[1, :, :, 2:] = -torch.inf
    return scores.requires_grad_()


def test_it_is_a_tenth_of_the_divergence_from_the_mean_of_the_heads(weights):
    attention = weights.softmax(dim=-1)
    expected = sum(
        torch.distributions.kl_divergence(
            torch.distributions.Categorical(attention[row].mean(dim=0)[t].detach()),
            torch.distributions.Categorical(attention[row, 0, t]),
        )
        for row, length in enumerate(LENGTHS)
        for t in range(length)
    )
    padded, packed = Padded(2, 3), Packed(torch.tensor([0, 3, 4]), torch.tensor([0, 1, 2, 0]), 3)
    for labels, targets in ((LABELS, padded), (LABELS[LABELS != IGNORE], packed)):
        found = alignment_loss(attention, labels, targets)
        torch.testing.assert_close(found, expected / 10)
        twice = alignment_loss(torch.cat([attention, attention]), labels, targets.twice(), passes=2)
        torch.testing.assert_close(twice, found)
    found.backward()
    assert weights.grad[0, 0].any() and not weights.grad[:, 1:].any() and weights.grad.isfinite().all()


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_attention_to_few_tokens_does_not_overflow(parts, precision):
    """Large queries and keys of the last layer make weights round to zero. In fp16, the loss is scaled."""
    config, model, data, tokenizer = parts
    model.float().config = model.config.model_copy(update={"alignment_head": True})
    with torch.no_grad():
        model.decoder[-1].cross_attention.query_key_value.weight[: 2 * model.config.d_model] *= 8
    learner = Learner(model, config.training.model_copy(update={"precision": precision}))
    [batch] = batches_of([list(range(8))], data, tokenizer)
    skipped = [float(learner.step([batch], batch.target_tokens, 1e-4).values[3]) for _ in range(3)]
    assert skipped == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("r_drop", [0.0, 5.0])
def test_training_makes_the_first_head_match_the_mean_of_the_heads(parts, r_drop):
    """The first head only: the divergence of another head from the mean remains."""
    config, model, data, tokenizer = parts
    model.config = model.config.model_copy(update={"alignment_head": True})
    [batch] = batches_of([list(range(8))], data, tokenizer)
    learner = Learner(model, config.training.model_copy(update={"r_drop": r_drop}))

    def divergences() -> list[float]:
        inputs = batch.source, batch.source_keep, batch.labels.clamp(min=0)
        last = all_attention(DecodingTransformer(model), *inputs)["cross"][-1]
        orders = [[head, *({*range(last.size(1))} - {head})] for head in range(last.size(1))]
        return [
            float(alignment_loss(last[:, order], batch.labels, Padded.of(batch.labels))) for order in orders
        ]

    before = divergences()
    for _ in range(30):
        learner.step([batch], batch.target_tokens, 1e-3)
    after = divergences()
    assert after[0] < 0.3 * before[0] and min(after[1:]) > 2 * after[0]


def test_word_alignments_come_from_the_head(parts):
    """Of the last layer; the other layers are averaged."""
    _, model, data, tokenizer = parts
    [batch] = batches_of([[0, 1, 2]], data, tokenizer)
    inputs = batch.source, batch.source_keep, batch.labels.clamp(min=0)
    heads = all_attention(DecodingTransformer(model), *inputs)["cross"]
    model.config = model.config.model_copy(update={"alignment_head": True})
    *others, last = layer_attention(model, *inputs)
    torch.testing.assert_close(last, heads[-1][:, 0])
    for found, expected in zip(others, heads, strict=False):
        torch.testing.assert_close(found, expected.mean(dim=1))
    lines = [(pair, pair) for pair in ("I like oranges.", "She sees the bread.")]
    assert choose_alignment_layer(model, tokenizer, lines, torch.device("cpu")) is None
