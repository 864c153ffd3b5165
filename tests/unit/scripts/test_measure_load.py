"""The measurement of runs on a busy machine."""

import sys
from pathlib import Path

import measure_load
import pytest


@pytest.mark.slow
def test_a_stranger_gets_a_table_for_two_text_files(tmp_path: Path, capsys, monkeypatch):
    for split, pairs in (("train", 200), ("val", 4)):
        (tmp_path / f"{split}.en").write_text("".join(f"one {n}\n" for n in range(pairs)))
        (tmp_path / f"{split}.de").write_text("".join(f"ein {n}\n" for n in range(pairs)))
    files = [str(tmp_path / "train.en"), str(tmp_path / "train.de")]
    loads = ["2 busy", "quota", "slower"]
    monkeypatch.setattr(sys, "argv", ["measure_load.py", *files, "--minutes", "0.02", "--loads", *loads])
    measure_load.main()
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0].removeprefix("| ").partition(" (")[0] for row in rows] == loads
    assert all(float(row[5]) < 0.1 and int(row[6]) > 0 for row in rows)  # the rate is down


def test_a_run_without_a_control_group_gets_the_threads_of_its_quota(tmp_path: Path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1}, raising=False)
    assert measure_load.settings_for_one_core(tmp_path)["OMP_NUM_THREADS"] == "1"
