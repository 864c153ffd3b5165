"""Devices, numeric precision, threads, and memory settings of the process."""

import ctypes
import os
import platform
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from mtrain.errors import UsageError
from mtrain.kernels.precision import cpu_has_amx, cpu_has_bf16
from mtrain.processes.cores import count_cores


def resolve_device(name: str) -> torch.device:
    """The device called `auto` (see `find_accelerator`), `cpu`, `cuda`, `cuda:N`, `mps`, `xpu` or `xpu:N`.

    MPS and XPU devices compute in fp32, and were never tried. For a CUDA device, this also keeps PyTorch from
    computing attention with cuDNN, in the whole process: cuDNN prepares a plan for each new shape, and nearly
    every batch of sentences has a shape of its own. Raises UsageError if this machine does not have the
    device.
    """
    accelerator = "cpu" if name == "cpu" else find_accelerator()
    name = accelerator if name == "auto" else name
    if name == "cpu":
        return torch.device(name)
    if not re.fullmatch(r"mps|(cuda|xpu)(:(0|[1-9][0-9]*))?", name):
        raise UsageError(f"--device {name}: not supported; give auto, cpu, cuda, cuda:N, mps, xpu or xpu:N")
    kind, _, index = name.partition(":")
    count = torch.accelerator.device_count() if kind == accelerator else 0
    if int(index or 0) >= count:
        found = f"{count or 'no'} {kind.upper()} device(s)"
        raise UsageError(f"--device {name}: this machine has {found}; give --device cpu or auto")
    if kind == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)
    return torch.device(name)


def count_unused_gpus(device: torch.device) -> int:
    """The number of CUDA devices that a single process leaves unused, unless the user has chosen one."""
    return torch.accelerator.device_count() - 1 if device == torch.device("cuda") else 0


def find_accelerator() -> str:
    """The kind of device that `auto` stands for: `cuda`, `mps` or `xpu` if this build of PyTorch supports it
    and there is one, otherwise `cpu`. No build supports several kinds."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found.type if found is not None and found.type in ("cuda", "mps", "xpu") else "cpu"


def let_cuda_memory_grow() -> None:
    """Make CUDA's allocator use expandable segments, in the whole process: batches of varying sizes would
    leave gaps between blocks of fixed sizes. Call this before CUDA is initialized.

    Does nothing if the environment configures the allocator, on WSL, which does not support expandable
    segments, or with PyTorch before 2.12: it warns that the variable is deprecated, but its successor has no
    effect yet.
    """
    names = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
    warns = torch.__version__ < (2, 12) or "microsoft" in platform.release()  # type: ignore[operator]
    if sys.platform == "linux" and not warns and not {*names} & {*os.environ}:
        os.environ[names[1]] = "expandable_segments:True"


def make_current(device: torch.device) -> None:
    """Make a GPU the current device of the process, which is the default of libraries."""
    if device.index is not None and device.type != "cpu":
        torch.get_device_module(device).set_device(device)


def describe_device(device: torch.device) -> str:
    """The kind and the name of a device; of a CPU, its instructions and the number of threads."""
    if device.type == "cpu":
        return f"cpu ({torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads)"
    if device.type == "mps":
        return "mps"
    return f"{device.type} ({torch.get_device_module(device).get_device_name(device)})"


def resolve_precision(device: torch.device, setting: str) -> str:
    """The precision that a setting stands for: `fp32`, `bf16` or `fp16`.

    `auto` means the one with the fastest large matrix products: bf16 on GPUs since Ampere and on CPUs with
    instructions for it, fp16 on older GPUs with tensor cores, and fp32 elsewhere. Raises UsageError for
    another precision than fp32 on MPS and XPU devices.
    """
    if device.type in ("mps", "xpu") and setting not in ("auto", "fp32"):
        raise UsageError(f"precision {setting}: not supported on {device.type}; set it to auto or fp32")
    if setting != "auto":
        return setting
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        return "bf16" if capability >= (8, 0) else "fp16" if capability >= (7, 0) else "fp32"
    return "bf16" if device.type == "cpu" and cpu_has_bf16() else "fp32"


def default_worker_count(device: torch.device) -> int:
    """The default number of parallel workers on a device: threads in training, processes in decoding.

    On a CPU it is the number from 2 to 4 that leaves the fewest cores idle. (Only 2 was measured.) More
    threads would compete for Python's global lock, and each decoding process holds a copy of the model. On
    one thread or a GPU it is 1. The threads are those of PyTorch, which does not know the quotas of a program
    that uses mtrain as a library.
    """
    threads = torch.get_num_threads()
    if "OMP_NUM_THREADS" not in os.environ:
        threads = min(threads, count_cores())
    if device.type != "cpu" or threads == 1:
        return 1
    return max(range(2, 5), key=lambda n: (threads // n * n, n))


def thread_pool(workers: int) -> ThreadPoolExecutor | None:
    """A pool of threads that divide the cores evenly; None for one worker, which needs no pool."""
    if workers == 1:
        return None
    threads = torch.get_num_threads()
    return ThreadPoolExecutor(workers, "mtrain", use_threads, (max(1, threads // workers), threads))


_SETTING_THREADS = threading.Lock()


def use_threads(count: int, default: int) -> None:
    """Let operations of this thread use `count` threads, and operations of threads started later `default`.

    `torch.set_num_threads` sets both numbers. PyTorch gives a thread the default at its first operation or
    query, hence the query; another thread, which ends at once, then restores the default.
    """
    with _SETTING_THREADS:
        torch.set_num_threads(count)
        torch.__config__.parallel_info()
        restoring = threading.Thread(target=torch.set_num_threads, args=(default,))
        restoring.start()
        restoring.join()


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Mixed precision for a forward pass: weights stay in fp32, matrix products are in `precision`."""
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    return torch.autocast(device.type, dtype=dtype, enabled=precision != "fp32")


