"""Choosing by a model of the opposite direction."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from test_cli import mtrain  # noqa: F401  (a fixture)

SCRIPT = Path(__file__).parents[1] / "scripts/rerank.py"
LINES = ["Es regnet.", "", "Die Sonne scheint."]
WAYS = [
    [("The dog is small.", -0.1), ("It rains.", -0.2), ("It is raining today.", -0.3)],
    [("", 0.0)],
    [("It rains.", -0.1), ("word " * 2000, -0.2), ("The sun shines.", -0.7)],
]


@pytest.fixture
def files(tmp_path):
    """German lines and what a model made of each, to which that of run_dir is the reverse."""
    (tmp_path / "in.de").write_text("".join(f"{line}\n" for line in LINES))
    answers = [{"n_best": [{"text": text, "score": score} for text, score in ways]} for ways in WAYS]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(answer) + "\n" for answer in answers))
    return tmp_path


def rerank(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPT, *map(str, arguments), "-i", "in.de", "-o", "out.en", "--device", "cpu"]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder)


def test_the_reverse_model_outvotes_the_search_as_its_weight_says(run_dir, files):
    for weight, wanted in {
        "0": ["The dog is small.", "", "It rains."],
        "1": ["It rains.", "", "The sun shines."],
    }.items():
        done = rerank(files, run_dir, "in.jsonl", "--weight", weight)
        assert done.returncode == 0, done.stderr
        assert (files / "out.en").read_text().split("\n") == [*wanted, ""]


def test_it_reads_what_translate_writes_and_sums_what_score_says(run_dir, mtrain, tmp_path):  # noqa: F811
    lines = ["It rains.", "The sun shines.", "A small house.", "", "The cat is big."]
    (tmp_path / "in.de").write_text("".join(f"{line}\n" for line in lines))  # any language: the sums count
    search = ["--beam-size", "4", "--n-best", "4", "--json", "--device", "cpu"]
    mtrain("translate", run_dir, "-i", tmp_path / "in.de", "-o", tmp_path / "in.jsonl", *search)
    assert rerank(tmp_path, run_dir, "in.jsonl", "--weight", "0.5").returncode == 0
    answers = [json.loads(line)["n_best"] for line in (tmp_path / "in.jsonl").read_text().splitlines()]
    for name, side in {
        "hyp": [way["text"] for ways in answers for way in ways],
        "src": [line for line, ways in zip(lines, answers, strict=True) for _ in ways],
    }.items():
        (tmp_path / name).write_text("".join(f"{text}\n" for text in side))
    _, said, _ = mtrain(
        "score", run_dir, "-i", tmp_path / "hyp", "--target", tmp_path / "src", "--json", "--device", "cpu"
    )
    reverse = [json.loads(line) for line in said.splitlines()]
    for ways, chosen in zip(answers, (tmp_path / "out.en").read_text().splitlines(), strict=True):
        theirs, reverse = reverse[: len(ways)], reverse[len(ways) :]
        sums = {
            way["text"]: way["score"] + 0.5 * sum(other["token_log_probs"]) / len(other["token_log_probs"])
            for way, other in zip(ways, theirs, strict=True)
        }
        assert sums[chosen] == pytest.approx(max(sums.values()), abs=1e-5)


def test_a_mistake_is_one_line_and_writes_nothing(run_dir, files):
    (files / "short.jsonl").write_text((files / "in.jsonl").read_text().split("\n")[0] + "\n")
    (files / "plain.jsonl").write_text('{"text": "It rains.", "score": 0.0}\n' * 3)
    said = {
        (run_dir, "short.jsonl"): (3, "short.jsonl: ends before line 2 of the other"),
        (run_dir, "plain.jsonl"): (3, "plain.jsonl:1: not of `mtrain translate --json --n-best N`"),
        (run_dir, "none.jsonl"): (3, "none.jsonl: no such file"),
        (files / "none", "in.jsonl"): (4, "no such model"),
        (run_dir, "in.jsonl", "--weight", "nan"): (2, "--weight nan: give a number from 0 on"),
    }
    for arguments, (code, message) in said.items():
        done = rerank(files, *arguments)
        assert done.returncode == code and message in done.stderr.splitlines()[-1], done.stderr
        assert code == 2 or done.stderr.count("\n") == 1
        assert not (files / "out.en").exists()
