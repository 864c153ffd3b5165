"""The hardware that `mtrain plan` knows, and what it assumes about it.

Peaks and sizes are the manufacturer's figures. Which shares of the peaks training reaches is assumed;
docs/experiments/large-corpora.md compares predictions with a few steps on one H200. `--hardware measured`
times real steps instead.
"""

from typing import NamedTuple

import torch

from mtrain.device import resolve_device
from mtrain.training.setup.micro_batch import available_memory

UTILIZATION = 0.3  # of the peak, in matrix products alone; assumed
BANDWIDTH_UTILIZATION = 0.7  # of the peaks of memory and links; assumed
GPU_MEMORY_SHARE = 0.9  # that tensors may take; the rest is for the CUDA context and fragmentation; assumed
# Of a process on a CPU, as measured (docs/experiments/large-corpora.md): the size of its heap relative to its
# tensors, since memory that is freed leaves gaps; and what libraries and decoding in validation take.
HEAP, LIBRARIES = 1.4, 600 * 2**20
CPU_MEMORY_SHARE = 0.5  # that tensors may take; assumed
MEASURED = "measured"


class Link(NamedTuple):
    """The connection between two devices."""

    name: str
    bandwidth: float  # bytes/s in each direction
    latency: float  # seconds of a message; assumed


class Hardware(NamedTuple):
    """A device. Rates are peaks, without sparsity; they are 0 for the hardware `measured`."""

    name: str
    low_flops: float  # FLOP/s of matrix products in bf16 or fp16
    fp32_flops: float  # FLOP/s in fp32, which PyTorch computes without TF32 by default
    memory: float  # bytes
    bandwidth: float  # of the memory, in bytes/s
    nvlink: float  # bytes/s in each direction, half of what NVIDIA states; 0: none
    on_cpu: bool = False

    def flops(self, product_bytes: int) -> float:
        """The peak for numbers of some bytes."""
        return self.fp32_flops if product_bytes == 4 else self.low_flops

    @property
    def usable_memory(self) -> float:
        """Bytes that tensors may take."""
        return (CPU_MEMORY_SHARE if self.on_cpu else GPU_MEMORY_SHARE) * self.memory

    @property
    def links(self) -> list[Link]:
        """How several of these devices may be connected."""
        nvlink = [Link("NVLink", self.nvlink, 5e-6)] if self.nvlink else []
        return [*nvlink, ETHERNET]


ETHERNET = Link("100 Gbit/s Ethernet", 12.5e9, 30e-6)  # one link for each node
# NVIDIA A100 80GB, H100 and H200 Tensor Core GPU datasheets, SXM versions; "with sparsity" halved.
_KNOWN = (
    Hardware("a100", 312e12, 19.5e12, 80e9, 2.039e12, 300e9),
    Hardware("h100", 989e12, 67e12, 80e9, 3.35e12, 450e9),
    Hardware("h200", 989e12, 67e12, 141e9, 4.8e12, 450e9),
)
GPUS = {gpu.name: gpu for gpu in _KNOWN}
# Of a core with AVX2: two multiply-adds of 8 numbers in each of 3e9 cycles. Newer cores do more.
_CORE_FLOPS, _CORE_BANDWIDTH = 2 * 2 * 8 * 3e9, 10e9


def find_hardware(name: str) -> Hardware:
    """The hardware called `a100`, `h100`, `h200`, `cpu` (the CPU of this machine, by its number of cores), or
    `measured` (the device of this machine that `fit` uses by default)."""
    if name in GPUS:
        return GPUS[name]
    if name == "cpu":
        cores = torch.get_num_threads()
        flops, bandwidth = cores * _CORE_FLOPS, cores * _CORE_BANDWIDTH
        memory = available_memory(torch.device("cpu"))
        return Hardware(name, flops, flops, memory, bandwidth, 0, on_cpu=True)
    device = resolve_device("auto")
    return Hardware(name, 0, 0, available_memory(device), 0, 0, device.type == "cpu")
