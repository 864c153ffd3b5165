"""Decoding in buffers of fixed shapes against the model on whole sequences."""

import gc
import weakref

import pytest
import torch
from torch import Tensor

from mtrain.kernels.sequences import Packed
from mtrain.model.incremental import DecodingTransformer
from mtrain.model.static_decoder import StaticDecoder
from tests.support.search import build
from tests.support.transformer import hidden_states

SOURCE = torch.tensor([[4, 5, 6, 3], [6, 3, 0, 0]])
SPANS = torch.tensor([[0, 4], [4, 2]])
TARGET = torch.tensor([[2, 5, 4, 6], [2, 6, 6, 4]])


def logits_of(decoder: StaticDecoder, target: Tensor, start: int = 0) -> Tensor:
    """Logits (B, T, V) after each token of targets (B, T), which begin at a position."""
    found = []
    for number, tokens in enumerate(target.T):
        position = torch.tensor([start + number])
        found.append(decoder.decode_next(tokens[:, None], None, position, SPANS[: len(target)]))
    return torch.stack(found, dim=1)


@torch.no_grad()
@pytest.mark.parametrize("positions", ["sinusoidal", "rotary"])
def test_logits_are_those_of_whole_sequences(positions):
    model = build(3, vocab=9, positions=positions, output_bias=True)
    decoder = StaticDecoder(DecodingTransformer(model), 2, 1, source_length=4, positions=6)
    starts, place = torch.tensor([0, 4, 6]), torch.tensor([0, 1, 2, 3, 0, 1])
    decoder.encode(SOURCE[SOURCE != 0], Packed(starts.int(), place.int(), longest=4))
    hidden = hidden_states(model, SOURCE, SOURCE != 0, TARGET)
    weight, bias = model.projection()
    expected = torch.nn.functional.linear(hidden, weight, bias)
    torch.testing.assert_close(logits_of(decoder, TARGET[:, :2]), expected[:, :2])
    decoder.move(torch.tensor([1]), 2)  # the first sentence has ended
    found = decoder.decode_next(TARGET[1:, 2:3], None, torch.tensor([2]), SPANS[1:])
    torch.testing.assert_close(found, expected[1:, 2])


@torch.no_grad()
def test_the_table_of_positions_that_a_graph_reads_is_kept():
    model = DecodingTransformer(build(3, vocab=9, max_positions=3000))
    decoder, embed = StaticDecoder(model, 1, 1, source_length=1100, positions=6), model.packed.embed
    table = weakref.ref(next(embed.buffers()))
    embed.positions(0, 5000, None)  # as a longer source in another session does
    gc.collect()
    assert table() is not None and table() is not next(embed.buffers())
    assert len(decoder.source_table) == 1100
