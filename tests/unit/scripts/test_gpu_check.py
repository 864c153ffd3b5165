"""scripts/gpu_check.sh and its parts run, as far as a machine without a GPU can tell."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from gpu.__main__ import main, parse

from tests.support.paths import ROOT

TINY = ["--device", "cpu", "--tiny"]
TIMED = ["train-base", "decode", "translate", "peers-base", "train-tiny", "train-big", "decode-transformers"]
TIMED += ["profile-training", "profile-decoding", "peers-big", "bench.py"]
ON_CPU = ["environment", "ceiling", "tests", "check-training", "check-decoding", "demo", "resume", *TIMED]

# Replaces the interpreter: appends its arguments to $CALLS as a line, and fails the part `resume`.
STAND_IN = """#!/bin/sh
echo "$*" >>"$CALLS"
case "$*" in *resume*) exit 1 ;; *gpu*train*) echo "mtrain: 1,234 target tokens/s" ;; esac
"""


def check(folder: Path, **variables: str) -> tuple[int, dict[str, str]]:
    """Run the script. Returns its exit status, and how each part has ended."""
    environment = {**os.environ, "OUT": str(folder / "out"), "WORK": str(folder / "work"), **variables}
    command = ["bash", str(ROOT / "scripts" / "gpu_check.sh")]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    summary = (folder / "out" / "summary.txt").read_text(encoding="utf-8")
    return done.returncode, dict(re.findall(r"^\[\d+ s\] (\S+): (.+?)(?:, \d+ s)?$", summary, re.MULTILINE))


def test_a_part_prints_the_speed(capsys):
    assert main([*TINY, "train", "base", "4096"]) == 0
    out = capsys.readouterr().out
    assert re.match(r"mtrain base \w+, batch 4096: [\d,]+ target tokens/s", out)


def test_a_part_that_fails_says_why(capsys):
    assert main(["--device", "cuda:99", "environment"]) == 1
    assert capsys.readouterr().err.startswith("failed: --device cuda:99: this machine has ")


def test_every_part_is_started_and_a_failure_does_not_stop_the_others(tmp_path):
    python, calls = tmp_path / "python", tmp_path / "calls"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    captions = tmp_path / "captions"
    captions.mkdir()
    (captions / "train.en").write_text("A man sleeps.\n" * 50_000)
    variables = {"PYTHON": str(python), "CALLS": str(calls), "DEVICE": "cuda", "MULTI30K": str(captions)}
    code, ended = check(tmp_path, **variables)
    assert code == 1 and ended.pop("resume") == "exit 1"
    assert ended == dict.fromkeys({*ON_CPU, "multi30k", "translate-base"} - {"resume"}, "exit 0")
    parts = []
    for call in calls.read_text().splitlines():
        if "-m gpu --" in call:
            arguments = parse(call.partition("-m gpu ")[2].split())
            parts.append(arguments["run"])
            assert arguments["device"] == "cuda" and not arguments["tiny"]
    assert len(parts) == 14 and len(set(parts)) == 11
    assert "1,234 target tokens/s" in (tmp_path / "out" / "summary.txt").read_text()


def test_only_the_parts_that_are_named_run_and_no_part_begins_after_the_budget(tmp_path):
    variables = {"PYTHON": "/bin/true", "DEVICE": "cpu"}
    code, ended = check(tmp_path, PARTS="ceiling decode", **variables)
    assert code == 0 and ended == {"ceiling": "exit 0", "decode": "exit 0"}
    code, ended = check(tmp_path, PARTS="right", BUDGET="0", **variables)
    assert code == 1 and ended["tests"] == ended["ceiling"] == "no time left" and "train-base" not in ended


@pytest.mark.slow
def test_the_complete_check_passes_on_a_cpu(tmp_path):
    code, ended = check(tmp_path, PYTHON=sys.executable, DEVICE="cpu", TINY="1", BUDGET="1800")
    assert ended == dict.fromkeys(ON_CPU, "exit 0") and code == 0
    results = {file.stem: file.read_text(encoding="utf-8") for file in (tmp_path / "out").glob("*.txt")}
    assert results["train"].count("target tokens/s") == 8
    assert "torch.nn.Transformer big bf16" in results["train"]
    assert "once and killed: losses differ by" in results["resume"]
    assert results["check"].count(": 0 of 24 translations differ from the search's") == 4
    assert "differ by 0 at most; graphs gave the same bits again" in results["check"]
    assert results["decode"].count("ms/step") == 9 and results["decode"].count("start included") == 2
    assert results["profile"].count("matrix products") == 3 and "mtrain/tool" in results["bench"]
