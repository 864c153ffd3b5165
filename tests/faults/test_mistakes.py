"""Faults of the request: impossible config values, corpora and devices."""

import json
import os
from pathlib import Path

import pytest
import torch

from mtrain.device import resolve_device
from mtrain.errors import DataError, UsageError
from tests.support.cli import changed, one_line
from tests.support.devices import no_gpu
from tests.support.encoding import config, prepare_data
from tests.support.tokenizers import TYPES, train


def test_23_a_misspelled_key_names_the_nearest(mtrain, config_file):
    code, _, err = mtrain("fit", changed(config_file, "model", drop_out=0.1))
    assert code == 2 and "unknown key 'drop_out'; did you mean 'dropout'?" in one_line(err)


@pytest.mark.parametrize(
    ("lines", "keys", "counts"),
    [
        (b"", {}, ["empty"]),
        (b"\ta\nb\t\n", {}, ["2 empty"]),
        (b"long long long\tshort\n" * 3, {"max_length": 2}, ["3 too long"]),
        (b"\xff\ta\n" * 1200, {"bad_lines": "skip"}, ["1,200 bad"]),
        (
            b"\xff\ta\n\tb\nlong long\tc\n",
            {"bad_lines": "skip", "max_length": 2},
            ["1 bad", "1 empty", "1 too long"],
        ),
    ],
)
def test_24_a_corpus_without_usable_pairs_reports_why_they_were_dropped(
    tmp_path: Path, tokenizer, lines: bytes, keys: dict, counts: list[str]
):
    (tmp_path / "t.tsv").write_bytes(lines)
    data = config(tmp_path, {"tsv": str(tmp_path / "t.tsv")}, **keys)
    for _ in range(2):  # the second time, too: an empty corpus must not count as encoded
        with pytest.raises(DataError) as caught:
            prepare_data(data, tokenizer, tmp_path / "data", seed=1)
        assert all(count in str(caught.value) for count in counts)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("byte_fallback", [True, False])
def test_24_too_large_a_vocabulary_names_the_largest(tmp_path: Path, kind: str, byte_fallback: bool):
    keys = {"type": kind, "byte_fallback": byte_fallback}
    with pytest.raises(UsageError, match=r"vocab_size.* 50000.*largest possible is \d+") as caught:
        train(tmp_path, vocab_size=50_000, **keys)
    largest = int(str(caught.value).rsplit("largest possible is ")[1])
    assert train(tmp_path, vocab_size=largest, **keys).source_vocab_size == largest
    with pytest.raises(UsageError, match="too large"):
        train(tmp_path, vocab_size=largest + 1, **keys)


@no_gpu
@pytest.mark.parametrize("name", ["cuda", "cuda:0", "cuda:7"])
def test_27_a_missing_gpu_is_an_error(name):
    assert resolve_device("auto") == torch.device("cpu")
    with pytest.raises(UsageError, match=f"--device {name}: this machine has no CUDA device"):
        resolve_device(name)


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("model.dropout=1.0", "model.dropout: expected a number of at least 0 and below 1"),
        ("model.dropout=-0.1", "and below 1 (dropout rate of embeddings and sublayer outputs); got -0.1"),
        ("training.batch_tokens=0", "training.batch_tokens: expected an integer from 1 to 1000000000000000"),
        (
            "training.batch_tokens=many",
            "training.batch_tokens: expected an integer from 1 to 1000000000000000",
        ),
        ("tokenizer.vocab_sise=9", "unknown key 'vocab_sise'; did you mean 'vocab_size'?"),
        ("trainig.max_steps=9", "unknown key 'trainig'; did you mean 'training'?"),
    ],
)
def test_23_the_valid_values_of_a_key_are_reported(mtrain, config_file, tmp_path, assignment, message):
    code, out, err = mtrain("fit", config_file, "--set", assignment, "--device", "cpu")
    assert (code, out) == (2, "") and message in one_line(err) and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("contents", "settings", "code", "message"),
    [
        (b"", [], 3, "no text to learn a vocabulary from"),
        (b"\n \n\n", [], 3, "no text to learn a vocabulary from"),
        (None, ["data.max_length=2"], 3, "no training pair is left; dropped: 8 too long"),
        (None, ["data.filters.max_words=1"], 3, "no training pair is left; dropped: 8 max_words"),
        (None, ["tokenizer.vocab_size=60000"], 2, "given 60000; the largest possible is"),
        (None, ["tokenizer.vocab_size=9"], 2, "the smallest possible is"),
    ],
)
def test_24_too_little_text_is_one_error_message(
    mtrain, config_file, tmp_path, contents, settings, code, message
):
    if contents is not None:
        for language in ("en", "de"):
            (tmp_path / f"t.{language}").write_bytes(contents)
        files = {"source": str(tmp_path / "t.en"), "target": str(tmp_path / "t.de")}
        config_file = changed(config_file, "data", train=files)
    settings = [part for assignment in settings for part in ("--set", assignment)]
    stderr = os.dup(2)
    with (tmp_path / "stderr").open("w") as captured:  # messages that the C++ library prints
        os.dup2(captured.fileno(), 2)
        try:
            given, out, err = mtrain("fit", config_file, *settings, "--device", "cpu", "--quiet")
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
    assert (given, out) == (code, "") and message in err and err.count("error: ") == 1
    assert (tmp_path / "stderr").read_text() == ""


@pytest.mark.parametrize("command", ["check", "tokenize", "plan", "fit"])
def test_24_filters_that_reject_all_pairs_are_an_error_with_the_automatic_recipe(mtrain, tmp_path, command):
    for language in ("en", "de"):
        (tmp_path / f"t.{language}").write_text("It rains.\nA cat sleeps.\n")
    data = {
        "source_lang": "en",
        "target_lang": "de",
        "train": {"source": str(tmp_path / "t.en"), "target": str(tmp_path / "t.de")},
        "validation": {"holdout": 1},
        "filters": {"max_words": 1},
    }
    config = {"run_dir": str(tmp_path / "run"), "data": data, "training": {"max_minutes": 1}}
    (tmp_path / "auto.yaml").write_text(json.dumps(config))
    code, _, err = mtrain(command, tmp_path / "auto.yaml", "--quiet")
    reason = "data.filters rejects 2" if command == "check" else "dropped: 2 max_words"
    assert code == 3 and reason in one_line(err)


def test_23_a_forbidden_token_that_does_not_exist_is_an_error_before_training(mtrain, config_file, tmp_path):
    code, _, err = mtrain("fit", config_file, "--set", "decoding.forbidden_ids=[99999]", "--quiet")
    assert code == 2 and "error: decoding.forbidden_ids: no token has the id 99999" in err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@no_gpu
def test_27_a_missing_gpu_is_a_usage_error_of_the_commands(mtrain, config_file, run_dir, tmp_path):
    for command in (["fit", config_file], ["translate", run_dir, "It rains."]):
        code, out, err = mtrain(*command, "--device", "cuda")
        assert (code, out) == (2, "") and "this machine has no CUDA device" in one_line(err)
    assert not (tmp_path / "run").exists()
