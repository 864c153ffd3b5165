"""Which device, which arithmetic, and how the C library hands out memory."""

import ctypes
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import torch

from mtrain.errors import UsageError


def resolve_device(name: str) -> torch.device:
    """`auto` (a GPU if there is one), `cpu`, `cuda` or `cuda:N`, which becomes PyTorch's present one. Raises
    UsageError if it is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device {name}: no such device; give auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        found = f"{torch.cuda.device_count() or 'no'} CUDA device(s)"
        raise UsageError(f"--device {name}: this machine has {found}; give --device cpu or auto")
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # where libraries put what they are not told a place for
    return device


def describe_arithmetic(device: torch.device, precision: str, compiled: bool, workers: int) -> str:
    """All of a machine that decides the last bits of a step, in words: sums differ with the number of threads
    that share them, and with the instructions."""
    place = f"cpu ({torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads)"
    if device.type == "cuda":
        place = f"cuda ({torch.cuda.get_device_name(device)})"
    how = f"{precision}{', compiled' if compiled else ''}"
    return f"{place}, {how}, torch {torch.__version__}, {workers} side by side"


def resolve_precision(device: torch.device, setting: str) -> str:
    """`fp32`, `bf16` or `fp16`. `auto` is what the device multiplies fastest in: bf16 on GPUs from Ampere on
    and on CPUs with instructions for it, fp16 on older GPUs with tensor cores, fp32 elsewhere."""
    if setting != "auto":
        return setting
    if device.type == "cuda":
        generation = torch.cuda.get_device_capability(device)
        return "bf16" if generation >= (8, 0) else "fp16" if generation >= (7, 0) else "fp32"
    has_bf16 = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return "bf16" if any(getattr(torch.cpu, name, bool)() for name in has_bf16) else "fp32"


def compiles(device: torch.device, setting: str) -> bool:
    """Whether `training.compile` means torch.compile. `auto`: on a GPU that it can compile for, to launch
    fewer kernels (not timed); not on a CPU, where it needs a C++ compiler and a minute, and a step of the
    tiny model, in bf16 and on one thread, then took 1.6 times as long."""
    if setting == "auto" and device.type == "cuda":  # Triton is for the generations from Volta on
        return torch.cuda.get_device_capability(device) >= (7, 0) and find_spec("triton") is not None
    return setting == "on"


def workers_for(device: torch.device) -> int:
    """Threads that train side by side on a device, or batches that are decoded so. On a CPU as many as use
    most cores, but at most four: threads share Python's lock, and each process that decodes holds the model
    (two were timed here). On a GPU one."""
    threads = torch.get_num_threads()
    if device.type != "cpu" or threads == 1:
        return 1
    return max(range(2, 5), key=lambda n: (threads // n * n, n))


def thread_pool(workers: int) -> ThreadPoolExecutor | None:
    """Threads whose operations each use the cores that fall to them; None for one, which needs no pool."""
    if workers == 1:
        return None
    threads = max(1, torch.get_num_threads() // workers)
    return ThreadPoolExecutor(workers, "mtrain", torch.set_num_threads, (threads,))


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Mixed precision for a forward pass: weights stay fp32, matrix products run in `precision`."""
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    return torch.autocast(device.type, dtype=dtype, enabled=precision != "fp32")


def fetched(values: torch.Tensor) -> Callable[[], list[float]]:
    """Start to copy a vector to the host. What is returned gives it, and waits for that copy alone: an
    ordinary copy, asked for later, would wait for all that the device has been given meanwhile."""
    if values.device.type != "cuda":
        now: list[float] = values.tolist()
        return lambda: now
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record(torch.cuda.current_stream(values.device))

    def read() -> list[float]:
        copied.synchronize()
        numbers: list[float] = host.tolist()
        return numbers

    return read


def keep_few_kernels() -> None:
    """Let oneDNN keep the kernels of its last 64 shapes, where it would keep 1,024 or more: a step's batches
    have ever other shapes, and each kernel holds memory. To be called before the first matrix product."""
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, "64")


def keep_freed_memory() -> None:
    """Let glibc reuse large blocks. By default it returns each to the kernel and maps it afresh, and a
    training step on a CPU then spends much of its time on page faults. Elsewhere this does nothing."""
    if sys.platform == "linux" and hasattr(ctypes.CDLL(None), "mallopt"):  # musl has none
        mallopt, m_trim_threshold, m_mmap_max = ctypes.CDLL(None).mallopt, -1, -4
        mallopt(m_mmap_max, 0)
        mallopt(m_trim_threshold, 2**31 - 1)
