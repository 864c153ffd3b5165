"""The formulas of costs agree with the operations that PyTorch counts in real models."""

import re

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from mtrain.config.sections.model import ModelConfig
from mtrain.model.loss import translation_loss
from mtrain.model.transformer import Transformer
from mtrain.planning.cost import Shape, count_operations, flops_of
from tests.support.transformer import hidden_states, ids

WORDS = {"source_vocab_size": 90, "target_vocab_size": 110, "max_positions": 40}
SMALL = {"d_model": 32, "heads": 4, "encoder_layers": 2, "decoder_layers": 3, "ffn_dim": 80}


@pytest.mark.parametrize("activation", ["relu", "swiglu"])
def test_flops_of_a_step_are_those_that_pytorch_counts(activation):
    config = ModelConfig(**SMALL, **WORDS, activation=activation, tie_embeddings="decoder", dropout=0.1)
    sentences, source, target = 5, 9, 10
    model = Transformer(config).train()
    sides = ids(sentences, source, vocab=90), ids(sentences, target, vocab=110)
    with FlopCounterMode(display=False) as counter:
        hidden = hidden_states(model, sides[0], torch.ones_like(sides[0], dtype=torch.bool), sides[1])
        translation_loss(hidden, *model.projection(), sides[1], 0.1).loss.backward()
    assert flops_of(config, Shape.of_lengths(sentences, source, target)) == counter.get_total_flops()


class Operations(TorchDispatchMode):
    """Counts dispatched operations that compute something."""

    VIEWS = re.compile(
        r"aten\.(.*view|t|transpose|permute|expand|slice|select|unbind|detach|alias|.*empty.*)\b"
    )

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += self.VIEWS.match(str(function)) is None
        return function(*args, **(kwargs or {}))


def test_operations_are_about_as_many_as_pytorch_dispatches():
    """As on a GPU, attention over many tokens is a single operation, but dropout has several on a CPU."""
    for layers in ((1, 1), (3, 1), (1, 3)):
        config = ModelConfig(
            **SMALL
            | WORDS
            | {"tie_embeddings": "decoder", "dropout": 0.0}
            | {"encoder_layers": layers[0], "decoder_layers": layers[1]}
        )
        model = Transformer(config).train()
        source, target = ids(5, 80), ids(5, 80)
        with Operations() as operations:
            hidden = hidden_states(model, source, torch.ones_like(source, dtype=torch.bool), target)
            translation_loss(hidden, *model.projection(), target, 0.1).loss.backward()
        assert count_operations(config, low_precision=False) == pytest.approx(operations.count, rel=0.12)


def test_r_drop_doubles_the_flops():
    config = ModelConfig(**SMALL, **WORDS, tie_embeddings="decoder")
    shape = Shape.of_lengths(5, 9, 10)
    once, twice = (flops_of(config, shape.repeated(times)) for times in (1, 2))
    assert twice == 2 * once
