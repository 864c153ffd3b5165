"""Run folders: foreign files, leftovers of a crash, settings that must not change, and their tokenizer."""

import errno
import json
import logging
import os
import shutil
from itertools import permutations
from pathlib import Path

import pytest
import torch
import yaml

from mtrain import Translator
from mtrain.config.load import load_config
from mtrain.errors import DataError, ModelError, StorageError, UsageError
from mtrain.kernels.triton import available
from mtrain.storage.manifest import write_manifest
from mtrain.training.fit import fit
from mtrain.training.setup.prepare_run import prepare_only
from mtrain.training.setup.run_folder import write_config
from mtrain.training.setup.tokenizer import tokenize
from tests.support.training import fit_on_cpu, last_checkpoint, losses, same_weights


def test_settings_that_must_not_change_are_named(make_config):
    fit_on_cpu(make_config())
    with pytest.raises(UsageError, match=r"model\.dropout was 0\.1 .* is 0\.2 now"):
        fit_on_cpu(make_config(model={"dropout": 0.2}))
    with pytest.raises(UsageError, match="validation_beam_size was 1 when this run began and is 2 now"):
        fit_on_cpu(make_config(training={"validation_beam_size": 2}))
    with pytest.raises(UsageError, match="--resume never"):
        fit_on_cpu(make_config(), resume="never")
    with pytest.raises(ModelError, match="no such checkpoint"):
        fit_on_cpu(make_config(), resume="nowhere")
    fit_on_cpu(make_config(decoding={"beam_size": 2}, training={"patience": 3, "log_every": 1}))


def test_a_run_with_hundreds_of_directions_can_be_resumed(make_config):
    """Its config has defaults besides what is given, but must not become too large to be read."""
    codes = ["en", "de", *(f"x{number:02}" for number in range(25))]
    files = {"source": "train.en", "target": "train.de"}
    corpora = [{**files, "source_lang": one, "target_lang": two} for one, two in permutations(codes, 2)]
    data = {"train": corpora, "validation": corpora, "test": {"seen": corpora[0]}, "language_tags": "target"}
    config = make_config(data=data)
    Path(config.run_dir).mkdir()
    write_config(config)
    assert load_config(Path(config.run_dir) / "config.yaml") == config


def test_missing_corpora_are_reported_before_any_work(make_config, tmp_path):
    with pytest.raises(DataError, match=r"nowhere\.en: no such file"):
        fit_on_cpu(make_config(data={"test": {"t": {"source": "nowhere.en", "target": "nowhere.de"}}}))
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_can_be_taken_from_another_model(make_config, run_dir):
    run = fit_on_cpu(make_config(tokenizer={"path": str(run_dir)}))
    assert (run / "tokenizer/joint.model").read_bytes() == (run_dir / "tokenizer/joint.model").read_bytes()
    with pytest.raises(ModelError, match="tokenizer/ is missing"):
        fit_on_cpu(make_config("other", tokenizer={"path": str(run_dir / "checkpoints")}))


def test_a_tokenizer_learned_with_other_settings_is_not_used(make_config, tmp_path):
    config = make_config()
    tokenize(config)
    with pytest.raises(UsageError, match="other tokenizer settings"):
        fit_on_cpu(make_config(tokenizer={"vocab_size": 331}))
    settings = Path(config.run_dir) / "tokenizer" / "config.yaml"
    known = yaml.safe_load(settings.read_text())
    del known["symbols"]  # as written before the key existed
    settings.write_text(yaml.safe_dump(known))
    tokenize(config)
    tokenize(make_config(tokenizer={"vocab_size": 331}), force=True)
    fit_on_cpu(make_config(tokenizer={"vocab_size": 331}))
    with pytest.raises(UsageError, match="other tokenizer settings; restore them, or give another --run-dir"):
        tokenize(config)
    with pytest.raises(UsageError, match="checkpoints need this tokenizer"):
        tokenize(config, force=True)
    shared = {"folder": str(tmp_path / "shared")}
    prepare_only(make_config("other", data=shared))
    with pytest.raises(
        UsageError, match="other tokenizer settings; restore them, or give another --run-dir and another"
    ):
        fit_on_cpu(make_config("other", data=shared, tokenizer={"vocab_size": 331}))