def step_unless(optimizer: torch.optim.Optimizer, skip: Tensor) -> None:
    """`optimizer.step()` if the scalar `skip` is 0; if it is 1, parameters and moments do not change.

    A fused optimizer reads `skip` on its device, so the host does not wait for its value. PyTorch documents
    this for its GradScaler only. With any other optimizer, the host waits for `skip`.
    """
    if getattr(optimizer, "_step_supports_amp_scaling", False):  # the attribute that GradScaler reads, too
        optimizer.found_inf = skip  # type: ignore[attr-defined]
        try:
            optimizer.step()
        finally:
            del optimizer.found_inf  # type: ignore[attr-defined]
    elif not bool(skip):
        optimizer.step()


def random_states(device: torch.device) -> dict[str, Tensor]:
    """The states of the default random generators of the CPU and of a device, by kind of device."""
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state(device)
    return states


def restore_random_states(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Restore what `random_states` has returned, except for the state of another kind of device."""
    torch.set_rng_state(states["cpu"])
    if device.type != "cpu" and device.type in states:
        torch.get_device_module(device).set_rng_state(states[device.type], device)


def preserved_random_states(device: torch.device) -> AbstractContextManager[None]:
    """A context manager that restores the current states of the random generators on exit."""
    devices = [] if device.type == "cpu" else [device]
    return torch.random.fork_rng(devices, device_type=device.type)


def release_cached_memory(device: torch.device) -> None:
    """Return the memory to a device that PyTorch keeps for tensors to come."""
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()


def copy_to_host_async(values: Tensor) -> Callable[[], list[float]]:
    """Start copying a vector to the host. Returns a function that waits for the copy and returns the values.

    An ordinary copy at that time would also wait for all work queued on the device in the meantime.
    """
    if values.device.type != "cuda":
        current = values.tolist()
        return lambda: current
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    copied = torch.cuda.current_stream(values.device).record_event()

    def read() -> list[float]:
        copied.synchronize()
        return host.tolist()

    return read


def finishes_within(seconds: float, device: torch.device) -> bool:
    """Wait until all work queued on a device is finished, for up to some seconds; return whether it is."""
    if device.type != "cuda":
        return True
    finished = torch.cuda.current_stream(device).record_event()
    deadline = time.monotonic() + seconds
    while not (done := bool(finished.query())) and time.monotonic() < deadline:
        time.sleep(0.05)
    return done


def limit_onednn_cache() -> None:
    """Limit oneDNN's cache of compiled kernels to 64 shapes, with AMX to 256, unless the environment sets a
    limit.

    The default limit is 1,024 or more, and a cached kernel uses half a megabyte or more. Without
    AMX, few batches share shapes; with AMX, see `mtrain.kernels.mixed_linear`. Call this before the first
    matrix product.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, "256" if cpu_has_amx() else "64")


def keep_freed_memory() -> None:
    """Make glibc reuse large blocks of memory, in the whole process. Has no effect with other C libraries.

    By default glibc returns each large block to the kernel and maps a new one for the next, and a training
    step on a CPU spends much of its time on page faults.
    """
    if sys.platform == "linux" and hasattr(ctypes.CDLL(None), "mallopt"):  # musl has none
        m_trim_threshold, m_mmap_max = -1, -4
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(m_mmap_max, 0)
        mallopt(m_trim_threshold, 2**31 - 1)
