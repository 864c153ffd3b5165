"""Streams, events and CUDA graphs of the simulated device; `graphs.h` says what a graph does.

Operations complete at once, so streams and events have no effect. As on a GPU, a capture must not be on the
default stream, and must not read an event.
"""

import contextlib
import ctypes
import threading
from collections.abc import Callable
from itertools import count
from typing import Any

import torch


class _State:
    library: ctypes.CDLL
    wait: Callable[[str], None]  # reports a wait of the host
    captured: "CUDAGraph | None" = None  # its capture has begun
    replayed: "CUDAGraph"  # at last
    errors: list[BaseException] = []  # noqa: RUF012  # of functions that a replay calls
    pools = count(1)


class Event:
    """An event of a device whose operations complete at once."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    record = wait = wait_event = wait_stream = __init__

    def synchronize(self) -> None:
        _State.wait(f"{type(self).__name__}.synchronize")

    def query(self) -> bool:
        if is_capturing():
            _State.wait(f"{type(self).__name__}.query")
        return True


class Stream(Event):
    """A stream of such a device."""

    device = torch.device("cuda:0")

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()


_default = Stream()
_of_thread = threading.local()


def current_stream(*_: Any) -> Stream:
    stream: Stream = getattr(_of_thread, "stream", _default)
    return stream


def set_stream(stream: Stream) -> None:
    _of_thread.stream = stream


def is_capturing() -> bool:
    return bool(_State.library.is_capturing())


def graph_pool_handle() -> tuple[int, int]:
    return 0, next(_State.pools)


class MemPool:
    """Memory for graphs, in name only."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.id = graph_pool_handle()


class CUDAGraph:
    """Replaces `torch.cuda.CUDAGraph`."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._handle: int | None = None
        self._functions: list[Callable[[], None]] = []  # that a replay calls

    def capture_begin(self, pool: Any = None, *_: Any, **__: Any) -> None:
        if current_stream() is _default:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream")
        if _State.captured:
            raise RuntimeError("another CUDA graph is being captured")
        self.reset()
        self._pool = pool or graph_pool_handle()
        self._handle, _State.captured = _State.library.begin_capture(), self

    def capture_end(self) -> None:
        _State.captured = None
        if _State.library.end_capture(self._handle):
            self.reset()
            raise RuntimeError("operation failed due to a previous error during capture")

    def replay(self) -> None:
        if self._handle is None:
            raise RuntimeError("a CUDA graph is replayed without a successful capture")
        _State.replayed = self
        error = _State.library.replay(self._handle)
        if _State.errors:
            raise _State.errors.pop()
        if error is not None:
            raise RuntimeError(error.decode())

    def reset(self) -> None:
        if self._handle is not None:
            _State.library.free_graph(self._handle)
        self._handle = None
        self._functions.clear()

    def pool(self) -> Any:
        return self._pool

    def __del__(self) -> None:
        self.reset()


def keep(function: Callable[[], None]) -> int:
    """Let the graph that is being captured, if there is one, keep a function. Returns its number there."""
    if not is_capturing():
        return 0
    assert _State.captured
    _State.captured._functions.append(function)
    return len(_State.captured._functions) - 1


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64)
def _call(number: int) -> bool:
    """Call a function of the graph that is being replayed. Returns whether it has failed."""
    try:
        _State.replayed._functions[number]()
    except BaseException as error:
        _State.errors.append(error)
        return True
    return False


def install(library: ctypes.CDLL, wait: Callable[[str], None]) -> None:
    """Replace what PyTorch lacks without CUDA."""
    _State.library, _State.wait = library, staticmethod(wait)
    library.begin_capture.restype = ctypes.c_void_p
    library.replay.restype = ctypes.c_char_p
    for function in (library.end_capture, library.replay, library.free_graph):
        function.argtypes = [ctypes.c_void_p]
    library.set_launcher(_call)
    for module in (torch.cuda, torch.cuda.graphs):
        module.CUDAGraph = CUDAGraph
        module.graph_pool_handle = graph_pool_handle
        module.is_current_stream_capturing = is_capturing
    torch.cuda.Event, torch.cuda.Stream, torch.cuda.MemPool = Event, Stream, MemPool
    torch.cuda.use_mem_pool = lambda *_: contextlib.nullcontext()
    torch.cuda.current_stream, torch.cuda.set_stream = current_stream, set_stream
    torch.cuda.default_stream = lambda *_: _default
    torch._C._host_emptyCache = lambda: None