@pytest.mark.parametrize(
    "name", ["data/train.en", "config.yaml", "model/readme", "metrics.jsonl", "origin.json", "choices.json"]
)
def test_a_folder_with_foreign_files_is_not_a_run_folder(make_config, tmp_path, name):
    file = tmp_path / "mine" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("precious")
    for start in (fit_on_cpu, tokenize):
        with pytest.raises(UsageError, match="is not a run folder"):
            start(make_config("mine"))
    assert [path for path in (tmp_path / "mine").rglob("*") if path.is_file()] == [file]
    assert file.read_text() == "precious"


def test_a_run_that_was_killed_after_it_made_its_data_folder_starts_again(make_config, tmp_path):
    (tmp_path / "run/data").mkdir(parents=True)
    fit_on_cpu(make_config("run", training={"max_steps": 1}))


def test_a_model_folder_is_not_a_run_folder(make_config, run_dir, tmp_path):
    shutil.copytree(run_dir / "model", tmp_path / "model")
    with pytest.raises(UsageError, match="is not a run folder"):
        fit_on_cpu(make_config("model"))
    assert Translator.load(tmp_path / "model", "cpu").translate(["It rains."])[0].text == "Es regnet."


def test_a_model_without_checkpoints_is_never_replaced(make_config):
    """Users remove checkpoints to save space, and may start `fit` again."""
    run = fit_on_cpu(make_config(training={"max_steps": 4}))
    shutil.rmtree(run / "checkpoints")
    before = (run / "model/model.safetensors").read_bytes(), (run / "metrics.jsonl").read_bytes()
    for resume in ("auto", "never"):
        with pytest.raises(UsageError, match="has a model but no checkpoint to resume from; a new run would"):
            fit_on_cpu(make_config(training={"max_steps": 4}), resume)
    with pytest.raises(UsageError, match="has a model but no checkpoint to resume from"):
        tokenize(make_config(), force=True)
    assert before == ((run / "model/model.safetensors").read_bytes(), (run / "metrics.jsonl").read_bytes())


def test_leftovers_of_a_crash_are_removed(make_config):
    run = fit_on_cpu(make_config())
    (run / "checkpoints/.step-00000009.tmp").mkdir()
    (run / ".data.tmp").mkdir()
    (run / "data/.epoch-x").write_text("")
    fit_on_cpu(make_config(training={"max_steps": 10}))
    left = [file.name for name in ("", "checkpoints", "data") for file in (run / name).glob(".*")]
    assert sorted(left) == [*[".lock"] * 2, *[".lock-owner"] * 2]


