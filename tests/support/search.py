"""Small models with peaked distributions, and reference implementations of search."""

import itertools

import pytest
import torch
from torch import Tensor

from mtrain.config.sections.decoding import DecodingConfig
from mtrain.config.sections.model import ModelConfig
from mtrain.decoding.search.beam import Hypothesis
from mtrain.model.transformer import Transformer
from tests.support.transformer import hidden_states

EOS = 3
USUAL, BOS_IS_PAD = {}, {"pad_id": 4, "bos_id": 4, "eos_id": 0}


def options(**changes: object) -> DecodingConfig:
    """A decoding config without validation, which does not allow a beam as wide as V**L."""
    defaults = {"max_length_ratio": 0.5, "max_length_offset": 1}
    return DecodingConfig().model_copy(update={**defaults, **changes})


def build(seed: int, vocab: int = 5, dtype: torch.dtype = torch.float64, **changes: object) -> Transformer:
    """A model with peaked distributions that depend on source and prefix."""
    sizes = {"d_model": 8, "heads": 2, "ffn_dim": 8, "encoder_layers": 1, "decoder_layers": 1}
    words = {"source_vocab_size": vocab, "target_vocab_size": vocab, "max_positions": 32}
    torch.manual_seed(seed)
    model = Transformer(ModelConfig(**{**sizes, **words, "tie_embeddings": "none", **changes}))
    for name, parameter in model.named_parameters():
        parameter.data *= 2 if "attention" in name or "output_weight" in name else 1
    return model.to(dtype).eval()


def sentences(model: Transformer, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Random padded source ids (B, S) that end in EOS, and their mask."""
    ids = model.config
    words = [token for token in range(ids.source_vocab_size) if token != ids.eos_id]
    source = torch.tensor(words)[torch.randint(len(words), (len(lengths), max(lengths)))]
    keep = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    source[torch.arange(len(lengths)), torch.tensor(lengths) - 1] = ids.eos_id
    return source.masked_fill(~keep, ids.pad_id), keep


@torch.no_grad()
def forced(model: Transformer, source: Tensor, keep: Tensor, targets: list[tuple[int, ...]]) -> list[float]:
    """Log-probabilities of complete targets of one sentence, from the model without a cache."""
    ids, longest = model.config, max(map(len, targets))
    filled = torch.tensor([[ids.bos_id, *target, *[0] * (longest - len(target))] for target in targets])
    rows = source[keep][None].expand(len(targets), -1)
    hidden = hidden_states(model, rows, torch.ones_like(rows, dtype=torch.bool), filled[:, :-1])
    steps = model.project(hidden).log_softmax(-1).gather(2, filled[:, 1:, None])[..., 0]
    return [float(row[: len(target)].sum()) for row, target in zip(steps, targets, strict=True)]


def tokens(hypothesis: Hypothesis, eos: int) -> tuple[int, ...]:
    """The ids of a hypothesis, with EOS if it is finished."""
    return (*hypothesis.ids, eos) if hypothesis.finished else tuple(hypothesis.ids)


def brute_force(
    model: Transformer, source: Tensor, keep: Tensor, limit: int, length_penalty: float
) -> list[Hypothesis]:
    """All hypotheses of a sentence of at most `limit` tokens, best first."""
    ids = model.config
    words = [token for token in range(ids.target_vocab_size) if token != ids.eos_id]
    targets = [(*p, ids.eos_id) for n in range(limit) for p in itertools.product(words, repeat=n)]
    targets += itertools.product(words, repeat=limit)
    found = []
    for target, log_prob in zip(targets, forced(model, source, keep, targets), strict=True):
        finished = target[-1] == ids.eos_id
        prefix = list(target[:-1] if finished else target)
        found.append(Hypothesis(prefix, log_prob, log_prob / len(target) ** length_penalty, finished))
    return sorted(found, key=lambda hypothesis: -hypothesis.score)


def assert_same(ours: list[Hypothesis], expected: list[Hypothesis], tolerance: float = 1e-10) -> None:
    """Assert that hypotheses are equal, and their scores up to a tolerance."""
    assert [(h.ids, h.finished) for h in ours] == [(h.ids, h.finished) for h in expected]
    for name in ("log_prob", "score"):
        assert [getattr(h, name) for h in ours] == pytest.approx(
            [getattr(h, name) for h in expected], rel=tolerance, abs=tolerance
        )
