"""Capturing CUDA graphs: nothing on a CPU; what happens when a capture fails, with a stand-in for CUDA."""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mtrain import graph_capture
from mtrain.errors import is_out_of_memory
from mtrain.graph_capture import CaptureError, GraphPool

CUDA = torch.device("cuda:0")
OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
INVALIDATED = RuntimeError("CUDA error: operation failed due to a previous error during capture\nMore lines")


class FakeCuda:
    """The functions of `torch.cuda` that capturing uses. A graph records calls of the work of a capture."""

    def __init__(self) -> None:
        self.capturing, self.failing_ends, self.events = False, 0, list[str]()
        self.captures, self.preparations = 0, 0
        self.uses = 1  # of each pool
        self.numbers, self.recording = count(1), set[Any]()  # of pools; those of failed captures

    @contextmanager
    def graph(self, graph: Any, pool: Any = None, **_: Any) -> Iterator[None]:
        """As the real one, the end raises another error after one in the capture. A failed capture continues
        to use its pool, and to record for it, which rules out another capture."""
        assert not gc.isenabled()
        if pool in self.recording:
            raise RuntimeError("already recording")
        self.capturing = True
        self.recording.add(pool)
        self.uses += pool is not None
        try:
            yield
        except Exception as error:
            raise INVALIDATED from error
        finally:
            self.capturing = False
        if self.failing_ends:
            self.failing_ends -= 1
            raise INVALIDATED
        self.captures += 1
        self.uses -= pool is not None
        self.recording.discard(pool)

    def release(self, device: int, pool: Any) -> None:
        """One use less of a pool."""
        self.uses -= 1

    def empty_cache(self) -> None:
        """Part of each preparation."""
        self.preparations += 1

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
            "MemPool": lambda: SimpleNamespace(id=(0, next(self.numbers)), use_count=lambda: self.uses),
            "use_mem_pool": lambda pool: nullcontext(),
            "synchronize": lambda *_: self.events.append("synchronize"),
            "empty_cache": self.empty_cache,
            "CUDAGraph": graph,
            "graph": self.graph,
        }


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """A stand-in for CUDA."""
    fake = FakeCuda()
    for name, function in fake.functions().items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(graph_capture, "undocumented", {"_C._cuda_releasePool": fake.release}.get)
    monkeypatch.setattr(gc, "collect", lambda: 0)  # of all that other tests have left, it takes long
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *sizes, device, **options: zeros(*sizes, **options))
    for function in (graph_capture._side_stream, graph_capture._memory_of_workspaces):
        function.cache_clear()
    yield fake
    for function in (graph_capture._side_stream, graph_capture._memory_of_workspaces):
        function.cache_clear()
    assert gc.isenabled()


def test_on_a_cpu_work_is_not_captured():
    def work() -> None:
        raise AssertionError("must not run")

    assert GraphPool(torch.device("cpu")).capture(work) is work


def test_work_is_warmed_up_captured_and_replayed(cuda):
    runs = []
    replay = GraphPool(CUDA).capture(lambda: runs.append(cuda.capturing))
    assert runs == [False, True]
    cuda.events.clear()
    replay()
    replay()
    del replay
    assert cuda.events == ["replay", "replay", "synchronize", "reset"]
    assert runs == [False, True]


def test_a_capture_that_fails_once_is_repeated(cuda):
    cuda.failing_ends = 1
    replay = GraphPool(CUDA).capture(lambda: None)
    replay()
    assert cuda.events[-1] == "replay"


def test_a_capture_that_fails_twice_says_why(cuda):
    cuda.failing_ends = 3  # one of them ends a capture for the random generator
    with pytest.raises(CaptureError, match=r"^RuntimeError: CUDA error: operation failed .* capture$"):
        GraphPool(CUDA).capture(lambda: None)


def test_a_failed_capture_leaves_nothing_behind(cuda):
    """The pool is used as often as before, and the random generator leaves the capture: another one ends."""

    def work() -> None:
        if cuda.capturing:
            raise RuntimeError("not supported")

    pool = GraphPool(CUDA)
    for _ in range(2):
        with pytest.raises(CaptureError, match=r"^RuntimeError: not supported$"):
            pool.capture(work)
    assert cuda.uses == 1 and cuda.captures == 4 and cuda.events[-1] == "reset"


def test_the_device_is_prepared_once_for_several_captures(cuda):
    pool, runs = GraphPool(CUDA), []
    with pool.prepared():
        for _ in range(3):
            pool.capture(lambda: runs.append(cuda.capturing))
    assert runs == [False, True] * 3 and cuda.preparations == 1
    pool.capture(lambda: None)
    assert cuda.preparations == 2


def test_what_others_free_waits_for_the_end_of_a_capture(cuda):
    """Graphs and pools: a thread that freed them during the capture of another one would disturb it."""
    dropped = [GraphPool(CUDA).capture(lambda: None), GraphPool(CUDA)]
    dropping = threading.Thread(target=dropped.clear)
    cuda.events.clear()

    def work() -> None:
        if cuda.capturing:
            dropping.start()
            dropping.join(0.05)
            assert dropping.is_alive()
            cuda.events.append("captured")

    replay = GraphPool(CUDA).capture(work)
    dropping.join()
    assert cuda.events == ["synchronize", "captured", "synchronize", "reset"]
    del replay


@pytest.mark.parametrize("name", ["MemPool", "use_mem_pool"])
def test_memory_that_cannot_be_had_from_a_pool_is_an_error_of_captures(cuda, monkeypatch, name):
    def fail(*_):
        raise RuntimeError("MemPool doesn't currently support expandable_segments.")

    monkeypatch.setattr(torch.cuda, name, fail)
    pool = GraphPool(CUDA)
    for method in (pool.run, pool.capture):
        with pytest.raises(CaptureError, match="expandable_segments"):
            method(lambda: None)


def test_workspaces_of_matrix_products_are_in_memory_of_their_own(cuda, monkeypatch):
    """Whatever has freed them: other graphs, in captures before."""
    used, products = [], []

    @contextmanager
    def use(pool):
        used.append(pool)
        yield
        used.pop()

    monkeypatch.setattr(torch.cuda, "use_mem_pool", use)

    def mm(x, y):
        products.append((x.dtype, used[-1]))
        return x

    monkeypatch.setattr(torch, "mm", mm)
    pools, memory = [GraphPool(CUDA) for _ in range(2)], []
    for pool in pools:
        pool.capture(lambda: memory.extend(used))
    assert {dtype for dtype, _ in products} == {torch.float32, torch.float16}
    assert len({id(pool) for _, pool in products}) == 1 and len({id(pool) for pool in memory}) == 2
    assert products[0][1] not in memory


@pytest.mark.parametrize("capturing", [False, True])
def test_exhausted_memory_is_recognized(cuda, capturing):
    def work() -> None:
        if cuda.capturing == capturing:
            raise OUT_OF_MEMORY

    with pytest.raises(torch.OutOfMemoryError) as raised:
        GraphPool(CUDA).capture(work)
    assert is_out_of_memory(raised.value)


def test_work_runs_without_a_graph(cuda):
    runs = []
    GraphPool(CUDA).run(lambda: runs.append(cuda.capturing))
    assert runs == [False]
