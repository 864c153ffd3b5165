"""`scripts/torture.sh` in a shorter form; before a release it runs at full size."""

import os
import subprocess

import pytest

from tests.support.faults.damage import flip_bytes
from tests.support.paths import ROOT
from tests.support.training import fit_on_cpu


@pytest.mark.slow
def test_nothing_is_lost():
    options = ["--kills", "20", "--flips", "1000", "--signals", "5", "--disks", "10", "--ranks", "2"]
    options += ["--minutes", "0.5"]
    done = subprocess.run(
        ["bash", str(ROOT / "scripts/torture.sh"), *options],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    rows = [line[42:].split()[:3] for line in done.stdout.splitlines()[1:] if not line.startswith(" ")]
    assert done.returncode == 0 and len(rows) == 9, done.stdout + done.stderr
    assert all(lost == corrupt == "0" for _, lost, corrupt in rows)


def test_damage_that_is_not_detected_is_counted(make_config):
    run = fit_on_cpu(make_config(training={"max_steps": 2, "validate_every": 2}))
    assert flip_bytes(run, 20).corrupt == 0
    assert flip_bytes(run, 20, verify=lambda *_: None).corrupt == 20
