"""Training computes in PyTorch's deterministic mode, with workspaces of a fixed size."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from mtrain.processes.stop_signals import StopSignal
from mtrain.training import loop
from mtrain.training.fit import fit, make_trainer
from mtrain.training.loop import train
from mtrain.training.trainer import Trainer


def train_with(trainer: Trainer, check: Callable[[], bool]) -> list[bool]:
    """Train, and check something in every forward pass, except in validations."""
    found: list[bool] = []

    def hook(module: nn.Module, *_: object) -> None:
        if module.training:
            found.append(check())

    trainer.model.register_forward_hook(hook)
    with StopSignal() as stop:
        train(trainer, stop)
    return found


def test_every_step_and_the_dry_run_are_reproducible(make_config, monkeypatch):
    """The mode itself only concerns GPUs."""
    active: list[torch.device] = []

    @contextmanager
    def reproducible(device: torch.device) -> Iterator[None]:
        active.append(device)
        yield
        active.pop()

    monkeypatch.setattr(loop, "reproducible", reproducible)
    trainer = make_trainer(make_config(training={"max_steps": 2}), device="cpu")
    found = train_with(trainer, lambda: bool(active))
    assert len(found) > 2 and all(found) and not active


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_steps_on_a_gpu_have_the_deterministic_mode(make_config):
    trainer = make_trainer(make_config(training={"max_steps": 2}), device="cuda")
    found = train_with(trainer, torch.are_deterministic_algorithms_enabled)
    assert found and all(found) and not torch.are_deterministic_algorithms_enabled()


def test_workspaces_are_fixed_before_the_device_is_used(make_config, monkeypatch):
    class DeviceUsed(Exception):
        pass

    def join(device: str) -> None:
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        raise DeviceUsed

    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    monkeypatch.setattr("mtrain.training.fit.joined_ranks", join)
    with pytest.raises(DeviceUsed):
        fit(make_config(), device="cpu")
