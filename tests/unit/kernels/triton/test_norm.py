"""The norm in front of a branch, by the kernel and by operators, against PyTorch's layer norm in fp64."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mtrain.kernels.norm import BranchNorm


@pytest.mark.parametrize("shape", [(1, 8), (5, 24), (37, 512), (1100, 700), (0, 16)])
def test_values_and_the_sums_of_gradients_are_those_of_fp64(
    implementation: str, device: torch.device, shape: tuple[int, int]
) -> None:
    torch.manual_seed(1)
    x, cotangent, of_branch = torch.randn(3, *shape, device=device)
    norm = BranchNorm(shape[1]).to(device)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    exact = nn.LayerNorm(shape[1], dtype=torch.float64, device=device)
    exact.load_state_dict(norm.state_dict())
    x = (3 + x).requires_grad_()
    trained = [x, norm.weight, norm.bias]
    normed, same = norm(x)
    assert torch.equal(same, x)
    gradients = torch.autograd.grad([normed, same], trained, [of_branch, cotangent])
    y = x.detach().double().requires_grad_()
    expected = exact(y)
    outputs, cotangents = [expected, y * 1], [of_branch.double(), cotangent.double()]
    wanted = torch.autograd.grad(outputs, [y, exact.weight, exact.bias], cotangents)
    torch.testing.assert_close(normed.double(), expected, rtol=1e-5, atol=1e-5)
    for ours, other in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(ours.double(), other, rtol=1e-5, atol=1e-5 * max(1, len(x)) ** 0.5)


def test_only_the_norm_is_used(implementation: str, device: torch.device) -> None:
    x, norm = torch.randn(6, 40, device=device, requires_grad=True), BranchNorm(40).to(device)
    found = torch.autograd.grad(norm(x)[0].square().mean(), x)
    expected = F.layer_norm(x, (40,), norm.weight, norm.bias)
    torch.testing.assert_close(found, torch.autograd.grad(expected.square().mean(), x))


def test_under_autocast_the_norm_is_rounded_as_a_product_would(
    implementation: str, device: torch.device
) -> None:
    x, norm = torch.randn(9, 64, device=device, requires_grad=True), BranchNorm(64).to(device)
    with torch.autocast(device.type, torch.bfloat16):
        normed, same = norm(x)
    assert same.dtype == torch.float32
    assert normed.dtype == (torch.bfloat16 if implementation == "triton" else torch.float32)
    exact = F.layer_norm(x, (64,), norm.weight, norm.bias)
    torch.testing.assert_close(normed.float(), exact, rtol=2**-7, atol=0)
    found, expected = (torch.autograd.grad(y.float().pow(3).sum(), norm.bias) for y in (normed, exact))
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.2)
