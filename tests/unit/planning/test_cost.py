"""The formulas of costs agree with the operations that PyTorch counts in real models."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mtrain.config.sections.model import ModelConfig
from mtrain.model.transformer import Transformer
from mtrain.planning.cost import Shape, flops_of
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
        model.loss(hidden.flatten(0, -2), sides[1], 0.1).loss.backward()
    assert flops_of(config, Shape.of_lengths(sentences, source, target)) == counter.get_total_flops()


def test_r_drop_doubles_the_flops():
    config = ModelConfig(**SMALL, **WORDS, tie_embeddings="decoder")
    shape = Shape.of_lengths(5, 9, 10)
    once, twice = (flops_of(config, shape.repeated(times)) for times in (1, 2))
    assert twice == 2 * once
