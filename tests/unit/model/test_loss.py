"""The fused projection and loss against torch.nn.functional.cross_entropy."""

import pyarrow as pa
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from mtrain.config.schema import ModelConfig
from mtrain.data.batch import collate
from mtrain.kernels.cross_entropy import IGNORE
from mtrain.model import loss as loss_module
from mtrain.model.loss import projected_cross_entropy
from mtrain.model.transformer import Transformer

torch.set_num_threads(1)
B, T, E, V = 4, 6, 5, 11


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, bias and labels, some of which, and one whole sentence, are padding."""
    torch.manual_seed(2)
    hidden, weight, bias = (torch.randn(*shape, dtype=dtype) for shape in ((B, T, E), (V, E), (V,)))
    labels = torch.randint(V, (B, T))
    labels[0, 4:] = labels[2] = IGNORE
    return hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), labels


def torch_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, smoothing: float
) -> Tensor:
    logits = F.linear(hidden, weight, bias).flatten(0, -2)
    return F.cross_entropy(
        logits, labels.flatten(), label_smoothing=smoothing, ignore_index=IGNORE, reduction="sum"
    )


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.6])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("chunk", [1, 3 * V, 7 * V + 1, 2**23])
def test_value_and_gradients_equal_torch(
    monkeypatch: pytest.MonkeyPatch,
    smoothing: float,
    with_bias: bool,
    dtype: torch.dtype,
    tolerance: float,
    chunk: int,
) -> None:
    monkeypatch.setitem(loss_module.CHUNK, "cpu", chunk)
    hidden, weight, bias, labels = inputs(dtype)
    learned = [hidden, weight, *([bias] if with_bias else [])]
    sums = projected_cross_entropy(hidden, weight, bias if with_bias else None, labels, 17, smoothing)
    expected = torch_loss(hidden, weight, bias if with_bias else None, labels, smoothing)
    plain = torch_loss(hidden, weight, bias if with_bias else None, labels, 0.0)
    close = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(sums.loss, expected, **close)
    torch.testing.assert_close(sums.nll, plain.detach(), **close)
    assert sums.tokens == 17
    gradients = torch.autograd.grad(sums.loss / 17, learned)
    for ours, theirs in zip(gradients, torch.autograd.grad(expected / 17, learned), strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours, theirs, **close)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_gradcheck(smoothing: float) -> None:
    hidden, weight, bias, labels = inputs()
    assert torch.autograd.gradcheck(
        lambda *learned: projected_cross_entropy(*learned, labels, 1, smoothing).loss, (hidden, weight, bias)
    )


# ------------------------------------------------------------------------------------------------ R-Drop


def plain_r_drop(hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, alpha: float) -> Tensor:
    """Half of what the paper's section 2 writes: two cross-entropies, and alpha times the mean of two KLs."""
    p, q = F.linear(hidden, weight, bias).log_softmax(-1).chunk(2)
    kept = labels != IGNORE
    apart = F.kl_div(p, q, reduction="none", log_target=True) + F.kl_div(
        q, p, reduction="none", log_target=True
    )
    both = sum(torch_loss(half, weight, bias, labels, 0.1) for half in hidden.chunk(2))
    return (both + alpha * apart.sum(-1)[kept].sum() / 2) / 2


