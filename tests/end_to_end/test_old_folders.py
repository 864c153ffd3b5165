"""Folders made by commit c4ca9ac still resume, translate and score as they did at that commit.

The archive has three runs that were killed after their checkpoint of step 200 of 300, an encoded corpus
without its raw text, and `make.sh`, which made them. `expected.json` has what c4ca9ac printed for them, and
the rest of their metrics.
"""

import json
import re
import tarfile

import pytest

from tests.support.paths import ROOT

FOLDERS = ROOT / "tests" / "support" / "old_folders"
EXPECTED = json.loads((FOLDERS / "expected.json").read_text(encoding="utf-8"))
TRANSLATING = ["stages", "tags"]


@pytest.fixture
def old_folders(tmp_path, monkeypatch):
    """The working folder, with copies of the old folders."""
    with tarfile.open(FOLDERS / "c4ca9ac.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", TRANSLATING)
def test_an_old_model_translates_and_scores_as_before(old_folders, mtrain, name):
    code, out, _ = mtrain("translate", name, "-i", "sources.txt")
    assert code == 0 and out.splitlines() == EXPECTED[name]["translations"]
    code, out, _ = mtrain("score", name, "-i", "sources.txt", "--target", "targets.txt")
    log_probs = [float(line.split("\t")[0]) for line in out.splitlines()]
    assert code == 0 and log_probs == pytest.approx(EXPECTED[name]["log_probs"], rel=1e-4)


def test_an_old_pair_classifier_scores_as_before(old_folders, mtrain):
    files = "-i", "sources.txt", "--target", "targets.txt"
    code, out, _ = mtrain("score", "classifier", *files, "--classifier")
    probabilities = [float(line) for line in out.splitlines()]
    assert code == 0 and probabilities == pytest.approx(EXPECTED["classifier"]["probabilities"], rel=1e-4)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "tags")) for name in EXPECTED]
)
def test_an_old_run_resumes_with_the_same_batches_and_random_draws(old_folders, mtrain, name):
    code, _, err = mtrain("fit", f"{name}.yaml", "--device", "cpu")
    assert code == 0, err
    lines = [json.loads(line) for line in (old_folders / name / "metrics.jsonl").read_text().splitlines()]
    losses = {str(line["step"]): line["loss"] for line in lines if line.get("loss") and line["step"] > 200}
    # Another CPU rounds differently, and the difference grows from step to step.
    assert losses == pytest.approx(EXPECTED[name]["losses"], rel=0.02)
    for step in {"220", "240"} & losses.keys():
        assert losses[step] == pytest.approx(EXPECTED[name]["losses"][step], rel=1e-4)
    validation = EXPECTED[name]["validation"]
    assert lines[-1]["validation"]["nll"] == pytest.approx(validation["nll"], rel=0.02)


@pytest.mark.parametrize("name", TRANSLATING)
def test_old_runs_are_described_and_averaged(old_folders, mtrain, name):
    code, out, _ = mtrain("info", name)
    assert code == 0 and re.search(r"^ *steps +200\b", out, re.MULTILINE)
    checkpoint = f"{name}/checkpoints/step-00000200"
    assert mtrain("average", name, checkpoint, "-o", "average")[0] == 0
    assert mtrain("translate", "average", "I love cherries.")[0] == 0
    assert mtrain("report", name, "-o", "report.html")[0] == 0
