"""Counting training steps and translations over wall time, in the same way for every tool."""

import resource
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmark.job import DecodingJob


class Meter:
    """Measures a span of whole steps, which begins when the first step ends after the warm-up."""

    def __init__(self, device: str, warmup: float, seconds: float):
        """`warmup` and `seconds`, the minimum length of the span, are described in TrainingJob."""
        self.device, self.warmup, self.seconds = torch.device(device), warmup, seconds
        self.created = time.perf_counter()
        self.started: float | None = None
        self.elapsed = 0.0  # seconds
        self.steps = self.tokens = self.positions = 0

    def step(self, tokens: int, positions: int) -> bool:
        """Count a step that has just ended; returns whether the measured span is over.

        `tokens` are its target tokens including EOS, `positions` its target positions including padding.
        """
        now = time.perf_counter()
        if self.started is None:
            if now - self.created >= self.warmup:
                synchronize(self.device)
                self.started = time.perf_counter()
            return False
        self.steps += 1
        self.tokens += tokens
        self.positions += positions
        if now - self.started < self.seconds:
            return False
        synchronize(self.device)
        self.elapsed = time.perf_counter() - self.started
        return True

    def result(self) -> dict[str, Any]:
        """The measurements, with units in their names."""
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


def time_decoding(
    job: DecodingJob, translate: Callable[[list[list[int]], int, int], Sequence[int]]
) -> dict[str, Any]:
    """Time `translate(sentences, batch, beams)`, which returns the lengths of the translations.

    Each setting is timed once after a short warm-up; a batch size of 1 on a tenth of the sentences.
    """
    results = []
    for batch, beams in job.settings:
        chosen = job.sentences if batch > 1 else job.sentences[::10]
        translate(chosen[: 2 * batch], batch, beams)
        start = time.perf_counter()
        if batch > 1:
            lengths = list(translate(chosen, batch, beams))
        else:
            lengths = [length for one in chosen for length in translate([one], 1, beams)]
        seconds = time.perf_counter() - start
        if lengths != [job.length] * len(chosen):
            raise RuntimeError(f"not all translations have {job.length} tokens")
        results.append({"batch": batch, "beams": beams, "sentences_per_second": len(chosen) / seconds})
    return {"settings": results, "peak_mib": peak_mib(torch.device(job.device))}


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished all work submitted to it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_mib(device: torch.device) -> float | None:
    """Peak memory of this process in MiB.

    On a GPU the memory of tensors, None if the tool does not use PyTorch; on a CPU resident memory, with that
    of child processes that still run.
    """
    if device.type == "cuda":
        used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return torch.cuda.max_memory_allocated(device) / 2**20 if used else None
    this = Path("/proc/self")
    if (this / "status").exists():  # getrusage would include the parent process
        children = [file.read_text().split() for file in this.glob("task/*/children")]
        return sum(
            map(_peak_resident_mib, [this, *(Path("/proc") / pid for pids in children for pid in pids)])
        )
    unit = 1 if sys.platform == "darwin" else 1024  # macOS reports bytes, others KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def _peak_resident_mib(process: Path) -> float:
    """Peak resident memory of a process on Linux in MiB, from its folder in /proc."""
    lines = (process / "status").read_text().splitlines()
    return int(next((line.split()[1] for line in lines if line.startswith("VmHWM:")), 0)) / 1024
