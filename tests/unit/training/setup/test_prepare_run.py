"""`mtrain prepare`: what `fit` does before training."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from mtrain.data.scanning.scanner import LARGE
from mtrain.data.store.shards import SHARD
from mtrain.errors import StorageError
from mtrain.processes.cores import count_cores
from mtrain.training.setup.prepare_run import open_prepared_run, prepare_only, prepare_run
from mtrain.training.setup.tokenizer import tokenize
from tests.support.encoding import TOY, write
from tests.support.training import fit_on_cpu


def test_fit_uses_what_prepare_has_encoded(mtrain, raw_config, tmp_path):
    train = write(tmp_path / "train.tsv", TOY)
    raw = {**raw_config, "run_dir": str(tmp_path / "run")}
    raw["data"] = {**raw["data"], "train": train, "validation": {"holdout": 5}}
    raw["tokenizer"] = {"vocab_size": 350}
    raw["training"] = {**raw["training"], "max_steps": 1}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(raw), encoding="utf-8")
    code, out, err = mtrain("prepare", tmp_path / "config.yaml")
    assert code == 0 and out == f"{tmp_path / 'run/data'}\n"
    assert "tokenizer: learning a unigram vocabulary of size 350" in err and "checked 300 pairs" in err
    assert f"data saved; next: mtrain fit {tmp_path / 'config.yaml'}\n" in err
    assert "data: 295 training pairs (dropped: 5 held out), 5 validation pairs" in err
    assert not (tmp_path / "run/checkpoints").exists()
    files = {file: file.stat().st_mtime_ns for file in (tmp_path / "run/data").iterdir()}
    (tmp_path / "train.tsv").rename(tmp_path / "moved.tsv")
    (tmp_path / "moved.tsv").rename(tmp_path / "train.tsv")
    code, _, err = mtrain("fit", tmp_path / "config.yaml", "--device", "cpu")
    assert code == 0 and "encoding the corpus" not in err and "checked" not in err
    kept = {file: file.stat().st_mtime_ns for file in files if file.name != "sources.json"}
    assert kept.items() <= files.items()
    code, out, err = mtrain("prepare", tmp_path / "config.yaml", "--quiet")  # of a run with checkpoints
    assert (code, out, err) == (0, f"{tmp_path / 'run/data'}\n", "")


@pytest.mark.parametrize(
    ("command", "choice"),
    [
        ("prepare", ["--no-check"]),
        ("fit", ["--set", "data.check=false"]),
        pytest.param("prepare", ["--set", "data.check=false"], marks=pytest.mark.slow),
        pytest.param("fit", ["--no-check"], marks=pytest.mark.slow),
    ],
)
def test_the_corpora_need_not_be_checked(mtrain, config_file, tmp_path, command, choice):
    code, _, err = mtrain(command, config_file, *choice)
    assert code == 0 and "encoding the corpus into" in err and "checked" not in err and "LEAK" not in err
    code, _, err = mtrain("fit", config_file)  # with the key as it was
    assert code == 0 and "checked" not in err
    code, out, _ = mtrain("check", config_file, "--set", "data.check=false")
    assert code == 0 and "warning: LEAK" in out


def test_memory_is_kept_only_after_the_tokenizer_is_learned(make_config, monkeypatch):
    """Otherwise, SentencePiece's memory would not return to the kernel."""
    config, done = make_config(training={"max_steps": 1}), []
    files = [Path(config.run_dir) / name for name in ("tokenizer", "data/summary.json")]
    monkeypatch.setattr("mtrain.training.fit.keep_freed_memory", lambda: done.extend(map(Path.exists, files)))
    fit_on_cpu(config)
    assert done == [True, True]


def test_a_changed_corpus_is_checked_again(make_config, tmp_path, caplog):
    caplog.set_level("INFO", "mtrain")
    train = write(tmp_path / "train.tsv", TOY)
    config = make_config(data={"train": train, "validation": {"holdout": 5}}, tokenizer={"vocab_size": 350})
    for pairs, checked in ((TOY, True), (TOY, False), (TOY[:-1], True), (TOY[:-1], False)):
        write(tmp_path / "train.tsv", pairs)
        caplog.clear()
        prepare_only(config)
        assert (f"checked {len(pairs)} pairs" in caplog.text) == checked


