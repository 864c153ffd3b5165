"""How torchrun says which rank a process is."""

import pytest

from mtrain.distributed.launch import Launch, read_launch, require_complete_launch, require_torchrun
from tests.support.cli import one_line


def test_a_process_that_torchrun_did_not_start_is_alone(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert read_launch() == Launch(rank=0, size=1, local_rank=0, local_size=1, restarts=0)


def test_the_environment_of_torchrun_is_read(monkeypatch):
    values = {"RANK": 9, "WORLD_SIZE": 16, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 8}
    for name, value in {**values, "TORCHELASTIC_RESTART_COUNT": 2}.items():
        monkeypatch.setenv(name, str(value))
    assert read_launch() == Launch(9, 16, 1, 8, 2)


def test_an_environment_that_is_not_that_of_torchrun_is_an_error(monkeypatch, mtrain, config_file):
    for name in ("WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("RANK", "nine")
    code, _, err = mtrain("fit", config_file)
    assert code == 2 and "RANK: 'nine' in the environment is not a number; use torchrun" in one_line(err)


def test_a_part_of_the_environment_of_torchrun_is_an_error(monkeypatch, mtrain, config_file):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "8")
    code, _, err = mtrain("fit", config_file)
    message = one_line(err)
    assert code == 7 and "RANK, WORLD_SIZE set in the environment, but not LOCAL_RANK; " in message
    assert "start the processes with torchrun, or unset RANK, WORLD_SIZE to run alone" in message
    monkeypatch.setenv("WORLD_SIZE", "1")  # as Kubeflow does for a job of one process
    require_complete_launch()
    assert read_launch().size == 1


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        ("SLURM_STEP_NUM_TASKS", "srun has started 8 processes that do not know of each other; start one "),
        ("OMPI_COMM_WORLD_SIZE", "mpirun has started 8 processes that do not know of each other; start one "),
        ("PMI_SIZE", "each node with mpirun -npernode 1 or -ppn 1"),
    ],
)
def test_several_processes_without_torchrun_are_an_error(monkeypatch, mtrain, config_file, variable, message):
    monkeypatch.setenv(variable, "8")
    code, _, err = mtrain("fit", config_file)
    assert code == 7 and message in one_line(err)
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0}.items():
        monkeypatch.setenv(name, str(value))
    require_torchrun()
    monkeypatch.setenv(variable, "1")
    monkeypatch.delenv("RANK")
    require_torchrun()
