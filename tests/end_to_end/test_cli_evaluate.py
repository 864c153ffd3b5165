"""`mtrain evaluate` as a user runs it."""

import json
import shutil
from pathlib import Path

import pytest

from mtrain.storage.manifest import write_manifest
from tests.support.cli import changed, one_line


def test_evaluate_prints_scores_with_signatures(mtrain, run_dir, corpus):
    code, out, _ = mtrain("evaluate", run_dir, "--device", "cpu")
    assert code == 0 and out.startswith("seen (8 sentences)\n")
    for signature in ("BLEU|nrefs:1|case:mixed|eff:no|tok:13a", "chrF2|", "TER|"):
        assert signature in out
    files = [
        "--source",
        corpus / "train.en",
        "--reference",
        corpus / "train.de",
        "--reference",
        corpus / "train.en",
    ]
    code, out, _ = mtrain(
        "evaluate", run_dir, *files, "--metrics", "bleu", "--lowercase", "--json", "--device", "cpu"
    )
    result = json.loads(out)["train.en"]
    assert code == 0 and result["sentences"] == 8
    assert [s["metric"] for s in result["scores"]] == ["bleu"] and result["scores"][0][
        "score"
    ] == pytest.approx(100)
    assert "nrefs:2|case:lc" in result["scores"][0]["signature"]


def test_set_replaces_the_test_sets_of_the_run(mtrain, run_dir, corpus):
    moved = f"data.test={{moved: {{source: {corpus}/train.en, target: {corpus}/train.de}}}}"
    code, out, _ = mtrain("evaluate", run_dir, "--set", moved, "--metrics", "bleu", "--device", "cpu")
    assert code == 0 and out.startswith("moved (8 sentences)\n")


def test_hypotheses_are_scored_without_a_model(mtrain, run_dir, corpus):
    files = ["--hypotheses", corpus / "train.en", "--reference", corpus / "train.de", "--quiet"]
    alone, with_model = mtrain("evaluate", *files), mtrain("evaluate", run_dir, *files)
    assert alone == with_model and alone[0] == 0 and alone[1].startswith("train.en (8 sentences)\n")
    assert "tok:13a" in alone[1]
    code, out, _ = mtrain("evaluate", *files, "--metrics", "bleu", "--bleu-tokenize", "char", "--lowercase")
    assert code == 0 and "tok:char" in out and "case:lc" in out


def test_hypotheses_are_read_from_stdin(mtrain, stdin, corpus):
    files = ["--hypotheses", "-", "--reference", corpus / "train.de", "--json"]
    stdin((corpus / "train.de").read_bytes())
    code, out, _ = mtrain("evaluate", *files)
    result = json.loads(out)["<stdin>"]
    assert code == 0 and result["sentences"] == 8 and result["scores"][0]["score"] == pytest.approx(100)
    stdin(b"Es regnet.\n")
    code, _, err = mtrain("evaluate", *files)
    assert code == 3 and f"<stdin> has 1 lines but {corpus}/train.de has 8" in one_line(err)
    stdin(b"caf\xe9\n")
    code, _, err = mtrain("evaluate", *files)
    assert code == 3 and "<stdin>:1: not valid UTF-8" in one_line(err)
    stdin(b"")
    code, _, err = mtrain("evaluate", "--hypotheses", "-", "--reference", "/dev/null")
    assert code == 3 and "nothing to score" in one_line(err)


def test_sources_are_read_from_stdin(mtrain, stdin, run_dir, corpus):
    stdin((corpus / "train.en").read_bytes())
    files = ["--source", "-", "--reference", corpus / "train.de", "--metrics", "bleu"]
    code, out, _ = mtrain("evaluate", run_dir, *files, "--device", "cpu")
    assert code == 0 and out.startswith("<stdin> (8 sentences)\n") and "= 100" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "missing MODEL; only --hypotheses can be scored without it"),
        (["--source", "a", "--reference", "b"], "missing MODEL"),
        (["--hypotheses", "a"], "give --reference with either --source or --hypotheses"),
        (["m", "--source", "a"], "give --reference with either --source or --hypotheses"),
        (["m", "--reference", "a"], "give --reference with either --source or --hypotheses"),
        (
            ["--hypotheses", "a", "--reference", "b", "--reference", "-"],
            "--reference -: reading references from stdin is not supported; give a file",
        ),
        (
            ["--source", "a", "--hypotheses", "b", "--reference", "c"],
            "--source and --hypotheses were both given",
        ),
        (
            ["--hypotheses", "a", "--reference", "b", "--beam-size", "2"],
            "--beam-size has no effect with --hypo",
        ),
        (
            ["--hypotheses", "a", "--reference", "b", "--device", "cpu"],
            "--device has no effect with --hypotheses",
        ),
        (
            ["--hypotheses", "a", "--reference", "b", "--set", "data.x=1"],
            "--set has no effect with --hypotheses",
        ),
        (
            ["m", "--source", "a", "--reference", "b", "--set", "data.x=1"],
            "--set data.x=1 has no effect with --ref",
        ),
        (
            ["m", "--metrics", "chrf", "--bleu-tokenize", "char"],
            "--bleu-tokenize has no effect on --metrics chrf",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_combinations_that_make_no_sense_are_errors(mtrain, arguments, message):
    code, out, err = mtrain("evaluate", *arguments)
    assert (code, out) == (2, "") and message in one_line(err)


def test_search_options_take_effect(mtrain, run_dir):
    job = [
        "evaluate",
        run_dir,
        "--beam-size",
        2,
        "--length-penalty",
        0.5,
        "--batch-tokens",
        64,
        "--device",
        "cpu",
    ]
    code, out, err = mtrain(*job, "--metrics", "bleu", "--set", "decoding.stop=exact")
    assert code == 0 and "= 100" in out and f"mtrain translate {run_dir} -i FILE -o FILE" in err


def test_a_beam_size_for_a_model_that_samples_is_an_error(mtrain, run_dir, tmp_path):
    """As for `mtrain translate`."""
    model = Path(shutil.copytree(run_dir / "model", tmp_path / "model"))
    changed(model / "config.yaml", "decoding", samples=2)
    write_manifest(model)
    files = ["--source", tmp_path / "source", "--reference", tmp_path / "reference", "--device", "cpu"]
    for name in ("source", "reference"):
        (tmp_path / name).write_text("It rains.\n")
    code, out, err = mtrain("evaluate", model, *files, "--beam-size", 4)
    assert (code, out) == (2, "")
    assert "--beam-size has no effect on sampling (decoding.samples is 2)" in one_line(err)
    code, out, _ = mtrain("evaluate", model, *files, "--beam-size", 4, "--set", "decoding.samples=null")
    assert code == 0 and "BLEU" in out
