"""The simulated device for Python: importing this module before `torch` makes it available."""

import contextlib
import ctypes
import os
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from simulate_cuda import build

library = build.load()

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when kernels are declared

import torch  # noqa: E402

from simulate_cuda import graphs, triton_kernels  # noqa: E402

ROOT = Path(__file__).parents[2]
NOT_SHOWN = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<")  # beginnings of file names
WARN, ERROR = 1, 2  # modes of torch.cuda.set_sync_debug_mode

# What happened, by kind: the names of "operation" and "copy", and the place and the name of each "wait"
Events = defaultdict[str, Counter[str]]


# ------------------------------------------------------------------------------------------------- reports
class _State:
    mode = 0
    events: Events | None = None


def _place() -> tuple[str, int]:
    """The file and line that has called PyTorch, outside of it."""
    frame: Any = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(NOT_SHOWN):
        frame = frame.f_back
    return ("backward pass", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)


_REPORT = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p)


@_REPORT  # type: ignore[untyped-decorator]
def _report(kind: bytes, name: bytes) -> bool:
    """Called for each operation, copy and wait. Returns whether the device raises an error."""
    text, is_wait = name.decode(), kind == b"wait"
    if is_wait:
        file, line = _place()
        if _State.mode == WARN:
            warnings.warn_explicit(f"called a synchronizing CUDA operation: {text}", UserWarning, file, line)
        text = f"{file.removeprefix(f'{ROOT}/')}:{line} {text}"
    if _State.events is not None:
        _State.events[kind.decode()][text] += 1
    return is_wait and _State.mode == ERROR


def _listen() -> None:
    """Let the device call `_report` while that is needed."""
    library.set_reporter(_report if _State.events is not None or _State.mode else _REPORT())


@contextlib.contextmanager
def recording() -> Iterator[Events]:
    """A context manager that counts what happens on the device."""
    events: Events = defaultdict(Counter)
    _State.events = events
    _listen()
    try:
        yield events
    finally:
        _State.events = None
        _listen()


def _set_mode(mode: int) -> None:
    _State.mode = mode
    _listen()


def wait(name: str) -> None:
    """Report a wait of the host. Raises RuntimeError where it is not permitted."""
    if library.wait_in_capture():
        raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
    if _report(b"wait", name.encode()):
        raise RuntimeError(f"called a synchronizing CUDA operation: {name}")


# ----------------------------------------------------------------------------------------------- stand-ins
def _returning(result: Any) -> Callable[..., Any]:
    """A function that returns a constant."""
    return lambda *_, **__: result


_deepcopy: Any = torch.Tensor.__deepcopy__


def _deepcopy_without_storage(tensor: torch.Tensor, memo: dict[int, Any]) -> Any:
    """Replaces `torch.Tensor.__deepcopy__`, which would create a storage of the device from Python."""
    if not tensor.is_cuda or id(tensor) in memo:
        return _deepcopy(tensor, memo)
    return memo.setdefault(id(tensor), tensor.detach().clone())


def install() -> None:
    """Replace what PyTorch lacks without CUDA."""
    cuda: Any = torch.cuda
    memory = 80 * 2**30
    properties = SimpleNamespace(
        name="simulated GPU",
        major=9,
        minor=0,
        total_memory=memory,
        multi_processor_count=132,
        uuid="simulated",
    )
    results: dict[str, Any] = {
        "_cuda_getDeviceCount": 1,
        "_cuda_getDevice": 0,
        "_cuda_setDevice": None,
        "_cuda_emptyCache": None,
        "_cuda_memoryStats": {},
        "_cuda_resetPeakMemoryStats": None,
        "_cuda_getCurrentRawStream": 0,
    }
    for name, result in results.items():
        setattr(torch._C, name, _returning(result))
    torch._C._cuda_set_sync_debug_mode = _set_mode  # type: ignore[assignment]
    torch._C._cuda_get_sync_debug_mode = lambda: _State.mode
    cuda._initialized = True
    cuda._get_device_properties = _returning(properties)
    cuda._exchange_device = cuda._maybe_exchange_device = _returning(0)
    cuda.default_generators = (torch.default_generator,)  # of the kernels that compute
    cuda.synchronize = lambda *_: wait("torch.cuda.synchronize")
    cuda.mem_get_info = _returning((memory, memory))
    torch.Tensor.__deepcopy__ = _deepcopy_without_storage  # type: ignore[method-assign]


install()
graphs.install(library, wait)
triton_kernels.install()
