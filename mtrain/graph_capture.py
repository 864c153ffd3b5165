"""CUDA graphs: work for a GPU that is recorded once, and started by one call from then on.

An eager operation costs the host some microseconds, so that a GPU waits for the host when operations are
small. A replayed graph costs the same few microseconds as a whole.

A graph repeats what was recorded: the same operations on the same addresses, with the Python numbers of that
moment. So everything that changes from one replay to the next is in tensors that are allocated before the
capture and are written in place. The graphs of a pool share memory for their temporary tensors: replays take
place one after the other, never at the same time, and what a replay leaves for later is copied to a tensor
that was allocated before. Captured work neither waits for the device nor copies anything from or to the host.

Numbers of issues refer to PyTorch.
"""

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import torch
from torch.nn import functional as F

from mtrain.errors import is_out_of_memory
from mtrain.kernels.undocumented import undocumented

Work = Callable[[], None]

# A thread holds it while it captures, and while it returns memory to the device: PyTorch aborts the process
# if a pool is freed while another thread captures or uses a pool (see issue 180395).
capture_lock = threading.RLock()


class CaptureError(Exception):
    """Some work cannot be captured as a graph. The message says why."""


class GraphPool:
    """Memory for the temporary tensors of graphs on `device`. It is freed when nobody has the pool or one of
    its graphs any more. On other devices than CUDA, nothing is captured."""

    def __init__(self, device: torch.device):
        self.device = device
        self._memory: Any = None  # not yet: it is an error if the allocator has no pools (issue 192464)
        self._is_prepared = False

    def __del__(self) -> None:
        if not sys.is_finalizing():
            with capture_lock:
                self._memory = None

    def run(self, work: Work) -> None:
        """Run `work` without a graph, in the memory of the graphs. Raises as `capture` does."""
        if self.device.type != "cuda":
            work()
            return
        with self.prepared():
            self._run(work)

    def capture(self, work: Work) -> Work:
        """A function that replays `work` as a graph; on other devices than CUDA, `work` itself.

        The caller has already run `work`, which compiles and loads kernels. This method runs it once more, in
        the memory of graphs. So the caller gives it inputs that do no harm, and resets what it changes. Only
        one thread captures at a time; others may use the device meanwhile.

        Raises CaptureError if `work` fails or cannot be captured. If memory runs out, raises PyTorch's error
        instead. After either error, `work` can still be run without a graph.
        """
        if self.device.type != "cuda":
            return work
        with self.prepared():
            try:
                return self._captured(work)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
            return self._captured(work)  # an event of another thread may have ended the capture

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """A context manager for captures that follow each other, which prepares the device for all of them.
        The current stream is one for captures, as these require. Raises as `capture` does."""
        if self.device.type != "cuda":
            yield
            return
        with capture_lock, _other_errors_translated():
            if self._is_prepared:  # by this thread
                yield
                return
            stream, collects = _side_stream(self.device), gc.isenabled()
            self._is_prepared = True
            gc.disable()  # what is freed during a capture may end it
            try:
                with torch.cuda.device(self.device):
                    self._memory = self._memory or torch.cuda.MemPool()
                    gc.collect()
                    torch.cuda.synchronize()
                    torch.cuda.empty_cache()
                    stream.wait_stream(torch.cuda.current_stream())
                    # On this thread only, which allocates in the pool: also the backward pass.
                    with torch.cuda.stream(stream), torch.autograd.set_multithreading_enabled(False):
                        yield
            finally:
                torch.cuda.current_stream(self.device).wait_stream(stream)
                self._is_prepared = False
                if collects:
                    gc.enable()

    def _run(self, work: Work) -> None:
        _make_workspaces(self.device)
        # In the memory of graphs: in other memory, this would need as much again.
        with torch.cuda.use_mem_pool(self._memory):
            work()

    def _captured(self, work: Work) -> Work:
        self._run(work)
        graph, uses = torch.cuda.CUDAGraph(), self._memory.use_count()
        try:
            _record(graph, work, pool=self._memory.id)
        except Exception:
            self._forget(graph, uses)
            # In 2.11, a failed capture stays open in the allocator of pinned memory, so others are refused.
            self._memory = torch.cuda.MemPool()
            raise
        return _Replay(graph, self._memory, self.device)

    def _forget(self, graph: Any, uses: int) -> None:
        """Let PyTorch forget a capture that has failed, where it does not by itself. Before the capture, the
        memory had the given number of uses."""
        device, pool = torch.cuda.current_device(), self._memory.id
        end, release = (undocumented(f"_C._cuda_{name}") for name in ("endAllocateToPool", "releasePool"))
        with suppress(RuntimeError):  # older versions keep allocating in the pool (issue 180395)
            if end is not None:
                end(device, pool)
        graph.reset()
        # Up to 2.13, a failed capture remains a use of the memory, which is then never freed (issue 190348);
        # up to 2.9, the process is aborted if somebody tries to.
        while release is not None and self._memory.use_count() > uses:
            release(device, pool)
        # Up to 2.11, the random generator stays in its capture mode until a capture succeeds.
        with suppress(RuntimeError):
            number = torch.zeros(1, device=self.device)
            _record(torch.cuda.CUDAGraph(), number.zero_)


@contextmanager
def _other_errors_translated() -> Iterator[None]:
    """A context manager that turns other errors than exhausted memory into CaptureErrors of one line."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error) or isinstance(error, CaptureError):
            raise
        line, *_ = str(error).split("\n")
        raise CaptureError(f"{type(error).__name__}: {line}") from error


class _Replay:
    """Replays a graph, whose memory it keeps."""

    def __init__(self, graph: Any, memory: Any, device: torch.device):
        self._graph, self._memory, self._device = graph, memory, device

    def __call__(self) -> None:
        self._graph.replay()

    def __del__(self) -> None:
        if not sys.is_finalizing():
            with capture_lock:
                # The last replay may still be running. Before PyTorch unmaps memory of expandable segments,
                # it waits for the stream of the capture, but not for other streams.
                torch.cuda.synchronize(self._device)
                self._graph.reset()  # before the memory may be freed
                self._memory = None


def _record(graph: Any, work: Callable[[], object], **options: Any) -> None:
    """Capture on the current stream. Other threads may pin memory and use other streams meanwhile. If the
    work fails, raises its error, not the later error of ending the capture."""
    stream, errors = torch.cuda.current_stream(), list[Exception]()
    try:
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local", **options):
            try:
                work()
            except Exception as error:
                errors.append(error)
                raise
    except Exception as error:
        raise (errors[0] if errors else error) from None


@cache
def _side_stream(device: torch.device) -> Any:
    """The stream of all captures on a device: matrix products keep a workspace for each stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@cache
def _memory_of_workspaces(device: torch.device) -> Any:
    """Memory that is never freed."""
    return torch.cuda.MemPool()


def _make_workspaces(device: torch.device) -> None:
    """Let matrix products on the current stream have their workspaces in memory that is never freed.

    Graphs contain the addresses of workspaces. PyTorch would allocate missing ones in the memory of the graph
    that comes first. Since 2.12, they are missing after any graph of the stream was reset, although others
    still use them (issue 193402).
    """
    with torch.cuda.use_mem_pool(_memory_of_workspaces(device)):
        for dtype in (torch.float32, torch.float16):
            x = torch.zeros(16, 16, dtype=dtype, device=device)
            F.linear(torch.mm(x, x), x, x[0])  # by cuBLASLt, with a workspace of its own; `mm` by cuBLAS
