"""`torchrun -m mtrain fit`: signals, restarts, and what remains of the processes."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from mtrain.config.yaml_io import to_yaml
from tests.support.faults.runs import make_run_config, result_of
from tests.support.training import last_checkpoint, losses

pytestmark = pytest.mark.slow

STEPS = 60
MARK = "MTRAIN_TEST"  # variable in the environment of all processes of a command


class Command:
    """A running `torchrun`."""

    def __init__(self, run: Path, steps: int, *options: str, fit: Sequence[str] = ()):
        config = run.with_suffix(".yaml")
        config.write_text(to_yaml(make_run_config(run, steps), exclude_unset=True))
        self.mark, self.log = f"{MARK}={uuid.uuid4()}", run.with_suffix(".log")
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *options]
        command = [*torchrun, "-m", "mtrain", "fit", str(config), "--device", "cpu", "--quiet", *fit]
        environment = {**os.environ, **dict([self.mark.split("=")]), "OMP_NUM_THREADS": "1"}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stderr=log, env=environment)

    def ranks(self) -> dict[int, int]:
        """The process of each rank."""
        return {int(values["RANK"]): pid for pid, values in self.environments() if "RANK" in values}

    def environments(self) -> Iterator[tuple[int, dict[str, str]]]:
        """The processes of the command, and the environment that each was started with."""
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                lines = (folder / "environ").read_text(errors="replace").split("\0")
                is_alive = " Z " not in (folder / "stat").read_text()
            except OSError:
                continue
            if self.mark in lines and is_alive:
                yield int(folder.name), dict(line.split("=", 1) for line in lines if "=" in line)


def wait_for_steps(run: Path, steps: int) -> None:
    file = run / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not file.exists() or len(losses(run)) < steps:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_sigterm_to_torchrun_ends_the_run_after_a_save(tmp_path):
    run = tmp_path / "run"
    command = Command(run, 10**6)
    wait_for_steps(run, 5)
    command.process.send_signal(signal.SIGTERM)
    assert command.process.wait(60) == 1
    assert not list(command.environments())
    step = losses(run)[-1][0]
    message = f"stopped by SIGTERM; saved at step {step}; run it again to resume\n"
    assert message in command.log.read_text() and f"rank 1: {message}" in command.log.read_text()
    assert last_checkpoint(run).name == f"step-{step:08d}"


def test_torchrun_restarts_ranks_that_were_killed_and_they_finish_the_same_run(tmp_path):
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert Command(whole, STEPS).process.wait(120) == 0
    command = Command(run, STEPS, "--max-restarts", "3", fit=["--resume", "never"])
    for kill, rank in enumerate((1, 0), start=1):
        wait_for_steps(run, 15 * kill)
        os.kill(command.ranks()[rank], signal.SIGKILL)
    assert command.process.wait(120) == 0, command.log.read_text()
    assert result_of(run) == result_of(whole)
    assert not list(command.environments())
