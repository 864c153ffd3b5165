"""Faults of malicious files: YAML bombs, pipes, devices, huge files, escape sequences."""

import hashlib
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import yaml

from mtrain.checkpoint.model_folder import load_model
from mtrain.checkpoint.model_info import RUN_HEADER
from mtrain.config.yaml_io import MAX_DEPTH, MAX_NODES, YamlError, parse_yaml
from mtrain.errors import ModelError
from mtrain.regular_files import MAX_LINE_BYTES
from mtrain.storage.locks import try_lock
from mtrain.storage.manifest import verify_folder
from mtrain.training.setup.run_folder import locked_run_folder
from tests.support.cli import changed, one_line, run_at_terminal, run_forked
from tests.support.training import last_checkpoint

LEVELS = range(1, 10)
LISTS = "a0: &a0 [1]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in LEVELS)
MAPPINGS = "a0: &a0 {}\n" + "".join(
    f"a{i}: &a{i} {{{', '.join(f'k{j}: *a{i - 1}' for j in range(9))}}}\n" for i in LEVELS
)
TOO_MANY = f"more than {MAX_NODES:,} values, with repetitions by aliases"


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        (LISTS, 6, TOO_MANY),
        (MAPPINGS, 6, TOO_MANY),
        ("a: 1\nb: &b [*b]", 2, "a value contains itself"),
        ("a: &a {b: {c: *a}}", 1, "a value contains itself"),
        ("a: " + "[" * 10_000, 1, "nested too deeply"),
        ("- " * 10_000, 1, "nested too deeply"),
        ("a: !!binary aGVsbG8=", 1, "the tag !!binary is not supported"),
        ("a: !!set {b, c}", 1, "the tag !!set is not supported"),
        ("a: !!omap [b: 1]", 1, "the tag !!omap is not supported"),
        ("a: !!timestamp 2001-12-14", 1, "the tag !!timestamp is not supported"),
        ("a: &a {b: 1}\nc: {!!merge <<: [*a, *a]}", 2, "the tag !!merge is not supported"),
        ("a: !!python/name:os.system", 1, "the tag !!python/name:os.system is not supported"),
        ("a: !!map text", 1, "the tag !!map is not supported"),
        ("a: !!int [1]", 1, "the tag !!int is not supported"),
        ('a: 1\nb: "\\UFFFFFFFF"', 2, "an escape sequence is not a Unicode character"),
        ('a: "\\U00110000"', 1, "an escape sequence is not a Unicode character"),
        (f"a: {'1' * 5000}", 1, "not a valid int: 1111"),
    ],
    ids=range(17),
)
def test_40_yaml_that_no_config_needs_is_rejected_with_its_line(text, line, problem):
    with pytest.raises(YamlError, match=f"^{re.escape(problem)}") as caught:
        parse_yaml(text)
    assert caught.value.line == line and "\n" not in str(caught.value)


