"""Counting training steps over a span of wall time, in the same way for every tool."""

import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmark.job import Job


class Meter:
    """Measures whole steps in a span that begins with the first step to end after the warm-up."""

    def __init__(self, job: Job):
        self.device, self.warmup, self.seconds = torch.device(job.device), job.warmup, job.seconds
        self.created = time.perf_counter()
        self.started: float | None = None
        self.elapsed = 0.0  # seconds
        self.steps = self.tokens = self.positions = 0

    def step(self, tokens: int, positions: int) -> bool:
        """Count a step that has just ended, with its target tokens (EOS counted) and the target positions,
        padding included, that they were spread over. Returns whether the span is over."""
        now = time.perf_counter()
        if self.started is None:
            if now - self.created >= self.warmup:
                synchronise(self.device)
                self.started = time.perf_counter()
            return False
        self.steps += 1
        self.tokens += tokens
        self.positions += positions
        if now - self.started < self.seconds:
            return False
        synchronise(self.device)
        self.elapsed = time.perf_counter() - self.started
        return True

    def result(self) -> dict[str, Any]:
        """What was measured, with units in the names."""
        return {
            "target_tokens_per_second": self.tokens / self.elapsed,
            "ms_per_step": 1000 * self.elapsed / self.steps,
            "target_tokens_per_step": self.tokens / self.steps,
            "padding": 1 - self.tokens / self.positions,
            "peak_mib": peak_mib(self.device),
            "steps": self.steps,
            "seconds": self.elapsed,
            "threads": torch.get_num_threads(),
        }


def synchronise(device: torch.device) -> None:
    """Wait for all that a GPU has been given to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_mib(device: torch.device) -> float | None:
    """The most memory that this process has held, MiB: tensors on a GPU, None if they are not PyTorch's; on a
    CPU resident memory, that of the processes it has started and that still run included."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20 if torch.cuda.is_initialized() else None
    own = Path("/proc/self")
    if (own / "status").exists():  # getrusage would count the process that started this one as well
        started = [file.read_text().split() for file in own.glob("task/*/children")]
        return sum(map(_high_mib, [own, *(Path("/proc") / pid for pids in started for pid in pids)]))
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def _high_mib(process: Path) -> float:
    """The most resident memory that a process of Linux has held, by its folder in /proc."""
    lines = (process / "status").read_text().splitlines()
    return int(next((line.split()[1] for line in lines if line.startswith("VmHWM:")), 0)) / 1024
