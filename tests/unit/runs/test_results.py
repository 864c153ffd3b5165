"""The recorded scores of a run on its test sets."""

import json
import shutil

import pytest
import yaml

from mtrain.decoding.translate import Translator
from mtrain.evaluation.evaluate import configured_test_sets, evaluate_set
from mtrain.evaluation.metrics import make_metrics
from mtrain.runs.results import read_results, score_test_sets


@pytest.fixture
def run(run_dir, tmp_path):
    return shutil.copytree(run_dir, tmp_path / "run")


def test_scores_are_those_of_evaluate_and_are_recorded(run):
    with Translator.load(run, "cpu") as translator:
        [found] = score_test_sets(run, translator)
        [test] = configured_test_sets(run)
        expected = evaluate_set(test, translator, make_metrics(("bleu", "chrf"), "de"))
    assert found == ("seen", 8, expected) and read_results(run) == [found]
    [record] = json.loads((run / "test_scores.json").read_text())["sets"]
    assert record == {"name": "seen", "sentences": 8, "scores": [score._asdict() for score in expected]}


def test_blank_lines_of_a_further_reference_do_not_count(run):
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["data"]["test"]["seen"]["references"] = [str(run / "others")]
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    (run / "others").write_text("\n" * 7 + "x\n")
    with Translator.load(run, "cpu") as translator:
        [found] = score_test_sets(run, translator)
    assert [score.signature.split("|")[0] for score in found.scores] == ["nrefs:var"] * 2
    assert found.scores[0].score == pytest.approx(100)


def test_recorded_scores_are_used_again_for_the_same_model_and_settings_only(run):
    file = run / "test_scores.json"
    with Translator.load(run, "cpu") as translator:
        list(score_test_sets(run, translator))
        record = json.loads(file.read_text())
        record["sets"][0]["scores"][0]["score"] = -1.0
        file.write_text(json.dumps(record))
        assert next(score_test_sets(run, translator)).scores[0].score == -1.0
        others = [translator.with_settings(beam_size=2)]
        for damaged in ("{", json.dumps({**record, "sets": [{"name": "seen"}]})):
            file.write_text(damaged)
            assert read_results(run) == []
            others.append(translator)
        for other in others:
            assert next(score_test_sets(run, other)).scores[0].score >= 0
