"""Dropout: its rate, scale, gradient and reproducibility."""

import math

import pytest
import torch
from torch import Tensor

from mtrain.kernels.dropout import HashKey, dropout

torch.set_num_threads(1)


@pytest.mark.parametrize("rate", [0.1, 0.3, 0.5, 0.9])
def test_the_rate_and_the_scale_are_those_of_torch(rate: float) -> None:
    torch.manual_seed(1)
    x = torch.full((500, 801), 3.0)
    out = dropout(x, rate)
    kept = out != 0
    torch.testing.assert_close(out[kept], torch.full_like(out[kept], 3 / (1 - rate)))
    deviation = math.sqrt(rate * (1 - rate) / x.numel())
    assert kept.double().mean().item() == pytest.approx(1 - rate, abs=4 * deviation)
    for part in (kept[:, i::4] for i in range(4)):  # four neighbors share a draw
        assert part.double().mean().item() == pytest.approx(1 - rate, abs=8 * deviation)
    flat = kept.flatten().double()
    for distance in range(1, 5):  # but are dropped independently
        both = (flat[distance:] * flat[:-distance]).mean().item()
        assert both == pytest.approx((1 - rate) ** 2, abs=8 * deviation)


def test_a_rate_close_to_one_drops_nearly_everything() -> None:
    assert dropout(torch.ones(10_000), 0.999999).count_nonzero() < 20


@pytest.mark.parametrize("shape", [(1,), (3,), (4,), (2, 3), (5, 1, 7), (0, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_shape_and_type_are_kept(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    out = dropout(torch.ones(shape, dtype=dtype), 0.5)
    assert (out.shape, out.dtype) == (shape, dtype)


def test_masks_are_reproducible_from_the_generator_state() -> None:
    x, generator = torch.ones(64), torch.Generator().manual_seed(5)
    state = generator.get_state()
    first, second = dropout(x, 0.4, generator), dropout(x, 0.4, generator)
    generator.set_state(state)
    assert torch.equal(dropout(x, 0.4, generator), first)
    assert torch.equal(dropout(x, 0.4, generator), second)
    assert not torch.equal(first, second)


def test_without_a_generator_masks_come_from_the_default_one() -> None:
    torch.manual_seed(5)
    first = dropout(torch.ones(64), 0.4)
    torch.manual_seed(5)
    assert torch.equal(dropout(torch.ones(64), 0.4), first)


def test_the_gradient_uses_the_same_mask() -> None:
    torch.manual_seed(0)
    x = torch.randn(40, 5, dtype=torch.float64).requires_grad_()
    out = dropout(x, 0.3)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(gradient * x, out, rtol=0, atol=1e-12)
    assert 0 < (gradient == 0).sum() < x.numel()


def test_a_transposed_tensor() -> None:
    torch.manual_seed(0)
    x = torch.arange(1.0, 13.0).view(3, 4).t()
    out = dropout(x, 0.5)
    assert torch.equal(out[out != 0], 2 * x[out != 0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_fused_operations_equal_their_parts_with_the_same_mask(dtype: torch.dtype) -> None:
    generator = torch.Generator()
    x, y = (torch.randn(7, 5, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    cotangent = torch.randn(7, 5, generator=torch.Generator().manual_seed(3))

    def run(function) -> list[Tensor]:
        tensors = [x.to(torch.float64).requires_grad_(), y.to(dtype).requires_grad_()]
        out = function(*tensors, 0.4, generator.manual_seed(5))
        gradients = torch.autograd.grad(out, tensors, cotangent.to(out.dtype), allow_unused=True)
        return [out, *(gradient for gradient in gradients if gradient is not None)]

    def separate_sum(x, y, rate, generator) -> Tensor:
        return x + dropout(y.double(), rate, generator)

    def separate_relu(x, y, rate, generator) -> Tensor:
        return dropout(torch.relu(y), rate, generator)

    def with_residual(x, y, rate, generator) -> Tensor:
        return dropout(y, rate, generator, residual=x)

    def with_relu(x, y, rate, generator) -> Tensor:
        return dropout(y, rate, generator, relu=True)

    torch.testing.assert_close(run(with_residual), run(separate_sum), rtol=0, atol=1e-12)
    relu = run(with_relu)
    rtol = 1e-2 if dtype == torch.bfloat16 else 0
    torch.testing.assert_close(relu, run(separate_relu), rtol=rtol, atol=1e-12)
    assert relu[0].dtype == dtype


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("rate", [0.0, 0.4])
def test_relu_and_residual_can_be_combined(rate: float, relu: bool) -> None:
    x, y = torch.randn(2, 7, 5, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(5)
    factors = dropout(torch.ones_like(y), rate)  # 0 or 1 / (1 - rate)
    torch.manual_seed(5)
    out = dropout(y, rate, relu=relu, residual=x)
    torch.testing.assert_close(out, x + factors * (torch.relu(y) if relu else y))


def test_at_rate_0_nothing_is_drawn() -> None:
    x, generator = torch.randn(3, 4), torch.Generator().manual_seed(5)
    state = generator.get_state()
    assert torch.equal(dropout(x, 0.0, generator), x)
    assert torch.equal(generator.get_state(), state)


# ---------------------------------------------------------------------------------------- hashed masks


def hash_key(key: int, salt: int) -> HashKey:
    return HashKey(*(torch.tensor([number], dtype=torch.int32) for number in (key, salt)))


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_a_hashed_mask_has_the_rate_and_keeps_the_mean(rate: float) -> None:
    state = torch.get_rng_state()
    out = dropout(torch.full((400, 1000), 3.0), rate, hash_key(8, 2))
    deviation = math.sqrt(rate * (1 - rate) / out.numel())
    assert (out == 0).double().mean().item() == pytest.approx(rate, abs=4 * deviation)
    assert out.mean().item() == pytest.approx(3, abs=12 * deviation / (1 - rate))
    assert torch.equal(torch.get_rng_state(), state)


def test_key_and_salt_determine_the_mask() -> None:
    x = torch.ones(1000)
    first = dropout(x, 0.5, hash_key(8, 2))
    assert torch.equal(dropout(x, 0.5, hash_key(8, 2)), first)
    for other in (hash_key(9, 2), hash_key(8, 3)):
        assert 400 < (dropout(x, 0.5, other) != first).sum() < 600


def test_masks_of_attention_weights_depend_only_on_query_head_and_key() -> None:
    """The padding of queries and keys does not matter."""

    def mask_of(tokens: Tensor, keys: int) -> Tensor:
        weights = torch.ones(*tokens.shape[:1], 4, tokens.size(1), keys)
        return dropout(weights, 0.5, hash_key(8, 2).of_weights(tokens, 4, keys)) > 0

    mask = mask_of(torch.tensor([[0, 1, 2], [3, 4, 0]]), 100)
    alone = mask_of(torch.tensor([[3, 4]]), 60)
    assert torch.equal(mask[1:, :, :2, :60], alone)
    rows = mask_of(torch.arange(8)[None], 128).flatten(0, 2)  # (32, 128)
    assert len(rows.unique(dim=0)) == 32
    assert rows.double().mean() == pytest.approx(0.5, abs=0.03)
