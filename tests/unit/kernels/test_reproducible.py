"""PyTorch's deterministic mode is on where it is wanted, and nowhere else."""

import os

import pytest
import torch

from mtrain.kernels.reproducible import can_reproduce, fix_workspaces, reproducible

CUDA = torch.device("cuda")


def mode() -> tuple[int, bool]:
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    return torch.get_deterministic_debug_mode(), fills


@pytest.fixture(params=["default", "warn", "error"])
def before(request):
    torch.set_deterministic_debug_mode(request.param)
    yield mode()
    torch.set_deterministic_debug_mode("default")


def test_a_block_for_a_gpu_has_the_mode_and_restores_the_one_before(before, monkeypatch):
    monkeypatch.setattr("mtrain.kernels.reproducible.can_reproduce", lambda device: True)
    with pytest.raises(KeyError), reproducible(CUDA):
        assert mode() == (2, False)
        raise KeyError
    assert mode() == before


def test_a_cpu_and_a_gpu_that_cannot_do_it_keep_the_mode(before, monkeypatch):
    monkeypatch.setattr("mtrain.kernels.reproducible.can_reproduce", lambda device: False)
    for device in (torch.device("cpu"), CUDA):
        with reproducible(device):
            assert mode() == before


def test_a_cpu_is_reproducible_and_an_untried_device_is_not():
    assert can_reproduce(torch.device("cpu"))
    assert not can_reproduce(torch.device("mps"))


def test_workspaces_that_the_environment_configures_are_kept(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    fix_workspaces()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] in (":4096:8", ":16:8")  # which PyTorch requires
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    fix_workspaces()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":0:0"
