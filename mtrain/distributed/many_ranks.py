"""Several ranks: process groups, and what travels through them.

Values that a host needs at once travel between the hosts (gloo), so that nobody waits for a GPU. Gradients
and sums of losses travel between the devices (NCCL on GPUs).
"""

import json
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mtrain.device import find_accelerator, let_cuda_memory_grow, resolve_device
from mtrain.distributed.launch import Launch, read_launch, require_complete_launch
from mtrain.distributed.ranks import JsonValue, Ranks
from mtrain.distributed.store import RankStore, require_equal_facts, require_own_gpus
from mtrain.errors import MtrainError, UsageError, is_out_of_memory, is_recoverable
from mtrain.kernels.undocumented import undocumented
from mtrain.version import __version__

STEP_TIMEOUT = timedelta(seconds=100)  # within a training step, once the first one is done
WAITING_TIMEOUT = timedelta(hours=1)  # while rank 0 saves or validates, and before the first step
PREPARING_TIMEOUT = timedelta(hours=24)  # while rank 0 prepares the data

# Messages of gloo, NCCL, the store, and DistributedDataParallel when another rank is lost.
_LOST = re.compile(
    r"gloo|NCCL|ProcessGroup|Store|onnection (closed|reset|refused)|roken pipe|imed ?out|imeout|pair closure"
    r"|running the callback"
)


@contextmanager
def joined_ranks(device: str) -> Iterator[Ranks]:
    """Connect the ranks that torchrun has started. `device` is as in `resolve_device`, but each rank of a
    machine has a GPU of its own, and several ranks need CPUs or CUDA devices.

    Raises UsageError if there is no such device; DistributedError if the ranks cannot work together.
    """
    launch = read_launch()
    require_complete_launch()
    let_cuda_memory_grow()  # now: the next lines may initialize CUDA
    if launch.size == 1:
        yield Ranks(resolve_device(device))
        return
    store = RankStore(launch)
    with store.answering():
        try:  # from here on, a failure is reported to the other ranks
            yield ManyRanks(resolve_device(_name_device(device, launch)), launch, store)
        except BaseException as error:
            store.report_end(error)
            abort_gpu_communication()
            raise
    dist.destroy_process_group()


def _name_device(name: str, launch: Launch) -> str:
    """The device of this one of several ranks. Raises UsageError if they cannot use `name`."""
    if name.startswith("cuda:"):
        raise UsageError(f"--device {name}: torchrun gives each process a GPU; give --device cuda or auto")
    kind = find_accelerator() if name == "auto" else name
    if kind.startswith(("mps", "xpu")):
        raise UsageError(f"--device {name}: several processes cannot use {kind}; give --device cpu")
    if kind == "cuda" and torch.accelerator.device_count() == 1 and "LOCAL_WORLD_SIZE" not in os.environ:
        return "cuda:0"  # not started by torchrun, but by a system that shows each process its own GPU
    if kind == "cuda" and launch.local_rank >= (count := torch.accelerator.device_count()):
        processes = max(launch.local_size, launch.local_rank + 1)
        found = f"torchrun has started {processes} processes on this machine, which has {count} GPUs"
        raise UsageError(f"{found}; lower --nproc-per-node, or give --device cpu")
    return f"cuda:{launch.local_rank}" if kind == "cuda" else kind


