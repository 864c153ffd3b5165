"""CUDA graphs: work for a GPU that is recorded once, and started by one call from then on.

An eager operation costs the host some microseconds, so that a GPU waits for the host when operations are
small. A replayed graph costs the same few microseconds as a whole.

A graph repeats what was recorded: the same operations on the same addresses, with the Python numbers of that
moment. So everything that changes from one replay to the next is in tensors that are allocated before the
capture and are written in place. The graphs of a pool share memory for their temporary tensors: replays take
place one after the other on the current stream, and what a replay leaves for later is copied to a tensor that
was allocated before. Captured work neither waits for the device nor copies anything from or to the host.
"""

import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import torch

from mtrain.errors import is_out_of_memory
from mtrain.kernels.undocumented import undocumented

WARM_UPS = 2  # the first one compiles kernels and loads them; the second one allocates as the capture does
ATTEMPTS = 2  # an event of another thread may end a capture

Work = Callable[[], None]

_capturing = threading.Lock()


def is_capturing(device: torch.device) -> bool:
    """Whether this thread is capturing a graph on its current stream."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class CaptureError(Exception):
    """Some work cannot be captured as a graph. The message says why."""


class GraphPool:
    """Memory for the temporary tensors of graphs on `device`. It is freed when nobody has the pool or one of
    its graphs any more. On other devices than CUDA, nothing is captured."""

    def __init__(self, device: torch.device):
        self.device = device
        self._memory: Any = None
        if device.type == "cuda":
            with torch.cuda.device(device):
                self._memory = torch.cuda.MemPool()

    def run(self, work: Work) -> None:
        """Run `work` without a graph, in the memory of the graphs."""
        if self.device.type != "cuda":
            work()
            return
        with _capturing, self._prepared(), torch.cuda.use_mem_pool(self._memory):
            work()

    def capture(self, work: Work) -> Work:
        """A function that replays `work` as a graph; on other devices than CUDA, `work` itself.

        `work` is run a few times before, and its state afterwards is not what it was: the caller gives it
        inputs that do no harm, and resets what it changes. Only one thread captures at a time; others may
        use the device meanwhile.

        Raises CaptureError if `work` fails or cannot be captured, or the error that says so if memory runs
        out. Everything still works without a graph then.
        """
        if self.device.type != "cuda":
            return work
        with _capturing, self._prepared():
            for _ in range(ATTEMPTS):
                try:
                    return self._captured(work)
                except Exception as error:
                    if is_out_of_memory(error):
                        raise
                    line, *_ = str(error).split("\n")
                    reason = f"{type(error).__name__}: {line}"
                if place := _place_of_wait(work):
                    reason = f"the host waits for the device in {place}"
                    break
        raise CaptureError(reason)

    @contextmanager
    def _prepared(self) -> Iterator[None]:
        """A context manager for warm-ups and captures: on a stream of their own, as capturing requires."""
        stream, collects = _side_stream(self.device), gc.isenabled()
        gc.disable()  # what is freed during a capture may end it
        try:
            with torch.cuda.device(self.device):
                _release_everything()
                stream.wait_stream(torch.cuda.current_stream())
                # On this thread only, which allocates in the pool: also the backward pass.
                with torch.cuda.stream(stream), torch.autograd.set_multithreading_enabled(False):
                    yield
        finally:
            torch.cuda.current_stream(self.device).wait_stream(stream)
            if collects:
                gc.enable()

    def _captured(self, work: Work) -> Work:
        # In the memory of the graph: in other memory, warm-ups would need as much again.
        with torch.cuda.use_mem_pool(self._memory):
            for _ in range(WARM_UPS):
                work()
        _release_everything()
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may pin memory and use other streams meanwhile.
            options = {"pool": self._memory.id, "capture_error_mode": "thread_local"}
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), **options):
                work()
        except Exception as error:
            self._end_allocating()
            first = error.__context__  # after it, the end of the capture may have failed, too
            raise first if first is not None and is_out_of_memory(first) else error from None
        return _Replay(graph, self._memory)

    def _end_allocating(self) -> None:
        """Let the allocator forget a capture whose end has failed, if PyTorch did not."""
        end = undocumented("_C._cuda_endAllocateToPool")
        with suppress(RuntimeError):  # PyTorch did
            if end is not None:
                end(torch.cuda.current_device(), self._memory.id)


class _Replay:
    """Replays a graph, whose memory it keeps."""

    def __init__(self, graph: Any, memory: Any):
        self._graph, self._memory = graph, memory

    def __call__(self) -> None:
        self._graph.replay()

    def __del__(self) -> None:
        self._graph.reset()  # before the memory may be freed


@cache
def _side_stream(device: torch.device) -> Any:
    """The stream of all captures on a device: matrix products keep a workspace for each stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _release_everything() -> None:
    """Free what nobody uses, and wait for the device."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def _place_of_wait(work: Work) -> str | None:
    """Where `work` makes the host wait for the device: the file and the line; None if it is not known."""
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("warn")  # "error" would make other threads fail
    try:
        with warnings.catch_warnings(record=True) as caught, suppress(Exception):
            warnings.simplefilter("always")
            work()
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    waits = [warning for warning in caught if "synchronizing" in str(warning.message)]
    return f"{waits[0].filename}:{waits[0].lineno}" if waits else None
