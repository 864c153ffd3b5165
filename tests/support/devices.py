"""Devices that exist in name only, and a mark of tests that need the absence of a device."""

import pytest
import torch

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


def pretend(monkeypatch: pytest.MonkeyPatch, kind: str, count: int = 1) -> None:
    """Let PyTorch report `count` accelerators of a kind, such as `mps`."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