class ManyRanks(Ranks):
    """One of several processes that `torchrun` has started."""

    def __init__(self, device: torch.device, launch: Launch, store: RankStore):
        """Connect to the others. Raises DistributedError if one of them does not start in time, has another
        version, or uses the same GPU."""
        super().__init__(device)
        self.rank, self.size = launch.rank, launch.size
        self.store, host = store, socket.gethostname()
        self._expects_steps = False
        self.store.hosts = self.store.exchange(host)
        # Other programs than torchrun may not tell how many there are.
        given = "LOCAL_WORLD_SIZE" in os.environ
        self.local_size = launch.local_size if given else self.store.hosts.count(host)
        versions = {"the version of mtrain": __version__, "the version of PyTorch": torch.__version__}
        self.require_equal({**versions, "the kind of device": device.type})
        require_own_gpus(self.store.exchange(_identify_gpu(device, host)))
        # NCCL's watchdog shall end communication that has failed, but not the process, which would leave no
        # message. torchrun sets the variable to 1, which means both.
        if os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1") == "1":
            os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "2"
        gpu = device.type == "cuda"
        with self.watched():
            dist.init_process_group(
                "nccl" if gpu else "gloo",
                store=store.groups,
                rank=self.rank,
                world_size=self.size,
                timeout=WAITING_TIMEOUT,
                device_id=device if gpu else None,
            )
            self._hosts = dist.new_group(backend="gloo", timeout=WAITING_TIMEOUT) if gpu else None
            self._waiting = dist.new_group(backend="gloo", timeout=WAITING_TIMEOUT)
            self._preparing = dist.new_group(backend="gloo", timeout=PREPARING_TIMEOUT)

    @contextmanager
    def watched(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            is_known = isinstance(error, dist.DistError) or _LOST.search(str(error))
            if not is_known or is_out_of_memory(error):
                raise
            raise self.store.find_lost_ranks(error) from error

    def expect_steps(self) -> None:
        if self._expects_steps:
            return
        self._expects_steps = True
        with self.watched():  # a new group, because PyTorch before 2.10 cannot change the timeout of gloo
            self._hosts = dist.new_group(backend="gloo", timeout=STEP_TIMEOUT)
        if self.device.type == "cpu":
            self.step_group = self._hosts
        # A rank that does not respond is noticed on the host first, which can report it.
        set_timeout = undocumented("distributed.distributed_c10d._set_pg_timeout")
        if set_timeout is not None:
            set_timeout(3 * STEP_TIMEOUT)  # of the default group

    def require_equal(self, facts: Mapping[str, str]) -> None:
        if dist.is_initialized():
            self.barrier()  # unlike the store, a connection tells that a rank was killed
        require_equal_facts(self.store.exchange(dict(facts)))

    def barrier(self) -> None:
        with self.watched():
            dist.all_reduce(torch.zeros(1), group=self._waiting)

    def all_reduce_max(self, *values: float) -> list[float]:
        found = torch.tensor(values, dtype=torch.float64)
        with self.watched():
            dist.all_reduce(found, dist.ReduceOp.MAX, group=self._hosts)
        return found.tolist()

    def start_all_reduce(self, values: Tensor) -> Callable[[], None]:
        with self.watched():
            work = dist.all_reduce(values, group=self.step_group, async_op=True)
        assert work is not None

        def complete() -> None:
            with self.watched():
                work.wait()  # on a GPU, the host does not wait

        return complete

    def broadcast(self, value: JsonValue, preparing: bool = False) -> JsonValue:
        group, content = self._preparing if preparing else self._waiting, _encode(value)
        with self.watched():
            size = torch.tensor([len(content)])
            dist.broadcast(size, src=0, group=group)
            if not self.is_first:
                content = torch.empty(int(size), dtype=torch.uint8)
            dist.broadcast(content, src=0, group=group)
        return value if self.is_first else _decode(content)

    def gather(self, value: JsonValue) -> list[JsonValue]:
        content, sizes = _encode(value), torch.zeros(self.size, dtype=torch.int64)
        sizes[self.rank] = len(content)
        with self.watched():
            dist.all_reduce(sizes, group=self._waiting)
            padded = torch.zeros(int(sizes.max()), dtype=torch.uint8)
            padded[: len(content)] = content
            parts = [torch.empty_like(padded) for _ in sizes]
            dist.all_gather(parts, padded, group=self._waiting)
        return [_decode(part[:size]) for part, size in zip(parts, sizes.tolist(), strict=True)]

    @contextmanager
    def agreed(self) -> Iterator[None]:
        own: Exception | None = None
        try:
            yield
        except Exception as error:
            if not is_recoverable(error):
                raise
            own = error
        code = getattr(own, "exit_code", None)
        failures = self.gather(None if own is None else {"error": str(own), "code": code})
        for rank, failure in enumerate(failures):
            if failure is None:
                continue
            agreed = own if own is not None and rank == self.rank else _rebuild_error(rank, failure)
            agreed.is_agreed = True  # type: ignore[attr-defined]
            raise agreed

    def is_agreed(self, error: Exception) -> bool:
        return getattr(error, "is_agreed", False)

    def seed_step(self, seed: int, step: int) -> None:
        [state] = np.random.SeedSequence([seed, step, self.rank]).generate_state(1, np.uint64)
        torch.manual_seed(int(state))


def abort_gpu_communication() -> None:
    """End what GPUs still wait for, so that this process can end."""
    if dist.group.WORLD is not None and dist.get_backend() == "nccl":
        with suppress(RuntimeError):
            dist.group.WORLD.abort()


def _identify_gpu(device: torch.device, host: str) -> str | None:
    if device.type != "cuda":
        return None
    return f"{getattr(torch.cuda.get_device_properties(device), 'uuid', device.index)} on {host}"


def _rebuild_error(rank: int, failure: JsonValue) -> Exception:
    """The error that another process has raised."""
    message = failure["error"] if rank == 0 else f"rank {rank}: {failure['error']}"
    if failure["code"] is None:
        return MemoryError(message)
    kinds = (kind for kind in MtrainError.__subclasses__() if kind.exit_code == failure["code"])
    return next(kinds)(message)


def _encode(value: JsonValue) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decode(content: Tensor) -> JsonValue:
    return json.loads(content.numpy().tobytes())
