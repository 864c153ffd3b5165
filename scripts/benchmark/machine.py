"""Where something was measured, and with what."""

import platform
import subprocess
from pathlib import Path

import torch

from benchmark.job import SCRIPTS

BUSY = 0.5  # processes that wait for a core, on average over the last minute


def commit() -> str | None:
    """The commit of this repository, with "-dirty" if files differ from it; None outside of git."""
    command = ["git", "-C", str(SCRIPTS), "describe", "--always", "--dirty"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return None
    return answer.stdout.strip() or None


def device_name(device: torch.device) -> str:
    """The processor or the GPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