def test_40_aliases_and_the_depth_of_real_configs_are_accepted():
    assert parse_yaml("a: &a {b: [1]}\nc: [*a, *a]") == {"a": {"b": [1]}, "c": [{"b": [1]}] * 2}
    assert parse_yaml("a: " + "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1))
    assert parse_yaml("a: !!str 5\nb: 2001-12-14") == {"a": "5", "b": "2001-12-14"}


def test_40_bombs_are_found_wherever_yaml_is_read(mtrain, config_file, run_copy, model_copy, tmp_path):
    bomb = tmp_path / "bomb.yaml"
    bomb.write_text(f"data:\n  test:\n{re.sub('(?m)^', '    ', MAPPINGS)}")
    child = tmp_path / "child.yaml"
    child.write_text("extends: bomb.yaml\n" + bomb.read_text())
    for file in (run_copy / "config.yaml", model_copy / "config.yaml"):
        file.write_text(MAPPINGS + file.read_text())
    (model_copy / "README.md").write_text(f"---\n{LISTS}---\n")
    for expected, command in (
        (2, ["check", bomb]),
        (2, ["check", child]),
        (2, ["check", config_file, "--set", f"data.test={MAPPINGS}"]),
        (2, ["fit", run_copy / "config.yaml"]),
        (4, ["report", run_copy, "-o", tmp_path / "report.html"]),
        (4, ["info", model_copy]),
    ):
        code, _, err = mtrain(*command)
        assert code == expected and f"not valid YAML: {TOO_MANY}" in one_line(err), command
    code, out, _ = mtrain("info", run_copy)
    assert code == 0 and f"config.yaml:6: not valid YAML: {TOO_MANY}" in out


def replace_with(kind: str, file: Path) -> None:
    """Put something else in place of a file."""
    file.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(file)  # reading from it would block forever
    elif kind == "device":
        file.symlink_to("/dev/zero")  # reading it would never end
    elif kind == "folder":
        file.mkdir()
    else:
        file.touch()
        os.truncate(file, 30 * 2**30)  # takes no space


KINDS = ["pipe", "device", "folder", "huge"]
RECORDS = (
    *("samples.jsonl", "best_validation.json", "test_scores.json", "origin.json", "checkpoints/index.json"),
    *("data/check.json", "data/summary.json", "data/validation.jsonl", "choices.json"),
)


@pytest.mark.parametrize("kind", KINDS)
def test_41_42_info_and_report_leave_out_what_they_cannot_read(mtrain, run_copy, tmp_path, kind):
    for name in (*RECORDS, last_checkpoint(run_copy) / "state.json"):
        replace_with(kind, run_copy / name)
    code, _, err = mtrain("report", run_copy, "-o", tmp_path / "report.html")
    assert code == 0 and f"{run_copy}/samples.jsonl: cannot be read: " in err
    replace_with(kind, run_copy / "metrics.jsonl")
    code, out, err = mtrain("info", run_copy)
    problem = "not a regular file" if kind != "huge" else f"a line has more than {MAX_LINE_BYTES:,} bytes"
    assert code == 0 and "Training" in out and f"metrics.jsonl: cannot be read: {problem}" in err
    replace_with(kind, run_copy / "config.yaml")
    code, _, err = mtrain("report", run_copy, "-o", tmp_path / "report.html")
    assert code == 4 and f"{run_copy}/config.yaml: " in one_line(err)


@pytest.mark.parametrize("kind", ["pipe", "huge"])
def test_41_42_fit_goes_on_without_samples_but_not_without_metrics_that_it_cannot_read(
    mtrain, run_copy, run_dir, kind
):
    for name in RECORDS[:3]:
        replace_with(kind, run_copy / name)
    command = "fit", run_dir / "config.yaml", "--run-dir", run_copy, "--device", "cpu", "--set"
    code, _, err = mtrain(*command, "training.max_steps=201")
    problem = "not a regular file" if kind == "pipe" else f"a line has more than {MAX_LINE_BYTES:,} bytes"
    assert code == 0, err
    assert f"warning: {run_copy}/samples.jsonl: cannot be read: {problem}; lines after step 200 are" in err
    assert f"{problem}; the report will lack the translations of step 201" in err
    replace_with(kind, run_copy / "metrics.jsonl")
    code, _, err = mtrain(*command, "training.max_steps=202", "--quiet")
    assert (
        code == 6
        and f"{run_copy}/metrics.jsonl: cannot be read: {problem}; restore the file, or move" in one_line(err)
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name",
    ["config.yaml", "manifest.json", "model.safetensors", "tokenizer/joint.model", "info.json", "README.md"],
)
def test_41_42_a_file_of_a_model_that_cannot_be_read_is_named(mtrain, model_copy, monkeypatch, name, kind):
    monkeypatch.setattr("time.sleep", lambda _: None)  # before a model folder is read again
    replace_with(kind, model_copy / name)
    code, out, err = mtrain("info", model_copy)
    if name in ("info.json", "README.md"):
        assert code == 0 and f"{model_copy}/{name}: " in out
    else:
        assert code == 4 and err.count("\n") == 1 and name in err
        with pytest.raises(ModelError, match=name):
            load_model(model_copy)


def test_42_a_size_that_differs_from_the_manifest_is_noticed_before_hashing(model_copy, monkeypatch):
    hashed, file_digest = [], hashlib.file_digest

    def recorded(stream, name):
        hashed.append(Path(stream.name).name)
        return file_digest(stream, name)

    monkeypatch.setattr(hashlib, "file_digest", recorded)
    os.truncate(model_copy / "model.safetensors", 1 + (model_copy / "model.safetensors").stat().st_size)
    with pytest.raises(ModelError, match=r"model\.safetensors: damaged"):
        verify_folder(model_copy, [])
    assert hashed == ["config.yaml"]


@pytest.mark.parametrize("name", ["config.yaml", "tokenizer/joint.model"])
def test_42_a_huge_file_is_refused_even_if_the_manifest_lists_its_size(model_copy, name):
    entries = json.loads((model_copy / "manifest.json").read_text())
    os.truncate(model_copy / name, 30 * 2**30)
    entries[name]["size"] = 30 * 2**30
    (model_copy / "manifest.json").write_text(json.dumps(entries, indent=1, sort_keys=True) + "\n")
    with pytest.raises(ModelError, match=rf"{name}: cannot be read: too large: 32,212,254,720 bytes"):
        load_model(model_copy)


def test_41_a_lock_that_is_a_pipe_is_an_error_and_links_are_not_followed(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        try_lock(tmp_path / "pipe")
    (tmp_path / "mine").write_text("mine")
    (tmp_path / ".lock-owner").symlink_to("mine")
    with locked_run_folder(tmp_path):
        assert (tmp_path / ".lock-owner").read_text().startswith("process ")
    assert (tmp_path / "mine").read_text() == "mine"


EVIL = "\x1b]0;title\x07\x1b[31m\x1b[1m\x1b[0m\x9b2J\u202e\u2066\x7f"
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@pytest.fixture
def evil_run(run_dir, tmp_path) -> Path:
    """A run whose folder, test set, card and scores have control characters in their names."""
    run = Path(shutil.copytree(run_dir, tmp_path / f"run{EVIL}"))
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["data"]["test"] = {EVIL: config["data"]["test"]["seen"]}
    (run / "config.yaml").write_text(RUN_HEADER + yaml.safe_dump(config | {"run_dir": str(run)}))
    (run / "model/README.md").write_text(f'---\nlicense: "{EVIL[-2]}"\n---\n')
    info = json.loads((run / "model/info.json").read_text())
    (run / "model/info.json").write_text(json.dumps(info | {"name": EVIL}))
    return run


@pytest.mark.parametrize(
    "command",
    [
        "evaluate RUN --device cpu",
        "segment RUN --join TEXT",
        "score RUN --tsv FILE --device cpu",
        "clean CONFIG -o /dev/stdout",
        "info RUN",
        "info RUN --card",
        "report RUN -o RUN/report.html",
        "translate RUN-none TEXT --debug",
        "check CONFIG --set TEXT=1",
    ],
)
def test_43_a_terminal_gets_no_control_characters(evil_run, config_file, tmp_path, command):
    (tmp_path / "tsv").write_text(f"a {EVIL}.\tb\n", encoding="utf-8")
    config = changed(config_file, "data", train={"tsv": str(tmp_path / "tsv")}, filters={"max_ratio": 100})
    given = {"RUN": str(evil_run), "TEXT": f"a {EVIL}", "FILE": str(tmp_path / "tsv"), "CONFIG": str(config)}
    words = [re.sub("|".join(given), lambda name: given[name[0]], word) for word in command.split()]
    _, shown = run_at_terminal(*words)
    shown = shown.replace("\r\n", "\n").replace("\r\x1b[J", "")  # the ends of lines, and of progress bars
    assert not CONTROLS.search(shown), shown
    assert r"\u202e" in re.sub(r"\s", "", shown)  # without the breaks between wrapped lines


def test_43_text_reaches_pipes_and_files_as_it_is(run_dir, tmp_path):
    assert run_forked("segment", run_dir, "--join", f"a {EVIL}") == (0, f"a{EVIL}\n", "")
    (tmp_path / "text").write_text(f"a {EVIL}\n", encoding="utf-8")
    code, *_ = run_forked("segment", run_dir, "--join", "-i", tmp_path / "text", "-o", tmp_path / "out")
    assert code == 0 and (tmp_path / "out").read_text(encoding="utf-8") == f"a{EVIL}\n"


def test_43_names_reach_pipes_as_they_are(evil_run, config_file, tmp_path):
    tsv = tmp_path / f"tsv{EVIL}.tsv"
    tsv.write_text("a b.\tc d.\n" * 9)
    config = changed(config_file, "data", train=[{"tsv": str(tsv)}, {"tsv": str(tsv)}])
    for arguments in (["check", config], ["info", evil_run]):
        code, shown, err = run_forked(*arguments)
        assert code == 0 and EVIL in shown, err


def test_43_text_that_is_written_from_right_to_left_stays_readable(run_dir):
    code, shown = run_at_terminal("segment", run_dir, "--join", "\u05e9\u05dc\u05d5\u05dd\u200f\tab")
    assert (code, shown) == (0, "\u05e9\u05dc\u05d5\u05dd\u200f\tab\r\n")


@pytest.mark.parametrize("value", ["1" * 400, "1" * 5000, "-1", "1e308", "nan"])
@pytest.mark.parametrize(
    "command",
    [
        "prepare c.yaml --workers",
        "clean c.yaml -o out --workers",
        "plan c.yaml --devices",
        "plan c.yaml --price",
        "init a b --max-minutes",
        "translate model text --n-best",
        "translate model text --workers",
    ],
)
def test_23_numbers_of_options_have_a_range(mtrain, command, value):
    code, _, err = mtrain(*command.split(), value)
    assert code == 2 and command.split()[-1] in one_line(err)
