"""Devices that exist in name only, and marks of tests that need the absence of a device, or a new PyTorch."""

import pytest
import torch

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
is_old = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 8)
needs_fsdp = pytest.mark.skipif(is_old, reason="training.parallel: fsdp needs PyTorch 2.8")
needs_step_timeout = pytest.mark.skipif(is_old, reason="PyTorch 2.6 does not change the timeout of gloo")


def pretend(monkeypatch: pytest.MonkeyPatch, kind: str, count: int = 1) -> None:
    """Let PyTorch report `count` accelerators of a kind, such as `mps`."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
