"""Which model a run publishes, when its patience ends, and what it keeps when it returns to an old step."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mtrain.checkpoint.checkpoint import checkpoint_folders
from mtrain.runs.summary import read_progress
from mtrain.storage.manifest import write_manifest
from mtrain.training.step.learner import Learner
from mtrain.training.validation.translation import Scores
from tests.support.faults.saves import Killed
from tests.support.training import PAIRS, fit_on_cpu, read_metrics, with_bleu


def scored(nll: float, bleu: float, chrf: float) -> Scores:
    return Scores(nll, 3.0, bleu, chrf, {})


def published_step(run: Path) -> int:
    return json.loads((run / "model/info.json").read_text())["training"]["steps"]


def weights_are_of(run: Path, checkpoint: str) -> bool:
    files = (run / "model/model.safetensors", run / "checkpoints" / checkpoint / "model.safetensors")
    return files[0].read_bytes() == files[1].read_bytes()


EACH_STEP = {"validate_every": 1, "checkpoint_every": 1, "keep_checkpoints": 9}


def test_while_bleu_is_0_chrf_selects_the_best_model(make_config, scripted_scores, caplog):
    bleu = {**EACH_STEP, "best_metric": "bleu"}
    scripted_scores(scored(1, 0, 0), scored(2, 0, 30), scored(0.5, 0, 20), scored(3, 1e-5, 29))
    run = fit_on_cpu(make_config(training={**bleu, "max_steps": 4}))
    assert published_step(run) == 2 and weights_are_of(run, "step-00000002")
    assert "the validation BLEU of the best model is 0.00 (chrF 30.00)" in caplog.text
    caplog.clear()
    scripted_scores(scored(9, 0.01, 1))
    fit_on_cpu(make_config(training={**bleu, "max_steps": 5}))
    assert published_step(run) == 5 and "the validation BLEU of the best model" not in caplog.text


def test_while_bleu_is_mostly_noise_chrf_selects_the_best_model(make_config, mtrain, scripted_scores):
    """The scores of Spanish to Guarani after 150 and 165 steps, and of a model that has learned more."""
    scripted_scores(scored(6.1, 0.5, 13.4), scored(6, 0.46, 15.6), scored(5, 5, 15), scored(4, 4.9, 30))
    run = fit_on_cpu(make_config(training={**EACH_STEP, "max_steps": 2}))
    assert published_step(run) == 2 and "selected by chrF: nll" in mtrain("info", run)[1]
    fit_on_cpu(make_config(training={**EACH_STEP, "max_steps": 4}))
    assert published_step(run) == 3 and "selected by BLEU: nll" in mtrain("info", run)[1]


@pytest.mark.parametrize("bleu", [0.0, 0.4])
def test_while_bleu_is_low_the_patience_counts_only_if_the_nll_is_not_the_lowest_either(
    make_config, scripted_scores, bleu
):
    falling = [scored(nll, 0, 0) for nll in (4.5, 3.5, 2.5)]
    scripted_scores(scored(5.5, bleu, 0.8), *falling, scored(2.5, 0, 0.7), scored(2.6, 0, 0.1))
    run = fit_on_cpu(make_config(training={**EACH_STEP, "max_steps": 99, "patience": 2}))
    assert published_step(run) == 1 and read_metrics(run)[-1]["step"] == 6


def test_a_lower_nll_does_not_extend_the_patience_once_there_is_a_bleu(make_config, scripted_scores):
    scripted_scores(scored(5, 6, 1), scored(4, 0, 0), scored(3, 5.5, 9))
    run = fit_on_cpu(make_config(training={**EACH_STEP, "max_steps": 99, "patience": 2}))
    assert published_step(run) == 1 and read_metrics(run)[-1]["step"] == 3


@pytest.mark.parametrize(
    ("references", "best"),
    [([" ".join(pair[1].split()[:2]) for pair in PAIRS], 2), ([pair[1] for pair in PAIRS], 1)],
)
def test_chrf_leads_if_no_reference_has_four_tokens(
    make_config, corpus, tmp_path, scripted_scores, caplog, references, best
):
    """Perfect translations then have a BLEU of 0, but longer translations do not."""
    (tmp_path / "v.de").write_text("".join(f"{line.rstrip('.')}\n" for line in references))
    validation = {"source": str(corpus / "train.en"), "target": str(tmp_path / "v.de")}
    scripted_scores(scored(1, 41, 88), scored(2, 0, 100))
    caplog.set_level("INFO")
    run = fit_on_cpu(make_config(data={"validation": validation}, training={**EACH_STEP, "max_steps": 2}))
    assert published_step(run) == best and ("chrF selects the best model" in caplog.text) == (best == 2)


@pytest.mark.parametrize(
    ("target_lang", "reference", "metric", "best"),
    [
        ("de", "ein Hund läuft hier herum", "auto", "BLEU"),
        ("zho_Hant", "狗在這裡跑來跑去", "auto", "chrF: zho_Hant is written without spaces between words"),
        ("th", "สุนัขวิ่งอยู่ที่นี่", "auto", "chrF: th is written without spaces between words"),
        ("th", "สุนัขวิ่งอยู่ที่นี่", "bleu", "BLEU"),
        ("th", "สุนัขวิ่งอยู่ที่นี่", "nll", "nll"),
        # The code does not tell the script, so the references do.
        ("hak", "狗仔在這裡走來走去", "auto", "chrF: hak is written without spaces between words"),
        ("hak", "Kiéu-é chhai yá-piên cháu", "auto", "BLEU"),
    ],
)
def test_chrf_selects_the_best_model_if_words_are_not_separated(
    make_config, mtrain, tmp_path, scripted_scores, caplog, target_lang, reference, metric, best
):
    (tmp_path / "v.en").write_text("a dog runs around here\n")
    (tmp_path / "v.target").write_text(f"{reference}\n", encoding="utf-8")
    validation = {"source": str(tmp_path / "v.en"), "target": str(tmp_path / "v.target")}
    data = {"target_lang": target_lang, "validation": validation}
    scripted_scores(scored(3, 41, 60), scored(2, 40, 61), scored(1, 39, 59))
    caplog.set_level("INFO")
    config = make_config(data=data, training={**EACH_STEP, "max_steps": 3, "best_metric": metric})
    run = fit_on_cpu(config)
    title, _, reason = best.partition(": ")
    assert published_step(run) == {"BLEU": 1, "chrF": 2, "nll": 3}[title]
    reason = reason and f": {reason}"
    if title == "BLEU" and metric == "auto":
        reason = "; chrF does while the BLEU is below 5"
    assert f"{title} selects the best model{reason}\n" in caplog.text
    assert read_progress(run, config.training).best_metric == title.lower()
    assert f"selected by {title}: nll" in mtrain("info", run)[1]


def test_a_run_keeps_the_metric_that_selects_its_best_model(make_config, scripted_scores):
    """Before there was `auto`, the default was BLEU."""
    data = {"target_lang": "zh"}
    scripted_scores(scored(3, 41, 60), scored(2, 40, 61), scored(1, 42, 59))
    run = fit_on_cpu(make_config(data=data, training={**EACH_STEP, "max_steps": 1, "best_metric": "bleu"}))
    forget(run, "best_metric")
    assert read_progress(run, None).best_metric is None
    fit_on_cpu(make_config(data=data, training={**EACH_STEP, "max_steps": 2}))
    assert published_step(run) == 1
    fit_on_cpu(make_config(data=data, training={**EACH_STEP, "max_steps": 3}))
    assert published_step(run) == 3


def forget(run: Path, *names: str) -> None:
    """Remove values from the states of a run, which earlier versions did not record. They had one score."""

    def earlier(values: dict[str, Any]) -> dict[str, Any]:
        kept = {key: value for key, value in values.items() if key not in names}
        return kept if "best_scores" in kept else {**kept, "best_score": values["best_scores"].get("bleu")}

    for folder in checkpoint_folders(run):
        state = json.loads((folder / "state.json").read_text())
        (folder / "state.json").write_text(json.dumps(earlier(state)))
        write_manifest(folder)
    file = run / "checkpoints/index.json"
    index = json.loads(file.read_text())
    index["validated"] = earlier(index["validated"])
    file.write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("first", "last", "best"),
    [
        (with_bleu(20), scored(0.1, 20, 99), 2),
        pytest.param(with_bleu(20), with_bleu(19), 2, marks=pytest.mark.slow),
        (with_bleu(20), with_bleu(20.01), 3),
        (scored(3, 0, 30), scored(2, 0, 40), 3),
    ],
)
def test_a_run_of_an_earlier_version_compares_the_score_that_it_has_recorded(
    make_config, scripted_scores, first, last, best
):
    scripted_scores(scored(9, 0, 0), first, last)
    run = fit_on_cpu(make_config(training={**EACH_STEP, "max_steps": 2}))
    forget(run, "best_scores", "lowest_nll", "initial_scores")
    fit_on_cpu(make_config(training={**EACH_STEP, "max_steps": 3}))
    assert published_step(run) == best


def test_the_chrf_of_a_best_model_of_an_earlier_version_is_not_shown(make_config, scripted_scores, caplog):
    scripted_scores(scored(3, 0, 30), scored(3, float("nan"), 30))
    run = fit_on_cpu(make_config(training={**EACH_STEP, "max_steps": 1}))
    forget(run, "best_scores", "lowest_nll", "initial_scores")
    caplog.clear()
    fit_on_cpu(make_config(training={**EACH_STEP, "max_steps": 2}))
    assert "the validation BLEU of the best model is 0.00; if the references" in caplog.text


@pytest.mark.parametrize(
    "damage",
    [
        shutil.rmtree,
        pytest.param(lambda folder: (folder / "state.json").write_text("{"), marks=pytest.mark.slow),
    ],
)
def test_going_back_to_before_a_lost_best_checkpoint_publishes_a_model_of_this_branch(
    make_config, scripted_scores, caplog, damage
):
    scripted_scores(*map(with_bleu, (10, 5, 20, 30)), *map(with_bleu, (5, 4)))
    recipe = {**EACH_STEP, "patience": None}
    run = fit_on_cpu(make_config(training={**recipe, "max_steps": 4}))
    abandoned = (run / "model/model.safetensors").read_bytes()
    damage(run / "checkpoints/step-00000001")  # the best one when step 2 was saved
    older = str(run / "checkpoints/step-00000002")
    fit_on_cpu(make_config(training={**recipe, "max_steps": 3}), resume=older)
    assert published_step(run) == 2 and weights_are_of(run, "step-00000002")
    assert (run / "superseded-model/model.safetensors").read_bytes() == abandoned
    assert f"{run / 'model'}: renamed to superseded-model" in caplog.text
    assert "the best weights, of step 1, are lost; their score is discarded" in caplog.text
    progress = read_progress(run, None)
    assert progress.best is not None and (progress.step, progress.best.step) == (3, 2)
    [bleu] = [score.value for score in progress.best.scores if score.metric == "bleu"]
    info = json.loads((run / "model/info.json").read_text())
    assert bleu == 5 and {score["metric"]: score["value"] for score in info["scores"]}["bleu"] == 5
    assert [line["step"] for line in read_metrics(run) if "validation" in line] == [1, 2, 3]


@pytest.mark.parametrize("info", [None, "{"])
def test_a_model_of_an_unknown_step_does_not_stand_for_a_lost_best_checkpoint(
    make_config, scripted_scores, info
):
    scripted_scores(*map(with_bleu, (10, 5, 20)), *map(with_bleu, (5, 4)))
    recipe = {**EACH_STEP, "patience": None, "max_steps": 3}
    run = fit_on_cpu(make_config(training=recipe))
    shutil.rmtree(run / "checkpoints/step-00000001")  # the best one when step 2 was saved
    (run / "model/info.json").write_text(info) if info else (run / "model/info.json").unlink()
    fit_on_cpu(make_config(training=recipe), resume=str(run / "checkpoints/step-00000002"))
    assert published_step(run) == 2 and weights_are_of(run, "step-00000002")


def test_going_back_to_before_the_first_validation_leaves_no_record_of_the_later_steps(
    make_config, monkeypatch
):
    recipe = {"validate_every": 4, "checkpoint_every": 2, "keep_checkpoints": 9, "max_steps": 4}
    run = fit_on_cpu(make_config(training=recipe))
    older = str(run / "checkpoints/step-00000002")

    def killed(*_):
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Learner, "step", killed)
        fit_on_cpu(make_config(training={**recipe, "max_steps": 8}), resume=older)
    assert not (run / "model").exists() and (run / "superseded-model/model.safetensors").exists()
    progress = read_progress(run, None)
    assert (progress.step, progress.logged_step, progress.best, progress.last) == (2, 2, None, None)
    assert not (run / "best_validation.json").exists() and not (run / "samples.jsonl").read_text()
    fit_on_cpu(make_config(training=recipe))
    assert published_step(run) == 4 and weights_are_of(run, "step-00000004")


def test_going_back_keeps_the_model_that_was_the_best_one_then(make_config, scripted_scores, caplog):
    """The checkpoint of that model may be missing, if the model folder has the weights."""
    scripted_scores(*map(with_bleu, (30, 20, 20)), *map(with_bleu, (20, 20)))
    recipe = {**EACH_STEP, "patience": None}
    run = fit_on_cpu(make_config(training={**recipe, "max_steps": 3}))
    shutil.rmtree(run / "checkpoints/step-00000001")
    model = (run / "model/manifest.json").read_bytes()
    older = str(run / "checkpoints/step-00000002")
    fit_on_cpu(make_config(training={**recipe, "max_steps": 3}), resume=older)
    assert (run / "model/manifest.json").read_bytes() == model and published_step(run) == 1
    assert "are lost" not in caplog.text and not (run / "superseded-model").exists()
