"""The blocks: encoder and decoder layers against PyTorch's, feed-forward, dropout and residuals."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtrain.config.schema import ModelConfig
from mtrain.model.layers import Dropout, FeedForward, Residual
from mtrain.model.transformer import DecoderLayer, EncoderLayer
from tests.support.transformer import copy_layer, their_arguments

torch.set_num_threads(1)
DOUBLE = {"rtol": 0, "atol": 1e-12}


def config(**changes: object) -> ModelConfig:
    sizes = {"d_model": 12, "heads": 3, "ffn_dim": 20, "dropout": 0.0, "max_positions": 32}
    return ModelConfig(**{**sizes, "source_vocab_size": 9, "target_vocab_size": 9, **changes})


def shaken(module: nn.Module) -> nn.Module:
    """In fp64, every parameter random: fresh norms and biases, ones and zeros, would hide a mix-up."""
    torch.manual_seed(3)
    for parameter in module.double().parameters():
        nn.init.normal_(parameter, mean=0.1, std=0.4)
    return module


# ------------------------------------------------------------------------------------------------ layers


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_encoder_layer_equals_torch(norm: str, activation: str) -> None:
    sizes = config(norm=norm, activation=activation)
    ours, theirs = shaken(EncoderLayer(sizes)), nn.TransformerEncoderLayer(**their_arguments(sizes))
    copy_layer(ours, theirs)
    x, keep = torch.randn(3, 5, 12).double(), torch.arange(5) < torch.tensor([[5], [1], [3]])
    out, expected = ours(x, keep[:, None, None]), theirs(x, src_key_padding_mask=~keep)
    torch.testing.assert_close(out[keep], expected[keep], **DOUBLE)


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_decoder_layer_equals_torch(norm: str, activation: str) -> None:
    sizes = config(norm=norm, activation=activation)
    ours, theirs = shaken(DecoderLayer(sizes)), nn.TransformerDecoderLayer(**their_arguments(sizes))
    copy_layer(ours, theirs)
    x, memory = torch.randn(3, 4, 12).double(), torch.randn(3, 5, 12).double()
    keep = torch.arange(5) < torch.tensor([[5], [1], [3]])
    causal = nn.Transformer.generate_square_subsequent_mask(4, dtype=torch.float64)
    hidden = torch.zeros(3, 5).double().masked_fill(~keep, -math.inf)
    expected = theirs(x, memory, tgt_mask=causal, memory_key_padding_mask=hidden)
    torch.testing.assert_close(ours(x, memory, keep[:, None, None]), expected, **DOUBLE)


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", "swiglu"])
def test_feed_forward_is_the_formula(activation: str) -> None:
    layer = shaken(FeedForward(config(activation=activation)))
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
    layer, x = shaken(FeedForward(config(**rates))), torch.randn(2, 3, 12).double()
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


@pytest.mark.parametrize("rate", [0.1, 0.3, 0.5, 0.9])
def test_dropout_keeps_the_right_share_and_scales_it(rate: float) -> None:
    torch.manual_seed(1)
    x = torch.full((500, 801), 3.0)
    out = Dropout(rate)(x)
    kept = out != 0
    torch.testing.assert_close(out[kept], torch.full_like(out[kept], 3 / (1 - rate)))
    deviation = math.sqrt(rate * (1 - rate) / x.numel())
    assert kept.double().mean().item() == pytest.approx(1 - rate, abs=4 * deviation)
    for part in (kept[:, i::4] for i in range(4)):  # neighbours may share a draw, but not their fate
        assert part.double().mean().item() == pytest.approx(1 - rate, abs=8 * deviation)
    flat = kept.flatten().double()
    for apart in range(1, 5):
        together = (flat[apart:] * flat[:-apart]).mean().item()
        assert together == pytest.approx((1 - rate) ** 2, abs=8 * deviation)


def test_dropout_at_a_rate_next_to_one_drops_nearly_all() -> None:
    assert Dropout(0.999999)(torch.ones(10_000)).count_nonzero() < 20


@pytest.mark.parametrize("shape", [(1,), (3,), (4,), (2, 3), (5, 1, 7), (0, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_dropout_keeps_shape_and_type(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    out = Dropout(0.5)(torch.ones(shape, dtype=dtype))
    assert out.shape == shape
    assert out.dtype == dtype


def test_dropout_is_reproducible_from_the_generator_state() -> None:
    drop, x = Dropout(0.4), torch.ones(64)
    torch.manual_seed(5)
    drop(x)
    state = torch.get_rng_state()
    first, second = drop(x), drop(x)
    torch.set_rng_state(state)
    assert torch.equal(drop(x), first)
    assert torch.equal(drop(x), second)
    assert not torch.equal(first, second)


def test_dropout_gradient_uses_the_same_mask() -> None:
    torch.manual_seed(0)
    x = torch.randn(40, 5, dtype=torch.float64).requires_grad_()
    out = Dropout(0.3)(x)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(gradient * x, out, **DOUBLE)
    assert 0 < (gradient == 0).sum() < x.numel()


def test_dropout_of_a_transposed_tensor() -> None:
    torch.manual_seed(0)
    x = torch.arange(1.0, 13.0).view(3, 4).t()
    out = Dropout(0.5)(x)
    assert torch.equal(out[out != 0], 2 * x[out != 0])


def test_no_dropout_inside_feed_forward_if_its_own_rate_is_zero() -> None:
    layer, x = (
        shaken(FeedForward(config(dropout=0.5, activation_dropout=0.0))),
        torch.randn(2, 3, 12).double(),
    )
    assert torch.equal(layer(x), layer(x))


# --------------------------------------------------------------------------------------------- residuals


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_residual_norms_before_the_sublayer_or_after_the_sum(norm: str) -> None:
    residual = shaken(Residual(config(norm=norm)))
    x, seen = torch.randn(2, 3, 12).double(), []

    def normalise(x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return scaled * residual.norm.weight + residual.norm.bias

    def sublayer(y: Tensor) -> Tensor:
        seen.append(y)
        return y.square()

    out = residual(x, sublayer)
    expected = x + normalise(x).square() if norm == "pre" else normalise(x + x.square())
    torch.testing.assert_close(out, expected, **DOUBLE)
    torch.testing.assert_close(seen[0], normalise(x) if norm == "pre" else x, **DOUBLE)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_residual_drops_the_sublayer_never_the_input(norm: str) -> None:
    residual = Residual(config(norm=norm, dropout=0.5)).double()
    torch.manual_seed(0)
    x = torch.randn(50, 12).double()
    out = residual(x, lambda y: torch.ones_like(y))
    if norm == "pre":
        added = out - x
        assert set(added.round(decimals=9).unique().tolist()) == {0.0, 2.0}
    else:
        torch.manual_seed(0)
        torch.randn(50, 12)
        dropped = Dropout(0.5)(torch.ones(50, 12).double())
        torch.testing.assert_close(out, F.layer_norm(x + dropped, (12,)), **DOUBLE)
