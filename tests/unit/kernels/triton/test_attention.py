"""Attention of short sentences against explicit attention in fp64, sentence by sentence."""

import math
from collections.abc import Iterator

import pytest
import torch
import triton
from torch import Tensor

from mtrain.kernels.dropout import HashKey, dropout
from mtrain.kernels.sequences import Packed
from mtrain.kernels.triton.attention import attention_kernel, short_attention
from mtrain.kernels.triton.tiles import suits_short_attention

HEADS = 2


@pytest.fixture(autouse=True)
def nan_in_new_tensors() -> Iterator[None]:
    """What a kernel does not write is NaN."""
    torch.set_deterministic_debug_mode("error")
    yield
    torch.set_deterministic_debug_mode("default")


def packed(lengths: list[int], device: torch.device, longest: int | None = None) -> Packed:
    starts = torch.tensor([0, *lengths], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
    place = torch.cat([torch.arange(length, dtype=torch.int32) for length in lengths]).to(device)
    return Packed(starts, place, longest or max(lengths))


def reference(
    projected: Tensor,
    keys_values: Tensor | None,
    lengths: list[int],
    key_lengths: list[int],
    *,
    causal: bool,
    rate: float,
    key: HashKey,
) -> Tensor:
    """Attention (P, E) in fp64, with zeros for queries without keys and after the last sentence."""
    if keys_values is None:
        q, k, v = projected.double().chunk(3, dim=-1)
    else:
        q, (k, v) = projected.double(), keys_values.double().chunk(2, dim=-1)
    rows, first, first_key = [], 0, 0
    for length, keys in zip(lengths, key_lengths, strict=True):
        parts = q[first : first + length], *(x[first_key : first_key + keys] for x in (k, v))
        queries, keys_, values = (x.unflatten(-1, (HEADS, -1)).transpose(0, 1) for x in parts)
        scores = queries @ keys_.mT / math.sqrt(queries.size(-1))
        if causal:
            scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -math.inf)
        weights = scores.softmax(-1)
        if rate:
            tokens = torch.arange(first, first + length, device=q.device)[None]
            weights = dropout(weights[None], rate, key.of_weights(tokens, HEADS, keys))[0]
        rows.append((weights @ values).transpose(0, 1).flatten(1))
        first, first_key = first + length, first_key + keys
    return torch.cat([*rows, q.new_zeros(len(q) - first, q.size(1))])


SELF_LENGTHS = [[1, 16, 0, 17, 32, 3], [5, 33, 0, 64], [127, 100, 128]]
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("lengths", "key_lengths", "width", "causal", "rate", "surplus"),
    [
        (SELF_LENGTHS[0], None, 8, True, 0.3, 70),
        (SELF_LENGTHS[1], None, 24, False, 0.3, 0),
        (SELF_LENGTHS[2], None, 32, True, 0.0, 5),
        ([65, 2], None, 64, False, 0.0, 0),
        ([3, 0, 17, 4], [20, 5, 0, 32], 24, False, 0.3, 70),
        ([128, 1], [2, 100], 8, False, 0.0, 0),
        *[
            pytest.param(lengths, None, width, causal, rate, 3, marks=SLOW)
            for lengths in SELF_LENGTHS
            for width in (8, 24, 32, 64)
            for causal in (False, True)
            for rate in (0.0, 0.3)
        ],
    ],
    ids=str,
)
def test_values_and_gradients_equal_the_formula(
    device: torch.device,
    lengths: list[int],
    key_lengths: list[int] | None,
    width: int,
    causal: bool,
    rate: float,
    surplus: int,
) -> None:
    torch.manual_seed(1)
    key = HashKey(*torch.tensor([[-5], [3]], dtype=torch.int32, device=device))
    size, queries = HEADS * width, packed(lengths, device)
    keys = queries if key_lengths is None else packed(key_lengths, device)
    tensors = [torch.randn(sum(lengths) + surplus, size if key_lengths else 3 * size, device=device)]
    if key_lengths is not None:
        tensors.append(torch.randn(sum(key_lengths) + surplus, 2 * size, device=device))
    tensors = [tensor.requires_grad_() for tensor in tensors]
    projected, keys_values = tensors if len(tensors) == 2 else (tensors[0], None)
    found = short_attention(projected, keys_values, HEADS, queries, keys, causal, rate, key)
    wanted = reference(
        projected, keys_values, lengths, key_lengths or lengths, causal=causal, rate=rate, key=key
    )
    cotangent = torch.randn_like(found)
    gradients = torch.autograd.grad(found, tensors, cotangent)
    expected = torch.autograd.grad(wanted, tensors, cotangent.double())
    for x, y in zip((found, *gradients), (wanted, *expected), strict=True):
        assert (x.double() - y).norm() < 1e-6 * y.norm()
        assert (x[len(x) - surplus :] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision(device: torch.device, dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and not isinstance(attention_kernel, triton.JITFunction):
        pytest.skip("the interpreter does not multiply numbers in bf16")
    torch.manual_seed(1)
    lengths, key = [7, 30], HashKey(*torch.tensor([[-5], [3]], dtype=torch.int32, device=device))
    x = torch.randn(37, 3 * HEADS * 16, device=device).to(dtype).requires_grad_()
    sentences = packed(lengths, device)
    found = short_attention(x, None, HEADS, sentences, sentences, True, 0.2, key)
    wanted = reference(x, None, lengths, lengths, causal=True, rate=0.2, key=key)
    assert found.dtype == dtype and (found.double() - wanted).norm() < 0.01 * wanted.norm()
    cotangent = torch.randn_like(found)
    gradients = [torch.autograd.grad(out, x, cotangent.to(out.dtype))[0] for out in (found, wanted)]
    assert (gradients[0] - gradients[1]).norm() < 0.02 * gradients[1].norm()


def test_the_result_does_not_depend_on_the_tile(device: torch.device) -> None:
    x = torch.randn(20, 3 * HEADS * 16, device=device)
    key = HashKey(*torch.tensor([[-5], [3]], dtype=torch.int32, device=device))
    results = [
        short_attention(x, None, HEADS, sentences, sentences, True, 0.2, key)
        for sentences in (packed([12, 8], device, longest) for longest in (12, 60, 128))
    ]
    for result in results[1:]:
        torch.testing.assert_close(result, results[0])


def test_longer_sentences_are_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match="empty"):
        short_attention(
            torch.randn(129, 3 * HEADS * 16, device=device), None, HEADS, *[packed([129], device)] * 2
        )


def test_which_sentences_and_devices_are_suitable() -> None:
    h100, ada, turing = (9, 0), (8, 9), (7, 5)
    assert suits_short_attention(128, 64, torch.bfloat16, h100)
    assert suits_short_attention(1, 8, torch.float16, ada)
    assert not suits_short_attention(129, 64, torch.bfloat16, h100)
    assert not suits_short_attention(128, 64, torch.float32, h100)
    assert not suits_short_attention(32, 64, torch.float16, turing)
    assert suits_short_attention(128, 128, torch.bfloat16, h100)
    assert not suits_short_attention(128, 128, torch.bfloat16, ada)  # too little shared memory
