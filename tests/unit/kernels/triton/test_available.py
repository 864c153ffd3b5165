"""Whether kernels are used, where they run, and what is logged if one does not run."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mtrain.kernels.cross_entropy import projected_cross_entropy
from mtrain.kernels.decoding_step import Allowed, add_norm, best_tokens, cross_attention, self_attention
from mtrain.kernels.dropout import HashKey, dropout
from mtrain.kernels.mixed_linear import linear
from mtrain.kernels.norm import BranchNorm
from mtrain.kernels.triton import available
from mtrain.kernels.triton.available import attempt, replaced_in_training, suits_kernels

SECOND_GPU = SimpleNamespace(device=torch.device("cuda:1"), dtype=torch.float32, is_cuda=True)
SECOND_GPU.get_device = lambda: 1


@pytest.fixture(autouse=True)
def _nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(available, "outcomes", {})


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any]], str]:
    """Replaces the kernel of dropout, whose name it returns, and uses it on every device."""

    def replace(function: Callable[..., Any]) -> str:
        for module in ("cross_entropy", "mixed_linear", "norm", "triton.available"):
            monkeypatch.setattr(f"mtrain.kernels.{module}.suits_kernels", lambda x: True)
        monkeypatch.setattr("mtrain.kernels.triton.dropout.hashed_dropout", function)
        return "dropout.hashed_dropout"

    return replace


def test_only_cuda_devices_use_kernels_and_not_in_fp64() -> None:
    assert not suits_kernels(torch.zeros(1)) and not suits_kernels(torch.zeros(1, device="meta"))
    assert suits_kernels(SECOND_GPU)
    assert not suits_kernels(SimpleNamespace(is_cuda=True, dtype=torch.float64))


class Refused(Exception):
    """A kernel needs more shared memory than there is."""


def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def of_source(beams: int) -> Callable[[Tensor], Tensor]:
    """Attention of beams to the source."""
    memory, spans = torch.ones(6, 2, 3, 4), torch.ones(6, 2, dtype=torch.int64)
    return lambda x: cross_attention(x.repeat_interleave(beams, dim=0), memory, spans, 1)


def gradient_of_bias(x: Tensor) -> Tensor:
    """The gradient of the bias of a linear map in bf16."""
    weight, bias = torch.ones(4, 12), torch.zeros(4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        linear(x, weight, bias).backward(x[:, :4].round().bfloat16())
    assert bias.grad is not None
    return bias.grad


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("dropout.hashed_dropout", lambda x: dropout(x, 0.5, HashKey(*zeros(2, 1, dtype=torch.int32)))),
        (
            "cross_entropy.fused_cross_entropy",
            lambda x: projected_cross_entropy(x, x, None, zeros(6), 0.0)[0],
        ),
        ("decoding.add_norm", lambda x: add_norm(x.clone(), x, nn.LayerNorm(12), torch.float32)),
        ("decoding.attention", lambda x: self_attention(x, torch.zeros(2, 6, 1, 3, 4), None, zeros(1))),
        ("decoding.attention", of_source(1)),
        ("norm.norm_branch", lambda x: BranchNorm(12)(x)[0]),
        ("mixed_linear.sum_over_tokens", gradient_of_bias),
        ("next_tokens.best_tokens", lambda x: best_tokens(x, Allowed(zeros(1), zeros(6), 3))[1]),
    ],
)
def test_operators_replace_a_kernel_that_does_not_run(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kernel: Callable[[Callable[..., Any]], str],
    request: pytest.FixtureRequest,
    name: str,
    function: Callable[[Tensor], Tensor],
) -> None:
    calls = []

    def refuse(*_: object, **__: object) -> None:
        calls.append(1)
        raise Refused(f"{request.node.name}: out of resource\nReducing sizes may help.")

    x = torch.randn(6, 12, generator=torch.Generator().manual_seed(1))
    expected = function(x.clone())
    kernel(refuse)
    monkeypatch.setattr(f"mtrain.kernels.triton.{name}", refuse)
    for _ in range(3):
        assert torch.equal(function(x.clone()), expected)
    assert len(calls) == 1
    (message,) = caplog.messages
    reason = f"(Refused: {request.node.name}: out of resource)"
    assert message == f"slower operators replace Triton kernels on cpu {reason}"


def test_the_reason_is_logged_once_if_no_kernel_can_be_compiled(
    kernel: Callable[[Callable[..., Any]], str], caplog: pytest.LogCaptureFixture
) -> None:
    def fail(x: Tensor) -> Tensor:
        raise RuntimeError("Failed to find C compiler\nPlease specify one via CC")

    name = kernel(fail)
    assert all(attempt(name, (size,), torch.ones(size)) is None for size in (1, 2, 3, 3))
    assert len(caplog.messages) == 1 and caplog.text.endswith("(RuntimeError: Failed to find C compiler)\n")


def test_a_kernel_that_fits_one_beam_may_not_fit_five(
    monkeypatch: pytest.MonkeyPatch, kernel: Callable[[Callable[..., Any]], str]
) -> None:
    def attention(queries: Tensor, memory: Tensor, *_: object) -> Tensor:
        if len(queries) == 5 * len(memory):
            raise Refused
        return queries

    x = torch.randn(6, 12)
    expected = of_source(5)(x)
    kernel(attention)
    monkeypatch.setattr("mtrain.kernels.triton.decoding.attention", attention)
    assert torch.equal(of_source(1)(x), x)
    torch.testing.assert_close(of_source(5)(x), expected)


class BackwardRefused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Tensor:
        raise Refused


def test_a_kernel_is_not_trained_with_if_its_backward_pass_does_not_run(
    kernel: Callable[[Callable[..., Any]], str],
) -> None:
    name = kernel(BackwardRefused.apply)
    x, trained = torch.ones(3), torch.ones(3, requires_grad=True)
    assert attempt(name, (3,), x, x) is not None  # as if frozen at first
    assert replaced_in_training() == []
    assert attempt(name, (3,), x, trained) is None and attempt(name, (3,), trained, x) is None
    with torch.no_grad():
        assert attempt(name, (3,), x, trained) is not None
    assert attempt(name, (3,), x, trained) is None and attempt(name, (4,), x, x) is not None
    assert replaced_in_training() == [name]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_exhausted_memory_is_no_reason_to_replace_a_kernel(
    kernel: Callable[[Callable[..., Any]], str], error: Exception
) -> None:
    errors = [error]

    def run(x: Tensor) -> Tensor:
        if errors:
            raise errors.pop()
        return x

    name, x = kernel(run), torch.ones(2)
    with pytest.raises(type(error)):
        attempt(name, (), x)
    assert attempt(name, (), x) is x


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The indices of the GPUs that are current, the last one now."""
    indices = [0]

    class Current:
        def __init__(self, x: Any):
            self.index = x.get_device()

        def __enter__(self) -> None:
            indices.append(self.index)

        def __exit__(self, *_: object) -> None:
            indices.pop()

    monkeypatch.setattr(torch.cuda, "device_of", Current)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    yield indices
    assert indices == [0]


def test_a_kernel_runs_on_the_device_of_its_inputs(
    kernel: Callable[[Callable[..., Any]], str], current: list[int]
) -> None:
    name = kernel(lambda x: current[-1])
    assert [attempt(name, (), SECOND_GPU) for _ in range(2)] == [1, 1]


def test_nothing_is_tried_during_a_capture(
    kernel: Callable[[Callable[..., Any]], str], current: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    captures = True
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captures and current[-1] == 1)
    name = kernel(lambda x: 5)
    assert attempt(name, (), SECOND_GPU) is None
    captures = False
    assert attempt(name, (), SECOND_GPU) == 5
    captures = True
    assert attempt(name, (), SECOND_GPU) == 5