def test_a_rank_that_does_not_see_the_run_folder_says_so(make_config, tmp_path):
    description = {"config": make_config().model_dump(mode="json"), "checkpoint": None}
    with pytest.raises(StorageError, match=f"{tmp_path}/run: no such folder; all machines must use the same"):
        open_prepared_run(description)


@pytest.mark.skipif(find_spec("MeCab") is not None, reason="needs an environment without MeCab")
def test_a_missing_dependency_is_reported_before_any_work(mtrain, config_file, tmp_path):
    code, _, err = mtrain("prepare", config_file, "--set", "data.target_lang=ja")
    assert code == 2 and "the BLEU tokenizer ja-mecab is not installed" in err
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(find_spec("MeCab") is not None, reason="needs an environment without MeCab")
def test_a_check_names_a_package_that_training_will_need(mtrain, config_file):
    for language in ("ja", "ko"):
        code, out, err = mtrain("check", config_file, "--set", f"data.target_lang={language}")
        assert code == 0 and "result: " in out
        assert f"warning: mtrain fit will need a package: the BLEU tokenizer {language}-mecab is not" in err
        assert f"pip install 'sacrebleu[{language}]'" in err
    assert "will need" not in mtrain("check", config_file)[2]


def test_the_help_states_the_sizes_below_which_there_is_one_process(mtrain):
    text = " ".join(re.sub("[^\\w,]", " ", mtrain("prepare", "--help")[1]).split())
    assert f"below {LARGE // 2**20} MiB to check, below {SHARD:,} pairs to encode" in text


@pytest.mark.parametrize(
    ("workers", "threads"), [(1, 1), pytest.param(2, 1, marks=pytest.mark.slow), (None, count_cores())]
)
def test_each_of_the_given_workers_encodes_with_one_thread(make_config, workers, threads):
    """Without a number, a small corpus is encoded with as many threads as there are cores."""
    tokenizer = prepare_run(make_config("run"), workers=workers).tokenizer
    assert tokenizer.source.threads == tokenizer.target.threads == threads


def test_mistakes_in_the_arguments_of_prepare_are_one_line(mtrain, config_file):
    code, _, err = mtrain("prepare", config_file, "--workers", "0")
    assert code == 2 and err.count("\n") == 1 and "--workers" in err
    code, _, err = mtrain("prepare", config_file, "--set", "data.train.source=nowhere.en")
    assert code == 3 and err == "error: nowhere.en: no such file\n"


def test_sources_without_capitals_leave_the_text_of_the_tokenizer_unchanged(make_config, corpus, tmp_path):
    """Training changes neither side then."""
    hebrew = str.maketrans({chr(ord("a") + n): chr(0x5D0 + n) for n in range(26)})
    (tmp_path / "train.he").write_text((corpus / "train.en").read_text().lower().translate(hebrew))
    train = {"source": str(tmp_path / "train.he"), "target": str(corpus / "train.de")}
    pieces = []
    for name, augment in (("plain", None), ("cased", {"uppercase": 1})):
        data = {"source_lang": "he", "train": train, "augment": augment}
        sizes = {"joint": False, "vocab_size": 302}
        config = make_config(name, data=data, tokenizer=sizes, model={"tie_embeddings": "none"})
        tokenizer = tokenize(config)
        pieces.append((tokenizer.source.pieces, tokenizer.target.pieces))
    assert pieces[0] == pieces[1]


@pytest.mark.parametrize("joint", [True, False])
def test_the_tokenizer_is_learned_from_text_with_the_letter_case_of_training(make_config, joint):
    keys = {"tokenizer": {"joint": joint, "vocab_size": 302}, "model": {"tie_embeddings": "none"}}
    cased = {"uppercase": 1, "typos": 1, "noise": 1, "merge": 1}
    letters = []
    for name, augment in (("plain", None), ("cased", cased)):
        tokenizer = tokenize(make_config(name, data={"augment": augment}, **keys))
        vocabularies = (tokenizer.source, tokenizer.target)
        learned = [set(each.pieces) - {each.pieces[i] for i in each.unlearned()} for each in vocabularies]
        letters.append([{letter for piece in pieces for letter in piece[-1:]} for pieces in learned])
    for plain, upper in zip(*letters, strict=True):
        assert {letter.upper() for letter in plain} <= upper | {"SS"} and "e" in plain
        assert not any(map(str.islower, upper))
        assert len(upper) < 40  # no noise
