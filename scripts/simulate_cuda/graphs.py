"""Streams, events and CUDA graphs of the simulated device; `graphs.h` says what a graph does.

Operations complete at once, so streams and events have no effect. As on a GPU, a capture must not be on the
default stream, and must not read an event.
"""

import contextlib
import ctypes
import sys
import threading
from collections.abc import Callable
from itertools import count
from typing import Any

import torch

_library: ctypes.CDLL
_wait: Callable[[str], None]  # reports a wait of the host
_capture: "CUDAGraph | None" = None  # the graph whose capture has begun
_replay: "CUDAGraph"  # the graph that is being replayed
_error: BaseException | None = None  # of a function that it calls
_pools = count(1)
_of_thread = threading.local()  # `stream`


class Event:
    """An event of a device whose operations complete at once."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    record = wait = wait_event = wait_stream = __init__

    def synchronize(self) -> None:
        _wait(f"{type(self).__name__}.synchronize")

    def query(self) -> bool:
        if is_capturing():
            _wait(f"{type(self).__name__}.query")
        return True


class Stream(Event):
    """A stream of such a device."""

    device = torch.device("cuda:0")

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()


_default = Stream()


def current_stream(*_: Any) -> Stream:
    return getattr(_of_thread, "stream", _default)


def set_stream(stream: Stream) -> None:
    _of_thread.stream = stream


def is_capturing() -> bool:
    return bool(_library.is_capturing())


def graph_pool_handle() -> tuple[int, int]:
    return 0, next(_pools)


class MemPool:
    """Memory for graphs, in name only."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.id = graph_pool_handle()

    def use_count(self) -> int:
        return 1


class CUDAGraph:
    """Replaces `torch.cuda.CUDAGraph`."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._handle: int | None = None
        self.functions: list[Callable[[], None]] = []  # that a replay calls

    def capture_begin(self, pool: Any = None, *_: Any, **__: Any) -> None:
        global _capture
        if current_stream() is _default:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream")
        if _capture is not None:
            raise RuntimeError("another CUDA graph is being captured")
        self.reset()
        self._pool = pool or graph_pool_handle()
        self._handle, _capture = _library.begin_capture(), self

    def capture_end(self) -> None:
        global _capture
        _capture = None
        if _library.end_capture(self._handle):
            self.reset()
            raise RuntimeError("operation failed due to a previous error during capture")

    def replay(self) -> None:
        global _replay, _error
        if self._handle is None:
            raise RuntimeError("a CUDA graph is replayed without a successful capture")
        _replay, _error = self, None
        message = _library.replay(self._handle)
        if message is not None:
            raise RuntimeError(message.decode()) from _error

    def reset(self) -> None:
        if self._handle is not None:
            _library.free_graph(self._handle)
        self._handle = None
        self.functions.clear()

    def pool(self) -> Any:
        return self._pool

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.reset()


def keep(function: Callable[[], None]) -> int:
    """Let the graph that is being captured, if there is one, keep a function. Returns its number there."""
    if not is_capturing():
        return 0
    assert _capture
    _capture.functions.append(function)
    return len(_capture.functions) - 1


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64)  # type: ignore[untyped-decorator]
def _call(number: int) -> bool:
    """Call a function of the graph that is being replayed. Returns whether it has failed."""
    global _error
    try:
        _replay.functions[number]()
    except BaseException as error:
        _error = error
    return _error is not None


def install(library: ctypes.CDLL, wait: Callable[[str], None]) -> None:
    """Replace what PyTorch lacks without CUDA."""
    global _library, _wait
    _library, _wait = library, wait
    library.begin_capture.restype = ctypes.c_void_p
    library.replay.restype = ctypes.c_char_p
    for function in (library.end_capture, library.replay, library.free_graph):
        function.argtypes = [ctypes.c_void_p]
    library.set_launcher(_call)
    cuda: Any = torch.cuda
    for module in (cuda, cuda.graphs):
        module.CUDAGraph, module.graph_pool_handle = CUDAGraph, graph_pool_handle
        module.is_current_stream_capturing = is_capturing
    cuda.Event, cuda.Stream, cuda.MemPool = Event, Stream, MemPool
    cuda.use_mem_pool = lambda *_: contextlib.nullcontext()
    cuda.current_stream, cuda.set_stream = current_stream, set_stream
    cuda.default_stream = lambda *_: _default
    torch._C._host_emptyCache = lambda: None
