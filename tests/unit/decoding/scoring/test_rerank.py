"""`mtrain rerank`: the choice among translations by a model of the opposite direction."""

import io
import json
import sys

import pytest

from tests.support.cli import one_line

LINES = ["Es regnet.", "", "Die Sonne scheint.", "Es regnet."]
LONG = "word " * 2000
CANDIDATES = [
    [("The dog is small.", -0.1), ("It rains.", -0.2), ("It is raining today.", -0.3)],
    [("", 0.0)],
    [(LONG, -0.01), ("It rains.", -0.1), ("The sun shines.", -0.7)],
    [(f"{LONG}one", -0.2), (f"{LONG}two", -0.1)],
]


def n_best(candidates: list[tuple[str, float]]) -> str:
    return json.dumps({"n_best": [{"text": text, "score": score} for text, score in candidates]}) + "\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working folder, with German lines and English translations; run_dir is the reverse model."""
    (tmp_path / "in.de").write_text("".join(f"{line}\n" for line in LINES))
    (tmp_path / "in.jsonl").write_text("".join(map(n_best, CANDIDATES)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


JOB = ["in.jsonl", "-i", "in.de", "--device", "cpu"]


@pytest.mark.parametrize(
    ("weight", "chosen"),
    [
        ("0", ["The dog is small.", "", "It rains.", f"{LONG}two"]),
        ("1", ["It rains.", "", "The sun shines.", f"{LONG}two"]),
    ],
)
def test_the_weight_of_the_reverse_model_decides(mtrain, run_dir, folder, weight, chosen):
    code, out, err = mtrain("rerank", run_dir, *JOB, "--weight", weight, "--quiet")
    assert (code, out.split("\n"), err) == (0, [*chosen, ""], "")
    assert mtrain("rerank", run_dir, *JOB, "--weight", weight, "-o", "out")[:2] == (0, "")
    assert (folder / "out").read_text() == out


def test_utf8_is_written_whatever_the_locale(mtrain, run_dir, folder, monkeypatch):
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", stdout)
    (folder / "in.de").write_text("Es regnet.\n")
    (folder / "in.jsonl").write_text(n_best([("Très bien, żółw.", -0.1)]))
    assert mtrain("rerank", run_dir, *JOB)[0] == 0
    stdout.flush()
    assert stdout.buffer.getvalue().decode() == "Très bien, żółw.\n"


def test_the_candidate_with_the_highest_weighted_sum_of_both_scores_is_chosen(mtrain, run_dir, folder):
    lines = ["It rains.", "The dog sleeps.", "A small house.", "", "The cat is big."]
    (folder / "in.de").write_text("".join(f"{line}\n" for line in lines))  # the language does not matter
    search = ["--beam-size", "4", "--n-best", "4", "--json", "--device", "cpu"]
    mtrain("translate", run_dir, "-i", "in.de", "-o", "in.jsonl", *search)
    code, out, err = mtrain("rerank", run_dir, *JOB, "--weight", "0.5", "--batch-tokens", "64")
    assert code == 0, err
    answers = [json.loads(line)["n_best"] for line in (folder / "in.jsonl").read_text().splitlines()]
    pairs = [(one["text"], line) for line, found in zip(lines, answers, strict=True) for one in found]
    for name, side in zip(("texts", "lines"), zip(*pairs, strict=True), strict=True):
        (folder / name).write_text("".join(f"{text}\n" for text in side))
    _, scored, _ = mtrain("score", run_dir, "-i", "texts", "--target", "lines", "--json", "--device", "cpu")
    means = [
        sum(steps) / len(steps)
        for line in scored.splitlines()
        if (steps := json.loads(line)["token_log_probs"])
    ]
    assert len(means) == len(pairs)
    for found, chosen in zip(answers, out.splitlines(), strict=True):
        values = {one["text"]: one["score"] + 0.5 * means.pop(0) for one in found}
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
def test_a_malformed_line_is_named(mtrain, run_dir, folder, line):
    (folder / "in.jsonl").write_text("".join(map(n_best, CANDIDATES[:3])) + line + "\n")
    code, _, err = mtrain("rerank", run_dir, *JOB, "--quiet", "-o", "out")
    wanted = "the output of `mtrain translate --json --n-best N`, N at least 2"
    assert (code, err) == (3, f"error: in.jsonl:4: malformed; expected {wanted}\n")
    assert not (folder / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["{run}", "short.jsonl"], 3, "in.de has 4 lines but short.jsonl has 1 lines"),
        (["{run}", "none.jsonl"], 3, "none.jsonl: no such file"),
        (["{run}", "-"], 2, "rerank cannot read from stdin; give files"),
        (["none", "in.jsonl"], 4, "no such model"),
        (["{run}", "in.jsonl", "--device", "gpu"], 2, "gpu"),
        (["{run}", "in.jsonl", "--weight", "nan"], 2, "--weight nan: must be a number from 0 to 1000000000"),
        (["{run}", "in.jsonl", "--weight", "-1"], 2, "--weight -1.0: must be a number from 0 to 1000000000"),
        (["{run}", "in.jsonl", "--set", "model.heads=2"], 2, "only decoding.* can be set"),
        (["{run}", "in.jsonl", "-o", "in.de"], 2, "this file is also an input"),
    ],
)
def test_each_mistake_is_reported_in_one_line(mtrain, run_dir, folder, arguments, code, message):
    (folder / "short.jsonl").write_text(n_best(CANDIDATES[0]))
    given = [argument.format(run=run_dir) for argument in arguments]
    found, out, err = mtrain("rerank", *given, "-i", "in.de", "--quiet")
    assert (found, out) == (code, "") and message in one_line(err)
