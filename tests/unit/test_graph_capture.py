"""Capturing CUDA graphs: nothing on a CPU; what happens when a capture fails, with a stand-in for CUDA."""

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mtrain import graph_capture
from mtrain.errors import is_out_of_memory
from mtrain.graph_capture import WARM_UPS, CaptureError, GraphPool

CUDA = torch.device("cuda:0")
OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
INVALIDATED = RuntimeError("CUDA error: operation failed due to a previous error during capture\nMore lines")


class FakeCuda:
    """The functions of `torch.cuda` that capturing uses. A graph records calls of the work of a capture."""

    def __init__(self) -> None:
        self.capturing, self.failing_ends, self.events = False, 0, list[str]()

    @contextmanager
    def graph(self, graph: Any, **_: Any) -> Iterator[None]:
        """As the real one, the end raises another error after one in the capture."""
        assert not gc.isenabled()
        self.capturing = True
        try:
            yield
        except Exception as error:
            raise INVALIDATED from error
        finally:
            self.capturing = False
        if self.failing_ends:
            self.failing_ends -= 1
            raise INVALIDATED

    def functions(self) -> dict[str, Any]:
        """The stand-ins by name."""
        stream = SimpleNamespace(wait_stream=lambda other: None)

        def graph() -> Any:
            def reset() -> None:
                self.events.append("reset")

            return SimpleNamespace(replay=lambda: self.events.append("replay"), reset=reset)

        return {
            "device": lambda device: nullcontext(),
            "stream": lambda stream: nullcontext(),
            "Stream": lambda device: stream,
            "current_stream": lambda *_: stream,
            "current_device": lambda: 0,
            "MemPool": lambda: SimpleNamespace(id=(0, 1)),
            "use_mem_pool": lambda pool: nullcontext(),
            "synchronize": lambda: None,
            "empty_cache": lambda: None,
            "get_sync_debug_mode": lambda: 0,
            "set_sync_debug_mode": lambda mode: None,
            "CUDAGraph": graph,
            "graph": self.graph,
        }


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """A stand-in for CUDA."""
    fake = FakeCuda()
    for name, function in fake.functions().items():
        monkeypatch.setattr(torch.cuda, name, function)
    graph_capture._side_stream.cache_clear()
    yield fake
    graph_capture._side_stream.cache_clear()
    assert gc.isenabled()


def test_on_a_cpu_work_is_not_captured():
    def work() -> None:
        raise AssertionError("must not run")

    assert GraphPool(torch.device("cpu")).capture(work) is work


def test_work_is_warmed_up_captured_and_replayed(cuda):
    runs = []
    replay = GraphPool(CUDA).capture(lambda: runs.append(cuda.capturing))
    assert runs == [*[False] * WARM_UPS, True]
    replay()
    replay()
    del replay
    assert cuda.events == ["replay", "replay", "reset"]
    assert runs == [*[False] * WARM_UPS, True]


def test_a_capture_that_fails_once_is_repeated(cuda):
    cuda.failing_ends = 1
    replay = GraphPool(CUDA).capture(lambda: None)
    replay()
    assert cuda.events == ["replay"]


def test_a_capture_that_fails_twice_says_why(cuda):
    cuda.failing_ends = 2
    with pytest.raises(CaptureError, match=r"^RuntimeError: CUDA error: operation failed .* capture$"):
        GraphPool(CUDA).capture(lambda: None)


@pytest.mark.parametrize("capturing", [False, True])
def test_exhausted_memory_is_recognized(cuda, capturing):
    def work() -> None:
        if cuda.capturing == capturing:
            raise OUT_OF_MEMORY

    with pytest.raises(torch.OutOfMemoryError) as raised:
        GraphPool(CUDA).capture(work)
    assert is_out_of_memory(raised.value)


def test_a_line_that_waits_is_named(cuda, monkeypatch):
    modes = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def work() -> None:
        if modes == ["warn"]:
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        if cuda.capturing:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    with pytest.raises(CaptureError, match=r"waits for the device in .*test_graph_capture\.py:\d+"):
        GraphPool(CUDA).capture(work)
    assert modes == ["warn", 0]
