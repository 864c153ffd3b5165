"""Attention of packed sequences, against attention of one sentence at a time."""

import pytest
import torch
from torch import Tensor

from mtrain.kernels.attention.dispatch import attention, recording
from mtrain.kernels.dropout import HashKey
from mtrain.kernels.sequences import Packed, Padded

HEADS, WIDTH = 2, 16
# Sources and targets of the same pairs; the last ones have no source, no target, or neither.
SOURCES, TARGETS = [3, 1, 20, 17, 0, 2, 0], [5, 2, 1, 18, 3, 0, 0]


def packed(lengths: list[int], longest: int | None = None) -> Packed:
    starts = torch.tensor([0, *lengths]).cumsum(0)
    place = torch.cat([torch.arange(length) for length in lengths])
    return Packed(starts.int(), place.int(), longest or max(lengths))


def one_at_a_time(projected: Tensor, keys_values: Tensor | None, causal: bool) -> Tensor:
    found = []
    sources = projected.split(TARGETS) if keys_values is None else keys_values.split(SOURCES)
    for x, memory in zip(projected.split(TARGETS), sources, strict=True):
        if keys_values is None:
            sequences = Padded(1, len(x))
            found.append(attention(x, None, HEADS, sequences, sequences, causal) if len(x) else x[:, :WIDTH])
        else:
            of_keys, of_queries = Padded(1, len(memory)), Padded(1, len(x))
            has_both = len(x) and len(memory)
            found.append(attention(x, memory, HEADS, of_queries, of_keys) if has_both else 0 * x)
    return torch.cat(found)


@pytest.mark.parametrize("longest", [20, 33])
@pytest.mark.parametrize("kind", ["self", "causal", "cross"])
def test_it_equals_attention_of_each_sentence(kind: str, longest: int) -> None:
    queries, keys = packed(TARGETS, longest), packed(SOURCES, longest) if kind == "cross" else None
    width = WIDTH if kind == "cross" else 3 * WIDTH
    projected = torch.randn(sum(TARGETS), width).double().requires_grad_()
    memory = torch.randn(sum(SOURCES), 2 * WIDTH).double().requires_grad_() if kind == "cross" else None
    found = attention(projected, memory, HEADS, queries, keys or queries, kind == "causal")
    expected = one_at_a_time(projected, memory, kind == "causal")
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    inputs = [projected] if memory is None else [projected, memory]
    pull = torch.randn_like(found)
    gradients = [torch.autograd.grad((out * pull).sum(), inputs) for out in (found, expected)]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_weights_can_be_recorded_and_dropped() -> None:
    sequences = packed(TARGETS)
    projected = torch.randn(sum(TARGETS), 3 * WIDTH)
    with recording() as maps:
        attention(projected, None, HEADS, sequences, sequences)
    assert maps[0].shape == (len(TARGETS), HEADS, max(TARGETS), max(TARGETS))
    values = torch.ones(sum(TARGETS), 3 * WIDTH)
    out = attention(values, None, HEADS, sequences, sequences, False, 0.5, torch.Generator().manual_seed(1))
    assert 0.7 < float(out.mean()) < 1.3 and out.unique().numel() > 3


@pytest.mark.parametrize("longest", [20, 40])
@pytest.mark.parametrize("kind", ["self", "causal", "cross"])
def test_hashed_masks_do_not_depend_on_padding(kind: str, longest: int) -> None:
    """Equal for the same tokens in sequences of any length; the mean is the result without dropout."""
    key = HashKey(torch.tensor([5], dtype=torch.int32), torch.tensor([1], dtype=torch.int32))
    is_cross = kind == "cross"
    x = torch.ones(sum(TARGETS), (1 if is_cross else 3) * WIDTH).double()
    memory = torch.ones(sum(SOURCES), 2 * WIDTH).double() if is_cross else None

    def out(longest: int, rate: float) -> Tensor:
        queries, keys = packed(TARGETS, longest), packed(SOURCES if is_cross else TARGETS, longest)
        return attention(x, memory, HEADS, queries, keys, kind == "causal", rate, key)

    dropped = out(longest, 0.25)
    assert torch.equal(dropped, out(64, 0.25)) and not torch.equal(dropped, out(longest, 0.0))
    torch.testing.assert_close(dropped.mean(), out(longest, 0.0).mean(), rtol=0.15, atol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("longest", [20, 128, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["self", "causal", "cross"])
def test_kernels_of_a_gpu_equal_padded_attention(kind: str, dtype: torch.dtype, longest: int) -> None:
    """Relative to the norm, in the precision of the type."""
    generator = torch.Generator().manual_seed(1)
    lengths = [longest, *torch.randint(1, longest, (6,), generator=generator).tolist()]
    targets, sources = [*lengths, 3, 0, 0], [*reversed(lengths), 0, 2, 0]
    is_cross = kind == "cross"
    shape = sum(targets), (1 if is_cross else 3) * 4 * WIDTH
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    memory = torch.randn(sum(sources), 8 * WIDTH, generator=generator, dtype=torch.float64)

    def results(device: str, dtype: torch.dtype) -> list[Tensor]:
        queries, keys = (
            Packed(each.starts.to(device), each.place.to(device), longest)
            for each in (packed(targets), packed(sources))
        )
        inputs = [part.to(device, dtype).requires_grad_() for part in (x, memory)[: 1 + is_cross]]
        out = attention(
            inputs[0],
            inputs[1] if is_cross else None,
            HEADS,
            queries,
            keys if is_cross else queries,
            kind == "causal",
        )
        gradients = torch.autograd.grad((out.double() ** 2).sum(), inputs)
        return [out.detach().double().cpu(), *(gradient.double().cpu() for gradient in gradients)]

    tolerance = {torch.float32: 5e-3, torch.float16: 5e-3, torch.bfloat16: 3e-2}[dtype]
    for found, expected in zip(results("cuda", dtype), results("cpu", torch.float64), strict=True):
        assert float((found - expected).norm()) <= tolerance * float(expected.norm())
