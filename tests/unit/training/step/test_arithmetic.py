"""What a resumed run says about its results."""

from types import SimpleNamespace

import pytest
import torch

from mtrain.checkpoint.state import TrainState
from mtrain.training.step.arithmetic import log_changes


@pytest.fixture
def message(monkeypatch, caplog):
    """The message of a run that resumes with the same arithmetic."""

    def resume(device: str, reproducible: bool = True, ranks: int = 1) -> str:
        caplog.clear()
        caplog.set_level("INFO", "mtrain")
        monkeypatch.setattr("mtrain.training.step.arithmetic.can_reproduce", lambda _: reproducible)
        learner = SimpleNamespace(device=torch.device(device))
        log_changes(TrainState(arithmetic="a"), "a", learner, SimpleNamespace(is_first=True, size=ranks))
        return caplog.text

    return resume


def test_the_same_cpu_or_gpu_gives_the_same_results(message):
    assert message("cpu", reproducible=False) == message("cpu", ranks=2) == message("cuda") == ""


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        ({"device": "mps", "reproducible": False}, "the order of GPU operations varies"),
        ({"device": "cuda", "reproducible": False}, "the order of GPU operations varies"),
        ({"device": "cuda", "ranks": 2}, "the order in which NCCL adds up gradients may vary"),
    ],
)
def test_what_may_differ_is_said(message, run, reason):
    assert f"resuming, but not bit-identically: {reason}" in message(**run)
