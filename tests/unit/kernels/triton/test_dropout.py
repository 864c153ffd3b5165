"""Hashed dropout, by the kernel and by operators, against the same mask in plain PyTorch."""

import pytest
import torch
from torch import Tensor

from mtrain.kernels.dropout import HashKey, dropout
from mtrain.kernels.hashing import kept
from mtrain.kernels.triton.dropout import hashed_dropout


def hash_key(key: int, salt: int, device: torch.device) -> HashKey:
    return HashKey(*(torch.tensor([number], dtype=torch.int32, device=device) for number in (key, salt)))


def expected(x: Tensor, rate: float, key: HashKey, relu: bool, residual: Tensor | None) -> Tensor:
    index = torch.arange(x.numel(), dtype=torch.int32, device=x.device).view(x.shape)
    x = torch.relu(x) if relu else x
    out = x * kept(index, key.key, key.salt, rate) / (1 - rate)
    return out if residual is None else residual + out


@pytest.mark.parametrize("shape", [(1,), (7, 5), (3, 700), (2, 3, 512)])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("with_residual", [False, True])
def test_values_and_gradients_equal_the_definition(
    implementation: str, device: torch.device, shape: tuple[int, ...], relu: bool, with_residual: bool
) -> None:
    torch.manual_seed(1)
    x, residual, cotangent = torch.randn(3, *shape, device=device)
    tensors = [x.requires_grad_(), *([residual.requires_grad_()] if with_residual else [])]
    arguments = (x, 0.3, hash_key(-123456789, 5, device))
    found = dropout(*arguments, relu=relu, residual=residual if with_residual else None)
    wanted = expected(*arguments, relu, residual if with_residual else None)
    torch.testing.assert_close(found, wanted)
    gradients = torch.autograd.grad(found, tensors, cotangent)
    torch.testing.assert_close(gradients, torch.autograd.grad(wanted, tensors, cotangent))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_result_has_the_type_of_the_residual_and_the_gradient_that_of_x(
    implementation: str, device: torch.device, dtype: torch.dtype
) -> None:
    x = torch.randn(40, 33, device=device).to(dtype).requires_grad_()
    residual = torch.zeros(40, 33, device=device)
    key = hash_key(7, 1, device)
    out = dropout(x, 0.5, key, residual=residual)
    assert out.dtype == torch.float32
    assert torch.equal(out, expected(x.float(), 0.5, key, False, None))
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert gradient.dtype == dtype and torch.equal(gradient != 0, out != 0)
    assert dropout(x, 0.5, key, relu=True).dtype == dtype


def test_the_mask_follows_the_contiguous_layout(implementation: str, device: torch.device) -> None:
    x, key = torch.ones(6, 8, device=device), hash_key(3, 2, device)
    assert torch.equal(dropout(x.t(), 0.5, key), dropout(x.view(8, 6), 0.5, key))
    assert torch.equal(dropout(x, 0.5, key).flatten(), dropout(x.flatten(), 0.5, key))


def test_nan_is_not_hidden_by_relu(implementation: str, device: torch.device) -> None:
    x = torch.full((64,), torch.nan, device=device)
    out = dropout(x, 0.25, hash_key(3, 2, device), relu=True)
    assert set(out.isnan().tolist()) == {True, False}


def test_a_key_that_changes_before_the_backward_pass_is_an_error(device: torch.device) -> None:
    key = hash_key(3, 2, device)
    out = hashed_dropout(torch.ones(64, device=device, requires_grad=True), 0.25, *key[:2])
    key.key.fill_(4)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
