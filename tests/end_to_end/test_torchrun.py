"""`torchrun -m mtrain`: signals, restarts, and what remains of the processes."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.support.faults.runs import result_of
from tests.support.torchrun import Command, Torchrun
from tests.support.training import PAIRS, last_checkpoint, losses

pytestmark = pytest.mark.slow

STEPS = 60


def wait_for_steps(run: Path, steps: int) -> None:
    file = run / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not file.exists() or len(losses(run)) < steps:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(("name", "to_all"), [("SIGTERM", False), ("SIGTERM", True), ("SIGHUP", False)])
def test_a_signal_to_torchrun_ends_the_run_after_a_save(tmp_path, name, to_all):
    """Systems that shut down, and systemd, send it to all processes."""
    run = tmp_path / "run"
    command = Command(run, 10**6)
    wait_for_steps(run, 5)
    for rank in command.ranks().values() if to_all else ():
        os.kill(rank, signal.Signals[name])
    command.process.send_signal(signal.Signals[name])
    assert command.process.wait(60) == 1
    assert not command.has_orphans()
    step = losses(run)[-1][0]
    message = f"stopped by {name}; saved at step {step}; run it again to resume\n"
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
    assert not command.has_orphans()


def wait_for_output(file: Path) -> None:
    deadline = time.monotonic() + 120
    while not file.exists() or not file.stat().st_size:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("rank", [0, 1])
def test_torchrun_restarts_a_translation_of_files_but_not_of_pipes(mtrain, run_dir, tmp_path, rank):
    """At the restart, a part of stdin has been read, and a part of stdout written."""
    lines = [source for source, _ in PAIRS] * 400
    given, out, piped = tmp_path / "in", tmp_path / "out", tmp_path / "piped"
    given.write_text("".join(f"{line}\n" for line in lines))
    restarts, job = ["--max-restarts", "1"], ["translate", run_dir, "--set", "decoding.workers=1"]
    with given.open() as stdin, piped.open("w") as stdout:
        command = Torchrun(tmp_path / "log", restarts, job, stdin=stdin, stdout=stdout)
        wait_for_output(piped)
        os.kill(command.ranks()[rank], signal.SIGKILL)
        assert command.process.wait(120) == 1
    error = "torchrun has restarted this command, but its input or output is stdin, stdout or a pipe, which "
    assert error in command.log.read_text() and "-i FILE -o FILE" in command.log.read_text()
    command = Torchrun(tmp_path / "log", restarts, [*job, "-i", given, "-o", out])
    wait_for_output(out.with_name("out.part"))
    os.kill(command.ranks()[rank], signal.SIGKILL)
    assert command.process.wait(120) == 0, command.log.read_text()
    assert out.read_text() == mtrain("translate", run_dir, "-i", given, "--device", "cpu", "--quiet")[1]
    assert not command.has_orphans()
