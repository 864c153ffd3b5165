"""Linear maps under autocast, by our gradient and by PyTorch's."""

import pytest
import torch
import torch.nn.functional as F

from mtrain.kernels.mixed_linear import linear


@pytest.mark.parametrize(("tokens", "features"), [(1, 7), (50, 130), (4200, 24), (0, 8)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values_are_those_of_pytorch_and_gradients_are_rounded_less(
    implementation: str, device: torch.device, tokens: int, features: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    x = torch.randn(tokens, 16, device=device).requires_grad_()
    weight = torch.randn(features, 16, device=device).requires_grad_()
    bias = torch.randn(features, device=device).requires_grad_()
    with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
        found, expected = linear(x, weight, bias), F.linear(x, weight, bias)
    assert torch.equal(found, expected) and found.dtype == dtype
    cotangent = torch.randn(tokens, features, device=device).to(dtype)
    gradients = torch.autograd.grad(found, (x, weight, bias), cotangent)
    low = [part.detach().to(dtype).double().requires_grad_() for part in (x, weight, bias)]
    exact = torch.autograd.grad(F.linear(*low), low, cotangent.double())
    ours_is_used = implementation == "triton" and dtype == torch.bfloat16
    for ours, other, tolerance in zip(gradients, exact, (5e-3, 2e-6, 2e-6), strict=True):
        assert ours.dtype == torch.float32
        rounded = tolerance if ours_is_used or dtype == torch.float32 else 5e-3
        assert (ours - other).norm() <= rounded * other.norm()


def test_parameters_need_not_be_trained(implementation: str, device: torch.device) -> None:
    x = torch.randn(3, 2, 4, device=device, requires_grad=True)
    weight, bias = torch.randn(5, 4, device=device), torch.randn(5, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        linear(x, weight, bias).sum().backward()
    expected = weight.bfloat16().sum(0).float().expand_as(x)
    torch.testing.assert_close(x.grad, expected, rtol=0.02, atol=0.02)
