"""Whether kernels are used, and what is logged if Triton or a kernel does not work."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mtrain.kernels.cross_entropy import projected_cross_entropy
from mtrain.kernels.decoding_step import Allowed, add_norm, best_tokens, cross_attention, own_attention
from mtrain.kernels.dropout import HashKey
from mtrain.kernels.dropout import dropout as dropout_of
from mtrain.kernels.triton import dropout
from mtrain.kernels.triton.available import attempt, triton_works

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _nothing_is_known_before_and_after() -> Iterator[None]:
    triton_works.cache_clear()
    yield
    triton_works.cache_clear()


def test_only_cuda_devices_use_kernels(caplog: pytest.LogCaptureFixture) -> None:
    assert not triton_works(torch.device("cpu")) and not triton_works(torch.device("mps"))
    assert not caplog.records


def test_the_reason_is_logged_once_if_triton_does_not_work(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("Failed to find C compiler\nPlease specify one via CC")

    monkeypatch.setattr(dropout, "hashed_dropout", fail)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)  # there may be no such device
    monkeypatch.setattr(torch, "ones", lambda *_, **__: None)
    with caplog.at_level(logging.WARNING):
        assert not any(triton_works(torch.device("cuda:0")) for _ in range(3))
    (record,) = caplog.records
    assert "Triton does not work on cuda:0" in record.message
    assert record.message.endswith("(RuntimeError: Failed to find C compiler)")


class Refused(Exception):
    """A kernel needs more shared memory than there is."""


def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("kernel", "function"),
    [
        ("dropout.hashed_dropout", lambda x: dropout_of(x, 0.5, HashKey(*zeros(2, 1, dtype=torch.int32)))),
        ("cross_entropy.fused_cross_entropy", lambda x: projected_cross_entropy(x, x, None, zeros(6))[0]),
        ("decoding.add_norm", lambda x: add_norm(x.clone(), x, nn.LayerNorm(12), torch.float32)),
        ("decoding.attention", lambda x: own_attention(x, torch.zeros(2, 6, 1, 3, 4), None, zeros(1))),
        (
            "decoding.attention",
            lambda x: cross_attention(x, torch.ones(2, 6, 3, 2, 4), torch.ones(6, dtype=torch.int32)),
        ),
        ("next_tokens.best_continuations", lambda x: best_tokens(x, Allowed(zeros(1), zeros(6), 3))[1]),
    ],
)
def test_operators_replace_a_kernel_that_does_not_run(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kernel: str,
    function: Callable[[Tensor], Tensor],
) -> None:
    calls = []

    def refuse(*_: object, **__: object) -> None:
        calls.append(1)
        raise Refused("out of resource: shared memory\nReducing sizes may help.")

    refuse.__name__ = request.node.name
    x = torch.randn(6, 12, generator=torch.Generator().manual_seed(1))
    expected = function(x.clone())
    module = kernel.split(".")[0]
    monkeypatch.setattr(f"mtrain.kernels.triton.{kernel}", refuse)
    user = module if module in ("dropout", "cross_entropy") else "decoding_step"
    monkeypatch.setattr(f"mtrain.kernels.{user}.triton_works", lambda device: True)
    for _ in range(3):
        assert torch.equal(function(x.clone()), expected)
    assert len(calls) == 1
    (message,) = caplog.messages
    assert message.endswith(f"{refuse.__name__} on cpu (Refused: out of resource: shared memory)")


class BackwardRefused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Tensor:
        raise Refused


def test_a_kernel_is_not_trained_with_if_its_backward_pass_does_not_run() -> None:
    x = torch.ones(3, requires_grad=True)

    def copy(x: Tensor) -> Tensor:
        return BackwardRefused.apply(x)

    assert attempt(copy, CPU, (3,), x) is None
    with torch.no_grad():
        assert attempt(copy, CPU, (3,), x) is not None
    assert attempt(copy, CPU, (3,), x) is None and attempt(copy, CPU, (4,), x.detach()) is not None


def test_exhausted_memory_is_no_reason_to_replace_a_kernel() -> None:
    errors = [torch.OutOfMemoryError("out of memory")]

    def kernel(x: int) -> int:
        if errors:
            raise errors.pop()
        return x

    with pytest.raises(torch.OutOfMemoryError):
        attempt(kernel, CPU, (), 5)
    assert attempt(kernel, CPU, (), 5) == 5


def test_nothing_is_tried_during_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel() -> int:
        return 5

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    gpu = torch.device("cuda:0")
    assert attempt(kernel, gpu, ()) is None
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert attempt(kernel, gpu, ()) == 5
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert attempt(kernel, gpu, ()) == 5