def two_passes(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    hidden, weight, bias, labels = inputs(dtype)
    other = hidden.detach() + 0.3 * torch.randn_like(hidden)
    return torch.cat([hidden.detach(), other]).requires_grad_(), weight, bias, labels


@pytest.mark.parametrize("chunk", [1, 3 * V, 7 * V + 1, 2**23])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_r_drop_is_the_formula(
    monkeypatch: pytest.MonkeyPatch, chunk: int, dtype: torch.dtype, tolerance: float
) -> None:
    monkeypatch.setitem(loss_module.CHUNK, "cpu", chunk)
    hidden, weight, bias, labels = two_passes(dtype)
    sums = projected_cross_entropy(hidden, weight, bias, labels, 17, 0.1, 5.0)
    expected = plain_r_drop(hidden, weight, bias, labels, 5.0)
    close = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(sums.loss, expected, **close)
    nll = sum(torch_loss(half, weight, bias, labels, 0.0) for half in hidden.chunk(2)) / 2
    torch.testing.assert_close(sums.nll, nll.detach(), **close)
    assert sums.tokens == 17
    learned = (hidden, weight, bias)
    gradients = torch.autograd.grad(sums.loss / 17, learned)
    for ours, theirs in zip(gradients, torch.autograd.grad(expected / 17, learned), strict=True):
        torch.testing.assert_close(ours, theirs, **close)
    assert (gradients[0][torch.cat([labels, labels]) == IGNORE] == 0).all()
    with torch.no_grad():
        alone = projected_cross_entropy(hidden, weight, bias, labels, 17, 0.1, 5.0)
    torch.testing.assert_close(alone.loss, expected.detach(), **close)


def test_r_drop_gradcheck() -> None:
    hidden, weight, bias, labels = two_passes()
    assert torch.autograd.gradcheck(
        lambda *learned: projected_cross_entropy(*learned, labels, 1, 0.1, 3.0).loss, (hidden, weight, bias)
    )


def test_r_drop_of_equal_passes_is_the_ordinary_loss() -> None:
    hidden, weight, bias, labels = inputs()
    ordinary = projected_cross_entropy(hidden, weight, bias, labels, 17, 0.1)
    twice = projected_cross_entropy(torch.cat([hidden, hidden]), weight, bias, labels, 17, 0.1, 5.0)
    torch.testing.assert_close(twice, ordinary, rtol=1e-12, atol=0)
    gradients = [torch.autograd.grad(sums.loss, (hidden, weight, bias)) for sums in (ordinary, twice)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)


def test_r_drop_under_bf16_autocast() -> None:
    hidden, weight, bias, labels = two_passes(torch.float32)
    exact = plain_r_drop(hidden, weight, bias, labels, 5.0)
    gradients = torch.autograd.grad(exact, (hidden, weight, bias))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        sums = projected_cross_entropy(hidden, weight, bias, labels, 17, 0.1, 5.0)
    torch.testing.assert_close(sums.loss, exact, rtol=0.01, atol=0)
    for ours, expected in zip(torch.autograd.grad(sums.loss, (hidden, weight, bias)), gradients, strict=True):
        assert (ours - expected).norm() < 0.03 * expected.norm()


def test_large_logits_stay_finite_with_r_drop() -> None:
    hidden, weight, bias, labels = two_passes(torch.float32)
    sums = projected_cross_entropy(hidden * 1e4, weight, bias, labels, 1, 0.1, 5.0)
    sums.loss.backward()
    assert sums.loss.isfinite() and hidden.grad.isfinite().all()


# ------------------------------------------------------------------------------------------------ the rest


def test_only_the_loss_has_a_gradient() -> None:
    sums = projected_cross_entropy(*inputs(), 1, 0.1)
    assert sums.loss.requires_grad
    assert not sums.nll.requires_grad


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_a_frozen_input_leaves_the_other_gradients(frozen: int) -> None:
    *tensors, labels = inputs()
    expected = torch.autograd.grad(torch_loss(*tensors, labels, 0.1), tensors)
    tensors[frozen] = tensors[frozen].detach()
    projected_cross_entropy(*tensors, labels, 1, 0.1).loss.backward()
    for i, tensor in enumerate(tensors):
        if i == frozen:
            assert tensor.grad is None
        else:
            torch.testing.assert_close(tensor.grad, expected[i])


def test_nothing_but_padding_costs_nothing() -> None:
    hidden, weight, bias, labels = inputs()
    sums = projected_cross_entropy(hidden, weight, bias, torch.full_like(labels, IGNORE), 0, 0.1)
    sums.loss.backward()
    assert sums.loss == sums.nll == 0
    for tensor in (hidden, weight, bias):
        assert (tensor.grad == 0).all()


def test_hidden_states_at_padding_do_not_matter() -> None:
    hidden, weight, bias, labels = inputs()
    sums = projected_cross_entropy(hidden, weight, bias, labels, 1, 0.1)
    changed = torch.where((labels == IGNORE)[..., None], hidden * 3 + 1, hidden)
    again = projected_cross_entropy(changed, weight, bias, labels, 1, 0.1)
    torch.testing.assert_close(again, sums, rtol=0, atol=1e-12)
    sums.loss.backward()
    assert (hidden.grad[labels == IGNORE] == 0).all()
    assert (hidden.grad[labels != IGNORE] != 0).any(-1).all()


def test_large_logits_stay_finite() -> None:
    hidden, weight, bias, labels = inputs(torch.float32)
    sums = projected_cross_entropy(hidden * 1e4, weight, bias, labels, 1, 0.1)
    sums.loss.backward()
    torch.testing.assert_close(sums.loss, torch_loss(hidden * 1e4, weight, bias, labels, 0.1))
    assert hidden.grad.isfinite().all()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_value_is_the_same_and_costs_one_projection(mode: type) -> None:
    hidden, weight, bias, labels = inputs()
    expected = projected_cross_entropy(hidden, weight, bias, labels, 17, 0.1)
    with mode(), FlopCounterMode(display=False) as flops:
        sums = projected_cross_entropy(hidden, weight, bias, labels, 17, 0.1)
    assert not sums.loss.requires_grad
    torch.testing.assert_close((sums.loss, sums.nll), (expected.loss.detach(), expected.nll))
    assert flops.get_total_flops() == 2 * B * T * E * V


@pytest.mark.parametrize("hidden_type", [torch.float32, torch.bfloat16])
def test_bf16_autocast_is_close_and_keeps_the_types(hidden_type: torch.dtype) -> None:
    hidden, weight, bias, labels = inputs(torch.float32)
    exact = torch_loss(hidden, weight, bias, labels, 0.1)
    gradients = torch.autograd.grad(exact, (hidden, weight, bias))
    cast = hidden.detach().to(hidden_type).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        sums = projected_cross_entropy(cast, weight, bias, labels, 17, 0.1)
    sums.loss.backward()
    assert sums.loss.dtype == sums.nll.dtype == torch.float32
    torch.testing.assert_close(sums.loss, exact, rtol=0.01, atol=0)
    logits = F.linear(cast.bfloat16(), weight.bfloat16()).float() + bias  # bf16 in the product alone
    nll = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")
    torch.testing.assert_close(sums.nll, nll.detach(), rtol=1e-5, atol=0)
    for tensor, expected in zip((cast, weight, bias), gradients, strict=True):
        assert tensor.grad.dtype == tensor.dtype
        assert (tensor.grad - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize("special", [{}, {"pad_id": 8, "bos_id": 8, "eos_id": 0}], ids=["usual", "bos=pad"])
def test_the_loss_of_a_batch_is_the_sum_over_its_sentences(special: dict[str, int]) -> None:
    torch.manual_seed(4)
    sizes = {
        "d_model": 8,
        "heads": 2,
        "ffn_dim": 12,
        "encoder_layers": 1,
        "decoder_layers": 2,
        "dropout": 0.0,
    }
    model = Transformer(
        ModelConfig(source_vocab_size=9, target_vocab_size=9, max_positions=16, **sizes, **special)
    )
    model.double()
    end = model.config.eos_id
    sources = [[4, 5, end], [6, end], [7, 4, 4, 5, 6, end]]
    targets = [[5, end], [7, 8, 4, 4, end], [end]]  # 8 is a real token, even where padding has its id

    def loss(rows: list[int]) -> tuple[Tensor, ...]:
        model.zero_grad()
        batch = collate(
            pa.array([sources[i] for i in rows]),
            pa.array([targets[i] for i in rows]),
            model.config.pad_id,
            model.config.bos_id,
            rows,
        )
        hidden = model(batch.source, batch.source_keep, batch.target_in)
        sums = projected_cross_entropy(hidden, *model.projection(), batch.labels, batch.target_tokens, 0.1)
        sums.loss.backward()
        gradients = [parameter.grad.clone() for parameter in model.parameters()]
        return sums.loss.detach(), sums.nll, torch.tensor(sums.tokens), *gradients

    together, alone = loss([0, 1, 2]), [loss([row]) for row in range(3)]
    for whole, *parts in zip(together, *alone, strict=True):
        torch.testing.assert_close(whole, sum(parts), rtol=1e-10, atol=1e-10)
