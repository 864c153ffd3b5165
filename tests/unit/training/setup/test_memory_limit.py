"""The limit on micro-batches that a rank leaves behind."""

import math
from types import SimpleNamespace

import pytest
import torch

from mtrain.checkpoint.state import TrainState
from mtrain.distributed.ranks import Ranks
from mtrain.training.setup import memory_limit
from mtrain.training.setup.memory_limit import FILE, agree_on_micro_batches, read_limit, write_limit


def test_a_limit_holds_for_the_same_micro_batches(tmp_path):
    assert read_limit(tmp_path, 512) == math.inf
    write_limit(tmp_path, 512, 260.0)
    assert read_limit(tmp_path, 512) == 260.0 and read_limit(tmp_path, 1024) == math.inf
    (tmp_path / FILE).write_text("[")
    assert read_limit(tmp_path, 512) == math.inf


def test_a_limit_that_cannot_be_written_is_logged(tmp_path, caplog):
    write_limit(tmp_path / "missing", 512, 260.0)
    assert "the next start does not know that memory ran out" in caplog.text


@pytest.mark.parametrize(
    ("now", "setting", "fitting", "expected"),
    [
        ("cuda (NVIDIA H200)", "auto", 4096, 1024),
        ("cuda (NVIDIA H200)", "auto", 512, 512),
        ("cuda (NVIDIA H200)", 4096, 4096, 4096),
        ("cuda (NVIDIA H200 NVL)", "auto", 4096, 4096),
        ("cpu (AVX2, 2 threads)", "auto", 4096, 4096),
    ],
)
def test_a_run_that_resumes_on_the_same_kind_of_gpu_keeps_its_micro_batches(
    make_config, monkeypatch, now, setting, fitting, expected
):
    config = make_config(training={"batch_tokens": 4096, "micro_batch_tokens": setting})
    monkeypatch.setattr(memory_limit, "micro_batch_tokens", lambda *_: fitting)
    monkeypatch.setattr(memory_limit, "describe_device", lambda _: now)
    state = TrainState(micro_batch_tokens=1024, arithmetic="cuda (NVIDIA H200), bf16, torch 2.13.0, 1 worker")
    learner = SimpleNamespace(device=torch.device(now.partition(" ")[0]))
    assert agree_on_micro_batches(config, None, learner, state, Ranks(torch.device("cpu"))) == expected
