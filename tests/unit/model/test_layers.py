"""Encoder and decoder layers against PyTorch's, feed-forward networks, dropout and residual connections."""

import math
from typing import TypeVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtrain.config.sections.model import ModelConfig
from mtrain.kernels.sequences import Padded
from mtrain.model.transformer import DecoderLayer, Dropout, EncoderLayer, FeedForward, Residual, Transformer
from tests.support.transformer import copy_layer, their_arguments

torch.set_num_threads(1)
DOUBLE = {"rtol": 0, "atol": 1e-12}
Layer = TypeVar("Layer", bound=nn.Module)


def config(**changes: object) -> ModelConfig:
    sizes = {"d_model": 12, "heads": 3, "ffn_dim": 20, "dropout": 0.0, "max_positions": 32}
    return ModelConfig(**{**sizes, "source_vocab_size": 9, "target_vocab_size": 9, **changes})


def randomized(module: Layer) -> Layer:
    """In fp64 with random parameters: initial norms and biases, ones and zeros, would hide mistakes."""
    torch.manual_seed(3)
    for parameter in module.double().parameters():
        nn.init.normal_(parameter, mean=0.1, std=0.4)
    return module


# ------------------------------------------------------------------------------------------------ layers


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_encoder_layer_equals_torch(norm: str, activation: str) -> None:
    sizes = config(norm=norm, activation=activation)
    ours, theirs = randomized(EncoderLayer(sizes)), nn.TransformerEncoderLayer(**their_arguments(sizes))
    copy_layer(ours, theirs)
    x, keep = torch.randn(3, 5, 12).double(), torch.arange(5) < torch.tensor([[5], [1], [3]])
    out, expected = ours(x.flatten(0, 1), Padded.of(x, keep)), theirs(x, src_key_padding_mask=~keep)
    torch.testing.assert_close(out.view(x.shape)[keep], expected[keep], **DOUBLE)


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_decoder_layer_equals_torch(norm: str, activation: str) -> None:
    sizes = config(norm=norm, activation=activation)
    ours, theirs = randomized(DecoderLayer(sizes)), nn.TransformerDecoderLayer(**their_arguments(sizes))
    copy_layer(ours, theirs)
    x, memory = torch.randn(3, 4, 12).double(), torch.randn(3, 5, 12).double()
    keep = torch.arange(5) < torch.tensor([[5], [1], [3]])
    causal = nn.Transformer.generate_square_subsequent_mask(4, dtype=torch.float64)
    hidden = torch.zeros(3, 5).double().masked_fill(~keep, -math.inf)
    expected = theirs(x, memory, tgt_mask=causal, memory_key_padding_mask=hidden)
    out = ours(x.flatten(0, 1), Padded.of(x), memory.flatten(0, 1), Padded.of(memory, keep))
    torch.testing.assert_close(out.view(x.shape), expected, **DOUBLE)


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", "swiglu"])
def test_feed_forward_equals_the_formula(activation: str) -> None:
    layer = randomized(FeedForward(config(activation=activation)))
    x = torch.randn(2, 3, 12).double()
    z = x @ layer.inner.weight.T + layer.inner.bias
    if activation == "swiglu":
        assert layer.inner.out_features == 40
        hidden = z[..., :20] / (1 + torch.exp(-z[..., :20])) * z[..., 20:]
    else:
        hidden = {
            "relu": z * (z > 0),
            "gelu": z * (1 + torch.erf(z / math.sqrt(2))) / 2,
            "silu": z / (1 + torch.exp(-z)),
        }[activation]
    expected = hidden @ layer.outer.weight.T + layer.outer.bias
    torch.testing.assert_close(layer(x), expected, **DOUBLE)


@pytest.mark.parametrize("rates", [{"dropout": 0.5}, {"dropout": 0.1, "activation_dropout": 0.5}])
def test_feed_forward_drops_inner_activations(rates: dict[str, float]) -> None:
    layer, x = randomized(FeedForward(config(**rates))), torch.randn(2, 3, 12).double()
    torch.manual_seed(0)
    out = layer(x)
    torch.manual_seed(0)
    hidden = Dropout(0.5)(layer.inner(x).relu())
    torch.testing.assert_close(out, layer.outer(hidden), **DOUBLE)


