"""Reading what runs have recorded."""

import json
from pathlib import Path

import numpy as np
import pytest

from mtrain.data.store.folder import locate_data_folder
from mtrain.errors import ModelError, UsageError
from mtrain.runs.metrics import POINTS, read_curves
from mtrain.runs.records import differing_settings, names_of, read_run


def write_run(folder: Path, lines: list[dict], **files: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("run_dir: x\n")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, text in files.items():
        (folder / name.replace("_jsonl", ".jsonl")).write_text(text)
    return folder


def training(step: int, **values: object) -> dict:
    return {
        "step": step,
        "loss": 2.0,
        "nll": 1.0,
        "grad_norm": 1.0,
        "target_tokens": 100 * step,
        "seconds": 36.0 * step,
    } | values


def test_curves_are_the_records_on_three_axes(tmp_path):
    lines = [training(step, nll=step / 10) for step in (10, 20, 30)]
    lines.insert(2, {"step": 25, "validation": {"nll": 1.5, "bleu": 30.0}, "seconds": 900.0})
    run = read_run(write_run(tmp_path / "run", lines), "run")
    nll = run.curves["nll"]
    assert nll.steps.tolist() == [10, 20, 30] and nll.values.tolist() == [1, 2, 3]
    assert nll.tokens.tolist() == [1000, 2000, 3000] and nll.hours.tolist() == [0.1, 0.2, 0.3]
    assert run.curves["perplexity"].values == pytest.approx(np.exp([1, 2, 3]))
    bleu = run.curves["validation_bleu"]
    assert [column.tolist() for column in bleu] == [[25], [2500], [0.25], [30]]


def test_validations_before_the_first_logged_step_have_different_places(tmp_path):
    lines = [{"step": step, "validation": {"nll": 9.0}, "seconds": step} for step in (2, 4)]
    run = read_run(write_run(tmp_path / "run", [*lines, training(10)]), "run")
    assert run.curves["validation_nll"].tokens.tolist() == [200, 400]


def test_validations_after_the_last_logged_step_have_their_own_places():
    lines = [{"step": 50, "loss": 1.0, "target_tokens": 500, "seconds": 5}]
    lines += [
        {"step": step, "validation": {"nll": 1.0}, "seconds": step / 10, **more}
        for step, more in ((60, {"target_tokens": 600}), (90, {"target_tokens": 910}), (99, {}))
    ]
    curve = read_curves(lines)["validation_nll"]
    assert [*curve.tokens] == [600, 910, 500]  # earlier versions did not record the tokens


def test_the_data_folder_is_found_from_another_working_directory(tmp_path, monkeypatch):
    (tmp_path / "encoded").mkdir()
    (tmp_path / "encoded/summary.json").write_text("{}")
    run = tmp_path / "runs" / "large"
    run.mkdir(parents=True)
    assert locate_data_folder(run, "encoded") == tmp_path / "encoded"
    (tmp_path / "other/encoded").mkdir(parents=True)
    (tmp_path / "other/encoded/summary.json").write_text("{}")
    monkeypatch.chdir(tmp_path / "other")
    assert locate_data_folder(run, "encoded") == tmp_path / "encoded"
    (tmp_path / "encoded/summary.json").unlink()
    assert locate_data_folder(run, "encoded") == Path("encoded")
    assert locate_data_folder(run, "lost") == Path("lost")
    assert locate_data_folder(run, None) == run / "data"


def test_long_curves_are_means_but_no_gradient_norm_is_hidden(tmp_path):
    count = 7 * POINTS + 3
    norms = np.ones(count)
    norms[1234] = 99.0
    lines = [training(n + 1, loss=float(n), grad_norm=norms[n]) for n in range(count)]
    curves = read_run(write_run(tmp_path / "run", lines), "run").curves
    assert len(curves["loss"].values) == POINTS and curves["loss"].steps[-1] == count
    assert curves["loss"].values.mean() == pytest.approx((count - 1) / 2, rel=1e-3)
    assert curves["grad_norm"].values.max() == 99.0


def test_numbers_that_are_not_finite_and_damaged_lines_are_left_out(tmp_path):
    run = write_run(tmp_path / "run", [training(1), training(2, loss="NaN")])
    with (run / "metrics.jsonl").open("a") as stream:
        stream.write('[1]\n{"step": 3, "loss": 1')
    loss = read_run(run, "run").curves["loss"]
    assert loss.steps.tolist() == [1, 2] and np.isnan(loss.values[1])


def test_the_points_of_a_curve_are_in_order_whatever_the_file_says(tmp_path):
    lines = [training(30), training(10), training(20, seconds="x"), training(40, target_tokens=True)]
    text = '{"step": 1e400, "loss": 1, "target_tokens": 1}\n{"step": 1%s, "loss": 1}\n' % ("0" * 400)
    run = write_run(tmp_path / "run", lines)
    with (run / "metrics.jsonl").open("a") as stream:
        stream.write(text)
    loss = read_run(run, "run").curves["loss"]
    assert loss.steps.tolist() == [10, 30] and loss.hours.tolist() == [0.1, 0.3]


def test_a_value_that_is_not_finite_does_not_hide_its_neighbors(tmp_path):
    count = 3 * POINTS
    values = ["NaN" if n % 3 else float(n) for n in range(count)]
    values[:3] = ["NaN"] * 3
    norms = ["Infinity" if n == 7 else 1.0 for n in range(count)]
    lines = [training(n + 1, loss=values[n], grad_norm=norms[n], skipped_steps=n) for n in range(count)]
    run = read_run(write_run(tmp_path / "run", lines), "run")
    assert run.skipped_steps == count - 1
    assert np.isnan(run.curves["loss"].values[0]) and run.curves["loss"].values[1:3].tolist() == [3, 6]
    assert run.curves["grad_norm"].values[2] == 1


def test_the_best_of_many_validations_is_kept(tmp_path):
    count = 3 * POINTS
    scores = [{"nll": 0.5 if n == 7 else 2.0, "bleu": 30.0 if n == 7 else 10.0} for n in range(count)]
    lines = [training(n + 1) for n in range(count)]
    lines += [{"step": n + 1, "seconds": n + 1.0, "validation": scores[n]} for n in range(count)]
    curves = read_run(write_run(tmp_path / "run", lines), "run").curves
    assert len(curves["validation_bleu"].values) == POINTS
    assert curves["validation_bleu"].values.max() == 30 and curves["validation_nll"].values.min() == 0.5


SENTENCE = {"source": "a", "reference": "b", "translation": "c"}


def test_damaged_translations_are_left_out_with_one_warning(tmp_path, caplog):
    good = json.dumps({"step": 5, "sentences": [SENTENCE], "more": 1})
    bad = [
        good[:-9],
        json.dumps({"step": 6, "sentences": [{**SENTENCE, "source": 1}]}),
        json.dumps({"step": 6, "sentences": [{"source": "a"}]}),
        json.dumps({"step": "six", "sentences": [SENTENCE]}),
        json.dumps({"step": 6, "sentences": []}),
        json.dumps({"step": 6, "sentences": [{**SENTENCE, "source": "\ud800"}]}),
        "[" * 100_000,
    ]
    files = {"samples_jsonl": "\n".join([good.replace("5", "7"), *bad, good]) + "\n"}
    folder = write_run(tmp_path / "run", [training(1)], **files)
    (folder / "best_validation.json").write_text(bad[1])
    run = read_run(folder, "run")
    assert [record.step for record in run.samples] == [5, 7] and run.best is None
    assert run.samples[0].sentences[0].translation == "c" and run.examples == ["a"]
    assert [record.getMessage() for record in caplog.records] == [
        f"{folder}/samples.jsonl: 7 damaged line(s) are left out of the report",
        f"{folder}/best_validation.json: damaged; it is left out of the report",
    ]


def test_sections_of_the_config_and_test_scores_may_be_damaged(tmp_path, caplog):
    folder = write_run(tmp_path / "run", [training(1)])
    (folder / "config.yaml").write_text("data: 3\ntokenizer: [1]\n")
    for text in ("[]", '{"key": "x", "sets": [{"name": "a"}]}', "{"):
        (folder / "test_scores.json").write_text(text)
        assert read_run(folder, "run").results == []
        assert (
            caplog.messages.pop()
            == f"{folder}/test_scores.json: damaged; the report will lack the scores on test sets"
        )
    (folder / "config.yaml").write_text("")
    with pytest.raises(ModelError, match=f"^{folder}/config.yaml: damaged: it has no keys; restore it$"):
        read_run(folder, "run")


def test_what_an_old_run_lacks_is_named(tmp_path):
    run = read_run(write_run(tmp_path / "run", [training(1)]), "run")
    assert [what.partition("(")[2].rstrip(")") for what in run.missing[:3]] == [
        "check.json",
        "samples.jsonl",
        "best_validation.json",
    ]
    assert run.missing[3] == "the model" and run.best is None and not run.samples and not run.results


def test_a_folder_that_is_not_a_run_is_an_error(tmp_path):
    with pytest.raises(ModelError, match="no such run folder"):
        read_run(tmp_path / "missing", "missing")
    with pytest.raises(ModelError, match="not a run folder"):
        read_run(tmp_path, "empty")
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="not a folder"):
        read_run(tmp_path / "file", "file")
    with pytest.raises(UsageError, match="has no steps yet"):
        read_run(write_run(tmp_path / "new", [{"step": 0}]), "new")


def test_names_are_the_shortest_that_differ(tmp_path):
    a, b, c = tmp_path / "a/run", tmp_path / "b/run", tmp_path / "c"
    assert names_of([a, c]) == ["run", "c"]
    assert names_of([a, b, c]) == ["a/run", "b/run", "c"]
    assert names_of([Path("/a/run"), Path("/x/a/run")]) == ["/a/run", "x/a/run"]
    with pytest.raises(UsageError, match="given twice"):
        names_of([a, c, tmp_path / "b/../a/run"])


def test_differing_settings_are_leaves_and_leave_out_the_run_folder():
    first = {"run_dir": "a", "seed": 1, "data": {"train": [{"source": "x"}]}, "model": {"heads": 4}}
    second = {
        "run_dir": "b",
        "seed": 1,
        "data": {"train": [{"source": "y"}]},
        "model": {"heads": 4, "new": None},
    }
    assert differing_settings([first, second]) == {"data.train.source": ["x", "y"], "model.new": ["", "null"]}
