"""Choosing by a model of the opposite direction."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

SCRIPT = ROOT / "scripts/rerank.py"
LINES = ["Es regnet.", "", "Die Sonne scheint.", "Es regnet."]
LONG = "word " * 2000
HYPOTHESES = [
    [("The dog is small.", -0.1), ("It rains.", -0.2), ("It is raining today.", -0.3)],
    [("", 0.0)],
    [(LONG, -0.01), ("It rains.", -0.1), ("The sun shines.", -0.7)],
    [(f"{LONG}one", -0.2), (f"{LONG}two", -0.1)],
]


def n_best(hypotheses: list[tuple[str, float]]) -> str:
    return json.dumps({"n_best": [{"text": text, "score": score} for text, score in hypotheses]}) + "\n"


@pytest.fixture
def files(tmp_path):
    """German lines and what a model made of each, to which that of run_dir is the reverse."""
    (tmp_path / "in.de").write_text("".join(f"{line}\n" for line in LINES))
    (tmp_path / "in.jsonl").write_text("".join(map(n_best, HYPOTHESES)))
    return tmp_path


def rerank(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPT, *map(str, arguments), "-i", "in.de"]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder)


@pytest.mark.parametrize(
    ("weight", "wanted"),
    [
        ("0", ["The dog is small.", "", "It rains.", f"{LONG}two"]),
        ("1", ["It rains.", "", "The sun shines.", f"{LONG}two"]),
    ],
)
def test_the_reverse_model_outvotes_the_search_as_its_weight_says(weight, wanted, run_dir, files):
    done = rerank(files, run_dir, "in.jsonl", "--weight", weight, "--device", "cpu")
    assert (done.returncode, done.stdout.split("\n")) == (0, [*wanted, ""]), done.stderr


def test_it_writes_utf8_whatever_the_locale(run_dir, files, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "latin-1")
    (files / "in.de").write_text("Es regnet.\n")
    (files / "in.jsonl").write_text(n_best([("Très bien, żółw.", -0.1)]))
    assert rerank(files, run_dir, "in.jsonl", "--device", "cpu").stdout == "Très bien, żółw.\n"


def test_it_reads_what_translate_writes_and_sums_what_score_says(run_dir, mtrain, tmp_path):
    lines = ["It rains.", "The dog sleeps.", "A small house.", "", "The cat is big."]
    (tmp_path / "in.de").write_text("".join(f"{line}\n" for line in lines))  # any language: the sums count
    search = ["--beam-size", "4", "--n-best", "4", "--json", "--device", "cpu"]
    mtrain("translate", run_dir, "-i", tmp_path / "in.de", "-o", tmp_path / "in.jsonl", *search)
    done = rerank(tmp_path, run_dir, "in.jsonl", "--weight", "0.5", "--device", "cpu", "--batch-tokens", "64")
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line)["n_best"] for line in (tmp_path / "in.jsonl").read_text().splitlines()]
    pairs = [(one["text"], line) for line, ways in zip(lines, answers, strict=True) for one in ways]
    for name, side in zip(("texts", "lines"), zip(*pairs, strict=True), strict=True):
        (tmp_path / name).write_text("".join(f"{text}\n" for text in side))
    given = ["-i", tmp_path / "texts", "--target", tmp_path / "lines", "--json", "--device", "cpu"]
    _, said, _ = mtrain("score", run_dir, *given)
    means = [
        sum(steps) / len(steps)
        for line in said.splitlines()
        if (steps := json.loads(line)["token_log_probs"])
    ]
    assert len(means) == len(pairs)
    for ways, chosen in zip(answers, done.stdout.splitlines(), strict=True):
        values = {one["text"]: one["score"] + 0.5 * means.pop(0) for one in ways}
        assert values[chosen] == pytest.approx(max(values.values()), abs=1e-5)


@pytest.mark.parametrize(
    "line",
    [
        '{"text": "It rains.", "score": 0.0}',
        '{"n_best": []}',
        '{"n_best": [{"text": null, "score": 0.0}]}',
        '{"n_best": [{"text": "two\\nlines", "score": 0.0}]}',
        '{"n_best": [{"text": "half \\ud800", "score": 0.0}]}',
        '{"n_best": [{"text": "It rains.", "score": NaN}]}',
        '{"n_best": [{"text": "It rains.", "score": 1' + "0" * 400 + "}]}",
        "[" * 100_000,
        "",
    ],
)
def test_a_line_that_translate_did_not_write_is_named(line, run_dir, files):
    (files / "in.jsonl").write_text("".join(map(n_best, HYPOTHESES[:3])) + line + "\n")
    done = rerank(files, run_dir, "in.jsonl", "--device", "cpu")
    assert done.returncode == 3 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: in.jsonl:4: not as `translate --json --n-best 2` writes it: ")


def test_a_mistake_is_one_line(run_dir, files):
    (files / "short.jsonl").write_text(n_best(HYPOTHESES[0]))
    said = {
        (run_dir, "short.jsonl"): (3, "in.de has 4 lines but short.jsonl has 1 lines"),
        (run_dir, "none.jsonl"): (3, "none.jsonl: no such file"),
        (files / "none", "in.jsonl"): (4, "no such model"),
        (run_dir, "in.jsonl", "--device", "gpu"): (2, "gpu"),
        (run_dir, "in.jsonl", "--weight", "nan"): (2, "--weight nan: give a number from 0 on"),
        (run_dir, "in.jsonl", "--weight", "-1"): (2, "--weight -1.0: give a number from 0 on"),
    }
    for arguments, (code, message) in said.items():
        done = rerank(files, *arguments)
        assert done.returncode == code and message in done.stderr.splitlines()[-1], done.stderr
        assert "--weight" in arguments or done.stderr.count("\n") == 1
