"""Fault 46: files of a run folder are lost, or are links. What is missing is named, and links are kept."""

import json
import shutil
from pathlib import Path

import pytest

from mtrain.training.model_selection import ModelSelection
from tests.support.cli import one_line
from tests.support.training import fit_on_cpu, read_metrics, with_bleu

FIT = ["fit", "{origin}/config.yaml", "--run-dir", "{run}", "--device", "cpu"]
TRANSLATE = ["translate", "{run}", "It rains.", "--device", "cpu"]
REPORT = ["report", "{run}", "-o", "{run}.html"]
COPIES = "run/model/tokenizer has copies of the vocabularies"
PUBLISH = "`mtrain fit` with the config of the run writes {run}/model again"


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.fixture
def run(run_dir, tmp_path) -> Path:
    return Path(shutil.copytree(run_dir, tmp_path / "run"))


@pytest.mark.parametrize(
    ("part", "command", "code", "cure"),
    [
        ("config.yaml", FIT, 4, "missing, but the checkpoints need it; restore it, or start another run"),
        ("config.yaml", REPORT, 4, "missing; restore it to make a report"),
        ("metrics.jsonl", REPORT, 4, "missing; restore it to make a report"),
        ("tokenizer", FIT, 4, f"start another run with --run-dir; {{run}}{COPIES.removeprefix('run')}"),
        ("tokenizer/config.yaml", FIT, 4, "missing, but the checkpoints need it; restore it"),
        (
            "tokenizer/joint.model",
            FIT,
            4,
            "joint.model: cannot read the tokenizer: No such file or directory; {run}",
        ),
        ("model/tokenizer/joint.model", TRANSLATE, 4, "tokenizer/joint.model: missing"),
        ("checkpoints", FIT, 2, "has a model but no checkpoint to resume from"),
        ("model/manifest.json", TRANSLATE, 4, PUBLISH),
        ("model/config.yaml", ["evaluate", "{run}", "--device", "cpu"], 4, PUBLISH),
        ("model/model.safetensors", ["average", "{run}", "{run}", "-o", "{run}-mean"], 4, PUBLISH),
        ("model/tokenizer", ["export", "{run}", "{run}-exported", "--format", "ctranslate2"], 4, PUBLISH),
        ("model/manifest.json", ["info", "{run}"], 4, "no manifest.json"),
    ],
)
def test_46_what_is_lost_is_named_with_a_cure(mtrain, run, run_dir, part, command, code, cure):
    remove(run / part)
    found, _, err = mtrain(*(argument.format(run=run, origin=run_dir) for argument in command))
    message = one_line("".join(line for line in err.splitlines(keepends=True) if line.startswith("error")))
    assert found == code and cure.format(run=run) in message
    assert str((run / part).parent) in message


@pytest.mark.parametrize(
    "part",
    [
        "model",
        "model/manifest.json",
        pytest.param("model/tokenizer", marks=pytest.mark.slow),
        "metrics.jsonl",
        "data",
    ],
)
def test_46_fit_writes_again_what_it_can(mtrain, run, run_dir, part):
    remove(run / part)
    assert mtrain(*(argument.format(run=run, origin=run_dir) for argument in FIT))[0] == 0
    code, out, _ = mtrain(*(argument.format(run=run) for argument in TRANSLATE))
    assert (code, out) == (0, "Es regnet.\n")


@pytest.mark.parametrize(
    "part", ["config.yaml", "tokenizer", "data", "checkpoints", "metrics.jsonl", "model", "origin.json"]
)
def test_46_a_link_that_leads_nowhere_is_refused_and_kept(mtrain, run, run_dir, part):
    if (run / part).exists():
        remove(run / part)
    (run / part).symlink_to(run.parent / "nowhere")
    code, _, err = mtrain(*(argument.format(run=run, origin=run_dir) for argument in FIT))
    assert (code, (run / part).is_symlink(), (run.parent / "nowhere").exists()) == (4, True, False)
    expected = (
        f"{run / part}: a link to {run.parent / 'nowhere'}, which does not exist; restore it, or remove"
    )
    assert expected in one_line(err)


def test_46_links_are_followed(make_config, tmp_path, monkeypatch):
    recipe = {"validate_every": 1, "checkpoint_every": 1, "log_every": 1, "max_steps": 1}
    validate, bleu = ModelSelection.scores_of, iter((10, 20))

    def improve(*arguments):
        validate(*arguments)
        return with_bleu(next(bleu))

    monkeypatch.setattr(ModelSelection, "scores_of", improve)
    run = fit_on_cpu(make_config(training=recipe))
    recorded = "samples.jsonl", "best_validation.json", "checkpoints/index.json"
    folders = "tokenizer", "checkpoints", "data"
    names = *recorded, "config.yaml", "metrics.jsonl", "model", *folders
    for name in names:
        target = tmp_path / f"elsewhere-{Path(name).name}"
        (run / name).rename(target)
        (run / name).symlink_to(target)
    old = (run / "model/model.safetensors").read_bytes()
    (run / "model/notes.txt").write_text("mine")
    fit_on_cpu(make_config(training={**recipe, "max_steps": 2}))
    assert all((run / name).is_symlink() for name in names)
    assert (tmp_path / "elsewhere-model/model.safetensors").read_bytes() != old
    assert (tmp_path / "elsewhere-model/notes.txt").read_text() == "mine"
    assert "max_steps: 2" in (tmp_path / "elsewhere-config.yaml").read_text()
    assert [line["step"] for line in read_metrics(run)] == [1, 1, 2, 2]
    samples, best, index = ((tmp_path / f"elsewhere-{Path(name).name}").read_text() for name in recorded)
    assert [json.loads(line)["step"] for line in samples.splitlines()] == [1, 2]
    assert (json.loads(best)["step"], json.loads(index)["best"]) == (2, "step-00000002")
