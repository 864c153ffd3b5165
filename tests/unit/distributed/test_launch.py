"""How torchrun says which rank a process is."""

import pytest

from mtrain.distributed.launch import Launch, read_launch
from mtrain.errors import UsageError


def test_a_process_that_torchrun_did_not_start_is_alone(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert read_launch() == Launch(rank=0, size=1, local_rank=0, local_size=1, restarts=0)


def test_the_environment_of_torchrun_is_read(monkeypatch):
    values = {"RANK": 9, "WORLD_SIZE": 16, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 8}
    for name, value in {**values, "TORCHELASTIC_RESTART_COUNT": 2}.items():
        monkeypatch.setenv(name, str(value))
    assert read_launch() == Launch(9, 16, 1, 8, 2)
    monkeypatch.setenv("RANK", "nine")
    with pytest.raises(UsageError, match="RANK: 'nine' in the environment is not a number"):
        read_launch()