# ----------------------------------------------------------------------------------------------- dropout


def test_dropout_does_nothing_in_eval_or_at_rate_zero() -> None:
    x = torch.randn(5, 7)
    assert torch.equal(Dropout(0.9).eval()(x), x)
    assert torch.equal(Dropout(0.0)(x), x)


def test_dropout_of_a_model_draws_from_one_seeded_generator() -> None:
    model, x = nn.ModuleList([Dropout(0.4), Dropout(0.4)]), torch.ones(64)
    Dropout.seed(model, 5)
    state, first, second = torch.get_rng_state(), model[0](x), model[1](x)
    assert not torch.equal(first, second)  # one after the other
    assert torch.equal(torch.get_rng_state(), state)  # PyTorch's default generator is not used
    Dropout.seed(model, 5)
    assert torch.equal(model[1](x), first)


def test_dropout_of_a_model_hashes_its_masks_from_one_key() -> None:
    model, x = nn.ModuleList([Dropout(0.4), Dropout(0.4)]), torch.ones(64)
    key = torch.tensor([5], dtype=torch.int32)
    Dropout.use_key(model, key)
    first, second = model[0](x), model[1](x)
    assert torch.equal(model[0](x), first) and not torch.equal(first, second)
    key.fill_(6)
    assert not torch.equal(model[0](x), first) and not torch.equal(model[1](x), second)


def test_hashed_masks_of_sources_and_targets_are_different() -> None:
    """Although they share the module that embeds them."""
    model, ids = Transformer(config(dropout=0.4, word_dropout=0.4)).train(), torch.arange(9).repeat(2)
    Dropout.use_key(model, torch.tensor([5], dtype=torch.int32))
    found: list[Tensor] = []
    model.embed.register_forward_hook(lambda module, given, output: found.append(output == 0))
    model(ids, Padded(2, 9), ids, Padded(2, 9))
    assert found[0].any() and not torch.equal(*found)
    ones = torch.ones(64)
    assert not torch.equal(model.embed.word_dropout(ones), model.target_dropouts[1](ones))


def test_activation_dropout_of_zero_disables_dropout_in_the_feed_forward_network() -> None:
    layer, x = (
        randomized(FeedForward(config(dropout=0.5, activation_dropout=0.0))),
        torch.randn(2, 3, 12).double(),
    )
    assert torch.equal(layer(x), layer(x))


# --------------------------------------------------------------------------------------------- residuals


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_layer_norm_comes_before_the_sublayer_or_after_the_sum(norm: str) -> None:
    residual = randomized(Residual(config(norm=norm)))
    x = torch.randn(2, 3, 12).double()

    def normalize(x: Tensor) -> Tensor:
        centered = x - x.mean(-1, keepdim=True)
        scaled = centered / (centered.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return scaled * residual.norm.weight + residual.norm.bias

    h, same = residual.before(x)
    assert torch.equal(same, x)
    torch.testing.assert_close(h, normalize(x) if norm == "pre" else x, **DOUBLE)
    out = residual.after(x, h.square())
    expected = x + normalize(x).square() if norm == "pre" else normalize(x + x.square())
    torch.testing.assert_close(out, expected, **DOUBLE)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_residual_dropout_affects_the_sublayer_but_not_the_input(norm: str) -> None:
    residual = Residual(config(norm=norm, dropout=0.5)).double()
    torch.manual_seed(0)
    x = torch.randn(50, 12).double()
    out = residual.after(x, torch.ones_like(x))
    if norm == "pre":
        added = out - x
        assert set(added.round(decimals=9).unique().tolist()) == {0.0, 2.0}
    else:
        torch.manual_seed(0)
        torch.randn(50, 12)
        dropped = Dropout(0.5)(torch.ones(50, 12).double())
        torch.testing.assert_close(out, F.layer_norm(x + dropped, (12,)), **DOUBLE)
