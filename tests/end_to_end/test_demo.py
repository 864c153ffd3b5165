"""`mtrain demo`: from an empty folder to an evaluated model."""

import os
from pathlib import Path

import pytest

from mtrain.cli.demo import check_outcome
from mtrain.decoding.translate import Translator
from mtrain.errors import MtrainError
from mtrain.runs.results import read_results
from tests.support.cli import one_line, run_forked
from tests.support.paths import ROOT

FEW_STEPS = [
    "--set",
    "model={preset: auto, d_model: 32, ffn_dim: 64, encoder_layers: 1, decoder_layers: 1}",
    "--set",
    "training.max_steps=2",
    "--set",
    "training.validate_every=2",
    "--set",
    "decoding.beam_size=1",
    "--set",
    "decoding.max_length_ratio=0.5",  # untrained models never end a sentence
    "--set",
    "decoding.max_length_offset=4",
]


def test_the_packaged_config_is_the_starter():
    starter, packaged = ROOT / "configs/toy-en-fr.yaml", ROOT / "mtrain/cli/toy-en-fr.yaml"
    assert starter.read_bytes() == packaged.read_bytes(), f"copy {starter} to {packaged}"


def test_demo_trains_translates_and_evaluates(mtrain, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = mtrain("demo", "--run-dir", "my run", "--device", "cpu", *FEW_STEPS)
    assert code == 0 and "finished after 2 steps" in err
    assert out.startswith("I like oranges.  ->  ") and out.count("  ->  ") == 3
    assert "BLEU on the test set: " in out.splitlines()[-1]
    assert (
        'warning: with --set the demo model is worse than by default: expected "J\'aime les oranges."' in err
    )
    assert "mtrain evaluate 'my run'" in err.splitlines()[-1]
    assert [each.name for each in read_results(Path("my run"))] == ["toy"]
    again = mtrain("demo", "--run-dir", "my run", "--device", "cpu", *FEW_STEPS, "--quiet")
    assert again[:2] == (0, out)  # the finished run is used again
    several = ["--set", "run_dir=my run", "--set", "data.test.more={toy: test}"]
    code, out, _ = mtrain("demo", *several, "--device", "cpu", *FEW_STEPS, "--quiet")
    assert code == 0 and "BLEU on the test set: " in out and not Path("runs").exists()
    code, _, err = mtrain("demo", "--run-dir", "my run", "--device", "tpu", "--quiet")
    assert code == 2 and "--device tpu" in one_line(err)


def test_the_output_of_demo_may_end_early(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    reader, writer = os.pipe()
    os.close(reader)  # as in `mtrain demo | head -0`
    code, _, err = run_forked("demo", "--device", "cpu", *FEW_STEPS, "--quiet", stdout=writer)
    os.close(writer)
    assert code == 0 and all(line.startswith("warning: ") for line in err.splitlines()), err


@pytest.mark.parametrize(
    ("translation", "bleu"), [("J'aime les oranges.", 96.9), ("Je mange des oranges.", 99.0)]
)
def test_a_bad_demo_model_is_a_failure_unless_settings_were_changed(translation, bleu, caplog):
    check_outcome("J'aime les oranges.", 97.0, settings_changed=False)
    assert not caplog.text
    check_outcome(translation, bleu, settings_changed=True)
    assert "worse than by default" in caplog.text
    with pytest.raises(MtrainError, match="worse than it should be") as error:
        check_outcome(translation, bleu, settings_changed=False)
    assert error.value.exit_code == 1


@pytest.mark.slow
def test_the_demo_model_is_as_good_as_expected(mtrain, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = mtrain("demo", "--device", "cpu")
    run = tmp_path / "runs/toy-en-fr"
    assert code == 0 and "J'aime les oranges." in out and (run / "model").is_dir(), err
    # Its attention shows negation, and adjectives that follow their nouns in French.
    sentences = ["I don't like pineapples and oranges.", "Does she eat red apples?"]
    with Translator.load(run, "cpu") as translator:
        found = translator.translate(sentences, alignments=True)
    assert found[0].text == "Je n'aime pas les ananas et les oranges."
    assert {(1, 2), (3, 4), (5, 7)} <= {*(found[0].alignment or ())}  # don't - pas
    assert found[1].text == "Est-ce qu'elle mange des pommes rouges ?"
    assert {(4, 4), (3, 5)} <= {*(found[1].alignment or ())}  # apples - pommes, red - rouges
    code, _, _ = mtrain("report", run, "-o", "toy.html", "--sentence", sentences[1])
    page = (tmp_path / "toy.html").read_text()
    assert code == 0 and sentences[1] in page and "▁pomme" in page
