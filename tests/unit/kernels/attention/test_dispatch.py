"""The attention kernels against plain PyTorch, forward and backward."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from mtrain.kernels.attention.dispatch import attention_weights, cached_attention, fused_attention
from mtrain.kernels.attention.eager import eager_attention

torch.set_num_threads(1)
DOUBLE = {"rtol": 0, "atol": 1e-12}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def inputs(queries: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of 2 sentences with 3 heads of width 4."""
    lengths = (queries, keys, keys)
    q, k, v = (random(2, 3, n, 4, seed=seed).requires_grad_() for seed, n in enumerate(lengths))
    return q, k, v


def reference(queries: Tensor, keys: Tensor, values: Tensor, keep: Tensor | None) -> Tensor:
    scores = torch.einsum("bhtd,bhsd->bhts", queries, keys) / math.sqrt(queries.size(-1))
    if keep is not None:
        scores = scores.masked_fill(~keep, -math.inf)
    return torch.einsum("bhts,bhsd->bhtd", scores.softmax(dim=-1), values)


def by_position(x: Tensor) -> Tensor:
    """x (B, H, T, D) as (B, T, H * D)."""
    return x.transpose(1, 2).flatten(2)


def eager(queries: Tensor, keys: Tensor, values: Tensor, keep: Tensor | None) -> Tensor:
    """`eager_attention` with tensors by head; self-attention if there are as many queries as keys."""
    parts = [by_position(x) for x in (queries, keys, values)]
    if queries.size(2) == keys.size(2):
        out = eager_attention(torch.cat(parts, dim=-1), None, 3, keep)
    else:
        out = eager_attention(parts[0], torch.cat(parts[1:], dim=-1), 3, keep)
    return out.unflatten(-1, (3, -1)).transpose(1, 2)


def padding_mask(*lengths: int) -> Tensor:
    """(B, 1, 1, S)"""
    return (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None])[:, None, None]


@pytest.mark.parametrize(
    "keys", [1, 5, 8, 10, 11, 15, 16, 27]
)  # from 11 on both kernels pad to 16, and the fused one to 32
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("kernel", [eager, partial(fused_attention, causal=False, rate=0.0)])
def test_values_and_gradients_equal_the_formula(kernel, keys: int, masked: bool) -> None:
    tensors = inputs(5, keys)
    keep = padding_mask(keys, max(1, keys - 2)) if masked else None
    out, expected = kernel(*tensors, keep), reference(*tensors, keep)
    torch.testing.assert_close(out, expected, **DOUBLE)
    cotangent = random(2, 3, 5, 4, seed=3)
    gradients = torch.autograd.grad(out, tensors, cotangent)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, tensors, cotangent), **DOUBLE)


@pytest.mark.parametrize("length", [1, 7, 11, 15, 27])
def test_fused_attention_may_be_causal(length: int) -> None:
    tensors = inputs(length, length)
    keep = torch.ones(length, length, dtype=torch.bool).tril()
    out, expected = fused_attention(*tensors, None, True, 0.0), reference(*tensors, keep)
    torch.testing.assert_close(out, expected, **DOUBLE)


@pytest.mark.parametrize(("queries", "keys"), [(3, 4), pytest.param(12, 12, marks=pytest.mark.slow)])
def test_eager_attention_gradcheck(queries: int, keys: int) -> None:
    given = inputs(queries, keys)
    assert torch.autograd.gradcheck(lambda q, k, v: eager(q, k, v, padding_mask(keys, 2)), given)


@pytest.mark.parametrize("length", [6, 12])
def test_a_query_without_keys_does_not_spoil_other_sentences(length: int) -> None:
    tensors, keep = inputs(length, length), padding_mask(length, 4).clone()
    keep[0] = False
    q, k, v = (x[1:].detach().requires_grad_() for x in tensors)
    gradients = torch.autograd.grad(eager(*tensors, keep)[1].sum(), tensors)
    expected = torch.autograd.grad(eager(q, k, v, keep[1:]).sum(), (q, k, v))
    for found, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(found, torch.cat([torch.zeros_like(wanted), wanted]), **DOUBLE)


def test_autocast_does_not_round_the_gradients() -> None:
    q, k, v = (x.detach().float().requires_grad_() for x in inputs(7, 7))
    cotangent = random(2, 3, 7, 4, seed=3).float()
    exact = torch.autograd.grad(eager(q, k, v, None), (q, k, v), cotangent)
    out = eager(q, k, v, None)
    with torch.autocast("cpu", torch.bfloat16):
        gradients = torch.autograd.grad(out, (q, k, v), cotangent)
    torch.testing.assert_close(gradients, exact, rtol=0, atol=0)


@pytest.mark.parametrize("length", [7, 12])
@pytest.mark.parametrize("with_memory", [False, True])
def test_arguments_in_low_precision_are_computed_in_fp32(length: int, with_memory: bool) -> None:
    queries, keys, values = (by_position(x).detach().bfloat16() for x in inputs(length, length))
    parts = [queries, torch.cat([keys, values], dim=-1)]
    low = parts if with_memory else [torch.cat(parts, dim=-1)]
    low, high = [x.requires_grad_() for x in low], [x.detach().float().requires_grad_() for x in low]
    keep, cotangent = padding_mask(length, 3), random(2, length, 12, seed=3).bfloat16()

    def run(projected: Tensor, memory: Tensor | None = None) -> Tensor:
        return eager_attention(projected, memory, 3, keep)

    with torch.autocast("cpu", torch.bfloat16):
        out = run(*low)
    exact = run(*high)
    assert torch.equal(out, exact.bfloat16())
    out.backward(cotangent)
    exact.backward(cotangent.float())
    for rough, precise in zip(low, high, strict=True):
        assert torch.equal(rough.grad, precise.grad.bfloat16())


@pytest.mark.parametrize("masked", [True, False])
def test_cached_attention_equals_the_formula(masked: bool) -> None:
    queries, keys, values = inputs(5, 16)
    keep = padding_mask(16, 9) if masked else None
    bias = None
    if keep is not None:
        bias = torch.zeros(2, 1, 1, 16).double().masked_fill(~keep, -math.inf)
        bias = bias.expand(2, 3, 1, 16).flatten(0, 1)
    out, weights = cached_attention(queries, keys.flatten(0, 1).transpose(1, 2), values.flatten(0, 1), bias)
    torch.testing.assert_close(out.view(queries.shape), reference(queries, keys, values, keep), **DOUBLE)
    expected = attention_weights(queries, keys, keep)
    torch.testing.assert_close(weights.view(2, 3, 5, 16), expected, **DOUBLE)
    torch.testing.assert_close(expected @ values, reference(queries, keys, values, keep), **DOUBLE)


@pytest.mark.parametrize("rows", [1, 2, 5])
@torch.inference_mode()
def test_cached_attention_does_not_depend_on_the_padding(rows: int) -> None:
    queries, keys, values = (random(12, n, 32, seed=n).float() for n in (rows, 160, 160))
    queries = queries[None]
    expected = cached_attention(queries, keys[:, :16].transpose(1, 2), values[:, :16], None)[0]
    for padded in (32, 48, 160):
        bias = torch.zeros(12, rows, padded)
        bias[:, :, 16:] = -math.inf
        found, _ = cached_attention(queries, keys[:, :padded].transpose(1, 2), values[:, :padded], bias)
        assert torch.equal(found, expected)
