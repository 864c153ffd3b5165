"""The pair classifier: its encoder, its probabilities, its loss."""

import pytest
import torch
import torch.nn.functional as F

from mtrain.config.sections.model import ModelConfig
from mtrain.kernels.cross_entropy import IGNORE
from mtrain.kernels.sequences import Padded
from mtrain.model.build import build_model
from mtrain.model.classifier import PairClassifier
from mtrain.model.transformer import Transformer

torch.set_num_threads(1)
EOS, PAD = 3, 0
SIZES = {"d_model": 16, "heads": 2, "ffn_dim": 24, "encoder_layers": 2}
VOCABULARY = {"source_vocab_size": 40, "target_vocab_size": 40, "max_positions": 12}
ROWS = [[5, 6, 7, EOS, 8, 9, EOS], [10, EOS, 11, EOS], [12, 13, EOS, 14, 15, 16, 17, 18, EOS], [EOS, 20, EOS]]


def make(dtype: torch.dtype = torch.float64, **options) -> PairClassifier:
    torch.manual_seed(4)
    model = build_model(ModelConfig(**{**SIZES, **VOCABULARY, "head": "pair_classifier", **options}))
    assert isinstance(model, PairClassifier)
    return model.to(dtype).eval()


def odds_of(model: PairClassifier, rows: list[list[int]], more: int = 0) -> torch.Tensor:
    """The log-odds of rows that are padded to a common length."""
    ids, keep = padded(rows, more)
    return model(ids.flatten(), Padded.of(ids, keep))


def padded(rows: list[list[int]], more: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, rows)) + more
    ids = torch.tensor([row + [PAD] * (width - len(row)) for row in rows])
    return ids, torch.tensor([[i < len(row) for i in range(width)] for row in rows])


@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "rotary"])
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_neither_padding_nor_other_pairs_change_a_probability(positions, norm):
    model = make(positions=positions, norm=norm)
    together = odds_of(model, ROWS)
    order = [2, 0, 3, 1]
    torch.testing.assert_close(odds_of(model, [ROWS[i] for i in order], more=5), together[order])
    for row, expected in zip(ROWS, together, strict=True):
        torch.testing.assert_close(odds_of(model, [row]), expected[None])


def test_the_encoder_is_that_of_the_transformer():
    """Without embeddings of segments, and up to the first EOS, where positions start again, it computes the
    same; it takes the weights of a trained translation model."""
    torch.manual_seed(7)
    translator = Transformer(ModelConfig(**SIZES, **VOCABULARY, decoder_layers=1)).double().eval()
    model = make()
    start = model.classifier.weight.clone()
    model.start_from(translator)
    torch.nn.init.zeros_(model.segment_embedding.weight)
    assert model.classifier.weight.equal(start)
    ids, keep = padded([[5, 6, 7, 8, EOS], [9, EOS]])
    memory = translator.encode(ids, keep)
    torch.testing.assert_close(model.encode(ids, keep)[keep], memory[keep])
    pooled = torch.stack([memory[0].mean(dim=0), memory[1, :2].mean(dim=0)])
    torch.testing.assert_close(
        model(ids.flatten(), Padded.of(ids, keep)), model.classifier(pooled).squeeze(1)
    )


def test_the_sides_of_a_pair_are_distinguished():
    """By their segments, not only by their positions, which start again in the target."""
    model = make()
    one, other = odds_of(model, [[5, 6, EOS, 7, 8, EOS], [7, 8, EOS, 5, 6, EOS]])
    assert (one - other).abs() > 1e-6
    torch.nn.init.zeros_(model.segment_embedding.weight)
    one, other = odds_of(model, [[5, 6, EOS, 7, 8, EOS], [7, 8, EOS, 5, 6, EOS]])
    torch.testing.assert_close(one, other)  # the same tokens at the same positions


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_loss_is_binary_cross_entropy(dtype, smoothing):
    """Label smoothing is as in F.cross_entropy with two classes, of which one has the log-odds."""
    torch.manual_seed(1)
    odds = (3 * torch.randn(6)).to(dtype).requires_grad_()
    labels = torch.tensor([[1], [0], [IGNORE], [1], [0], [0]])
    sums = make().loss(odds, labels, smoothing, Padded.of(labels))
    keep = labels[:, 0] != IGNORE
    classes = labels[keep, 0]
    expected = F.binary_cross_entropy_with_logits(odds[keep], classes.to(dtype), reduction="sum")
    torch.testing.assert_close(sums.nll, expected)
    two = torch.stack([torch.zeros_like(odds[keep]), odds[keep]], dim=1)
    smoothed = F.cross_entropy(two.double(), classes, label_smoothing=smoothing, reduction="sum")
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(sums.loss.double(), smoothed, rtol=tolerance, atol=tolerance)
    sums.loss.backward()
    assert odds.grad is not None and odds.grad[2] == 0 and odds.grad[keep].ne(0).all()


def test_log_odds_are_not_rounded_under_autocast():
    model = make(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        odds = odds_of(model, ROWS)
    assert odds.dtype == torch.float32 and odds.bfloat16().float().ne(odds).any()
    torch.testing.assert_close(odds, odds_of(model, ROWS), rtol=0.1, atol=0.1)


def test_learned_positions_suffice_for_both_sides():
    """Each side has as many as there are; longer sequences occur only to measure memory."""
    model = make(positions="learned")
    side = [5] * 11 + [EOS]
    assert odds_of(model, [side + side, [5] * 24]).isfinite().all()