def test_leftovers_that_cannot_be_removed_are_an_error(make_config, monkeypatch):
    run = fit_on_cpu(make_config())
    (run / ".data.tmp").mkdir()

    def refuse(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(shutil, "rmtree", refuse)
    with pytest.raises(StorageError, match=f"{run}: cannot clean up the run folder: Permission denied"):
        fit_on_cpu(make_config(training={"max_steps": 10}))


def test_a_tokenizer_older_than_the_text_is_logged(make_config, corpus, tmp_path, caplog):
    files = {"source": str(tmp_path / "t.en"), "target": str(tmp_path / "t.de")}
    for side, language in (("source", "en"), ("target", "de")):
        Path(files[side]).write_bytes((corpus / f"train.{language}").read_bytes())
    tokenize(make_config(data={"train": files}))
    os.utime(files["source"])
    tokenize(make_config(data={"train": files}))
    assert "has changed since the tokenizer" not in caplog.text  # a touched file is the same text
    tokenize(make_config(data={"train": files, "filters": {"max_words": 99}}))
    assert "augment or temperature has changed since the tokenizer" in caplog.text
    caplog.clear()
    tokenize(make_config(data={"train": files, "augment": {"typos": 0.1}}))
    assert "has changed since the tokenizer" not in caplog.text  # does not depend on typing errors
    tokenize(make_config(data={"train": files, "augment": {"uppercase": 0.1}}))
    assert "augment or temperature has changed since the tokenizer" in caplog.text
    caplog.clear()
    tokenize(make_config(data={"train": files, "temperature": 2}))
    assert "augment or temperature has changed since the tokenizer" in caplog.text
    caplog.clear()
    Path(files["source"]).write_bytes(Path(files["source"]).read_bytes().replace(b"cat", b"cow"))
    fit_on_cpu(make_config(data={"train": files}))
    assert "has changed since the tokenizer" in caplog.text
    caplog.clear()
    fit_on_cpu(make_config(data={"train": files}, training={"max_steps": 10}))
    assert "has changed since the tokenizer" not in caplog.text  # the checkpoints need this one


def test_a_tokenizer_of_text_that_was_filtered_is_logged(make_config, corpus, caplog):
    files = {"source": str(corpus / "train.en"), "target": str(corpus / "train.de")}
    tokenize(make_config(data={"train": files, "filters": {"max_words": 99}}))
    tokenize(make_config(data={"train": {**files, "filters": "off"}, "filters": {"max_words": 99}}))
    assert "has changed since the tokenizer was learned" in caplog.text


def test_a_tokenizer_of_other_columns_is_logged(make_config, corpus, tmp_path, caplog):
    english, german = ((corpus / f"train.{language}").read_text().splitlines() for language in ("en", "de"))
    table = tmp_path / "train.tsv"
    table.write_text("".join(f"{en}\t{de}\t{en}\n" for en, de in zip(english, german, strict=True)))
    learned = Path(tokenize(make_config(data={"train": {"tsv": str(table)}})).files[0]).parent
    moved = tmp_path / "moved.tsv"
    table.rename(moved)
    tokenize(make_config(data={"train": {"tsv": str(moved), "name": "mine", "weight": 2}}))
    assert "has changed since the tokenizer" not in caplog.text  # the same text
    reversed_columns = {"tsv": str(moved), "source_column": 1, "target_column": 2}
    tokenize(make_config(data={"train": reversed_columns}))
    assert "has changed since the tokenizer was learned" in caplog.text
    caplog.clear()
    record = learned / "learnt-from.json"  # in which earlier versions wrote only the hash of the file
    record.write_text(json.dumps(json.loads(record.read_text())[:1]) + "\n")
    write_manifest(learned)
    tokenize(make_config(data={"train": reversed_columns}))
    assert "has changed since the tokenizer" not in caplog.text


def test_damaged_data_is_encoded_again(make_config, caplog):
    run = fit_on_cpu(make_config())
    for name, damage in (
        ("summary.json", b"{"),
        ("shard-00000.safetensors", None),
        ("validation.jsonl", b""),
    ):
        file = run / "data" / name
        contents = bytearray(file.read_bytes())
        contents[len(contents) // 2] ^= 1
        file.write_bytes(contents if damage is None else damage)
        step = int(last_checkpoint(run).name[5:]) + 2
        fit_on_cpu(make_config(training={"max_steps": step}))
        assert int(last_checkpoint(run).name[5:]) == step
    assert "encoding the corpus again" in caplog.text


def test_damaged_lines_of_the_metrics_are_dropped(make_config):
    run = fit_on_cpu(make_config())
    with (run / "metrics.jsonl").open("ab") as stream:
        stream.write(b'\xff\n{"step": 9, "loss"')
    fit_on_cpu(make_config(training={"max_steps": 12}))
    assert [step for step, *_ in losses(run)] == [2, 4, 6, 8, 10, 12]


def test_files_that_mtrain_did_not_write_stay_in_the_run_folder(make_config, tmp_path):
    for name in (".mine.tmp", ".project.tmp/notes", "log.txt"):
        (tmp_path / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / name).write_text("precious")
    fit_on_cpu(make_config())
    fit_on_cpu(make_config(training={"max_steps": 10}))
    assert all((tmp_path / "run" / name).exists() for name in (".mine.tmp", ".project.tmp/notes", "log.txt"))


def test_a_run_resumes_exactly_after_its_raw_files_were_moved(make_config, corpus, tmp_path, caplog):
    plain = fit_on_cpu(make_config("plain", training={"max_steps": 8}))
    fit_on_cpu(make_config(training={"max_steps": 5}))
    moved = {side: str(tmp_path / f"moved.{name}") for side, name in (("source", "en"), ("target", "de"))}
    for side, file in moved.items():
        shutil.copy(corpus / f"train.{'en' if side == 'source' else 'de'}", file)
    before = (tmp_path / "run/data/summary.json").read_bytes()
    config = make_config(data={"train": moved, "validation": moved}, training={"max_steps": 8})
    with caplog.at_level(logging.INFO, "mtrain"):
        run = fit_on_cpu(config)
    assert same_weights(run, plain) and (run / "data/summary.json").read_bytes() == before
    assert f"data.train.source: {moved['source']}, was {corpus}/train.en" in caplog.text
    Path(moved["source"]).write_text("Other text.\n" * 8)
    with pytest.raises(ModelError, match="the corpus or the tokenizer changed since the checkpoints"):
        fit_on_cpu(config)


def test_a_changed_corpus_is_named_by_its_files(make_config, corpus, tmp_path):
    copy = tmp_path / "other.en"
    copy.write_bytes((corpus / "train.en").read_bytes())
    target = str(corpus / "train.de")
    fit_on_cpu(make_config(training={"max_steps": 2}))
    sources = [
        {"source": str(corpus / "train.en"), "target": target},
        {"source": str(copy), "target": target},
    ]
    with pytest.raises(UsageError, match=r"data\.train was .* when this run began and is .* now") as caught:
        fit_on_cpu(make_config(data={"train": sources}))
    assert f"{corpus}/train.en and {target}, {copy} and {target} now" in str(caught.value)
    assert not set("{}[]") & set(str(caught.value))
    both = make_config(data={"train": sources}, training={"max_steps": 4})
    fit(both, device="cpu", allow_data_change=True)
    assert last_checkpoint(Path(both.run_dir)).name == "step-00000004"
    held_out = make_config(data={"train": sources, "validation": {"holdout": 2}})
    with pytest.raises(UsageError, match=r"data\.validation was .* now; restore it"):
        fit(held_out, device="cpu", allow_data_change=True)
    missing = make_config(data={"train": [sources[0], {"source": "none", "target": target}]})
    with pytest.raises(DataError, match="none: no such file"):
        fit(missing, device="cpu", allow_data_change=True)
    fit_on_cpu(both)  # the run keeps its config
    weighted = make_config(data={"train": [{**sources[0], "weight": 2.0}, sources[1]]})
    with pytest.raises(UsageError, match=r"data\.train\[1\]\.weight was 1\.0 .* now; restore it"):
        fit(weighted, device="cpu", allow_data_change=True)


def test_a_changed_setting_of_a_corpus_is_named(make_config, corpus, tmp_path):
    lines = zip(*((corpus / f"train.{code}").read_text().splitlines() for code in ("en", "de")), strict=True)
    (tmp_path / "train.tsv").write_text("".join(f"{source}\t{target}\n" for source, target in lines))
    train = {"tsv": str(tmp_path / "train.tsv")}
    fit_on_cpu(make_config(data={"train": train}, training={"max_steps": 2}))
    with pytest.raises(
        UsageError, match=r"data\.train\.quotes was false when this run began and is true now"
    ):
        fit_on_cpu(make_config(data={"train": {**train, "quotes": True}}))
    scored = {"min_score": {"column": 2, "value": 0.5}}
    found = r"data.filters was null when this run began and is \{min_score: \{column: 2, value: 0.5\}\} now"
    with pytest.raises(UsageError, match=found):
        fit_on_cpu(make_config(data={"train": train, "filters": scored}))


def test_test_sets_and_the_arithmetic_may_change(make_config, corpus, caplog):
    fit_on_cpu(make_config(training={"max_steps": 2}))
    tests = {"new": {"source": str(corpus / "train.en"), "target": str(corpus / "train.de")}}
    fit_on_cpu(make_config(data={"test": tests}, training={"max_steps": 4, "cuda_graphs": "off"}))
    run = fit_on_cpu(make_config(data={"test": tests}, training={"max_steps": 6, "precision": "bf16"}))
    assert last_checkpoint(run).name == "step-00000006"
    assert "not bit-identically" in caplog.text


def test_a_run_whose_config_has_a_removed_key_resumes_bit_identically(make_config, caplog):
    run = fit_on_cpu(make_config(training={"max_steps": 2}))
    file = run / "config.yaml"
    file.write_text(file.read_text().replace("training:\n", "training:\n  compile: auto\n"))
    fit_on_cpu(make_config(training={"max_steps": 4, "compile": "off"}))
    whole = fit_on_cpu(make_config("whole", training={"max_steps": 4}))
    assert "not bit-identically" not in caplog.text and same_weights(run, whole)


def test_kernels_that_operators_replace_are_part_of_the_arithmetic(make_config, monkeypatch, caplog):
    device = torch.device("cpu")
    replaced = available.Variant("attention.short_attention", device, (), trained=(True,))
    decoding = available.Variant("decoding.attention", device, (), trained=())
    monkeypatch.setattr(available, "outcomes", {replaced: False, decoding: False})
    for steps in (2, 4):
        fit_on_cpu(make_config(training={"max_steps": steps}))
    assert "not bit-identically" not in caplog.text
    monkeypatch.setattr(available, "outcomes", {replaced: True, decoding: False})
    fit_on_cpu(make_config(training={"max_steps": 6}))
    assert "not bit-identically" in caplog.text and "without attention.short_attention," in caplog.text
    assert "decoding.attention" not in caplog.text


@pytest.mark.parametrize(("precision", "changes"), [("bf16", True), ("fp32", False)])
@pytest.mark.parametrize(
    ("query", "description"),
    [
        ("kernels.mixed_linear.cpu_has_amx", "products with surplus rows"),
        ("training.step.arithmetic.cpu_has_bf16", "bf16 emulated"),
    ],
)
def test_the_instructions_for_bf16_are_part_of_the_arithmetic(
    make_config, monkeypatch, caplog, query, description, precision, changes
):
    for present, steps in ((False, 2), (True, 4)):
        monkeypatch.setattr(f"mtrain.{query}", lambda present=present: present)
        fit_on_cpu(make_config(training={"max_steps": steps, "precision": precision}))
    assert ("not bit-identically" in caplog.text) == changes
    assert (f", {description}, " in caplog.text) == changes


def test_other_changed_keys_are_shown_as_in_the_config(make_config):
    fit_on_cpu(make_config(training={"max_steps": 2}))
    for keys, message in (
        ({"training": {"ema_decay": 0.9}}, "training.ema_decay was null when this run began and is 0.9 now"),
        ({"model": {"output_bias": True}}, "model.output_bias was false when this run began and is true now"),
        (
            {"data": {"filters": {"max_ratio": 3, "copied": True}}},
            r"data.filters was null when this run began and is \{max_ratio: 3.0, copied: true\} now",
        ),
    ):
        with pytest.raises(UsageError, match=message):
            fit_on_cpu(make_config(**keys))
