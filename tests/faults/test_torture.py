"""The torture of `scripts/torture.sh`, in a bounded form; at full size it is there for a release."""

import os
import subprocess
import sys

import pytest

from tests.support.paths import ROOT

SCRIPT = ROOT / "scripts" / "torture.py"
NOTHING = ["--kills", "2", "--signals", "1", "--flips", "400", "--disks", "2", "--minutes", "0.05"]


def tortured(*options: str) -> list[list[str]]:
    """The rows of its table."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *options], capture_output=True, text=True, env=environment
    )
    rows = [line for line in done.stdout.splitlines()[1:] if not line.startswith(" ")]
    assert done.returncode == 0 and rows, done.stdout + done.stderr
    return [[row[:42].strip(), *row[42:].split()[:3]] for row in rows]


@pytest.mark.slow
def test_08_12_real_signals_lose_nothing():
    options = ["--only", "kills", "signals", "flips", *NOTHING]
    assert tortured(*options) == [
        ["SIGKILL at random", "2", "0", "0"],
        ["SIGTERM: saved within a step, 143", "1", "0", "0"],
        ["bytes flipped, files cut", "400", "0", "0"],
    ]


def test_damage_that_nobody_checks_is_counted(make_config, monkeypatch):
    from tortures import damage

    from tests.support.training import go

    run = go(make_config(training={"max_steps": 2, "validate_every": 2}))
    monkeypatch.setattr(damage, "verify_folder", lambda *_: None)
    assert damage.flipped_bytes(run, 20).corrupt == 20


@pytest.mark.slow
def test_nothing_is_lost():
    rows = tortured("--kills", "20", "--flips", "1000", "--signals", "5", "--disks", "10", "--minutes", "0.5")
    assert len(rows) == 8 and all(lost == corrupt == "0" for *_, lost, corrupt in rows)
