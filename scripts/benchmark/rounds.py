"""What both benchmarks share: tools that take turns, and a description of the machine."""

import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from benchmark.job import SCRIPTS
from mtrain import __version__

BUSY = 0.5  # processes waiting for a core, on average over the last minute


class Contestant(NamedTuple):
    """One row of a benchmark: a tool in one configuration."""

    tool: str
    precision: str
    module: str  # runs the measurement
    python: str = sys.executable
    malloc: str = "default"  # or kept: see `train.KEEP_FREED_MEMORY`
    workers: int = 0  # that decode at the same time; 0: the tool's default


def take_turns(
    contestants: Sequence[Contestant], repeats: int, run: Callable[[Contestant], dict[str, Any]]
) -> dict[Contestant, list[dict[str, Any]]]:
    """Run each contestant once per round, so that slow spells of the machine affect all of them."""
    results: dict[Contestant, list[dict[str, Any]]] = {each: [] for each in contestants}
    with tqdm(total=repeats * len(contestants), unit="run", disable=None) as bar:
        for _ in range(repeats):
            for each in contestants:
                bar.set_description(f"{each.tool} {each.precision}")
                results[each].append(run(each))
                bar.update()
    return results


def describe_run(device: torch.device) -> dict[str, Any]:
    """When and where a benchmark runs; warns on stderr if the machine is busy."""
    load = os.getloadavg()[0]
    if load > BUSY:
        print(f"warning: this machine is busy (load {load:.1f}); the results will be off", file=sys.stderr)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "mtrain": __version__,
        "commit": commit(),
        "machine": {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "device": str(device),
            "device_name": device_name(device),
            "threads": torch.get_num_threads(),
            "load_before": load,
        },
    }


def commit() -> str | None:
    """The commit of this repository, with "-dirty" after it if files have changed; None outside of git."""
    command = ["git", "-C", str(SCRIPTS), "describe", "--always", "--dirty"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return None
    return answer.stdout.strip() or None


def device_name(device: torch.device) -> str:
    """The model of the processor or the GPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
