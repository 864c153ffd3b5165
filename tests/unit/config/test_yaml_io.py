"""YAML 1.2 without surprises, and sections that are read back as they were written."""

import os
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrain.config.load import load_config, validate
from mtrain.config.schema import Config
from mtrain.config.yaml_io import YamlError, parse_yaml, to_yaml
from mtrain.errors import UsageError
from tests.support.configs import MINIMAL

ODD = ["1e3", "no", "~", "null", "true", "010", "0x1F", "1_000", "12:30", "", " a ", "a: b", "# c", "- d",
       "=", "<<", "!t", "&a", "*a", "'", '"', "\\", "{", "\t", "\x85", "\u2028", "\ufeff", "é", "日本", "😀",
       "a\nb", "a\r\nb", "2026-01-01", ".inf", "%x", "@", "`", "?", "---", "..."]  # fmt: skip
strings = st.sampled_from(ODD) | st.text(st.characters(codec="utf-8"), max_size=20)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5e-4", 0.0005),
        ("1e3", 1000.0),
        (".5", 0.5),
        ("no", "no"),
        ("on", "on"),
        ("y", "y"),
        ("true", True),
        ("010", 10),
        ("-7", -7),
        ("12:30", "12:30"),
        ("1_000", "1_000"),
        ("2026-01-01", "2026-01-01"),
        ("~", None),
        ("", None),
        ("'5'", "5"),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text: str, value: object):
    parsed = parse_yaml(f"key: {text}")["key"]
    assert parsed == value
    assert type(parsed) is type(value)


def test_a_text_that_is_parsed_again_has_new_values():
    text = "a: &x [1, {b: 2}]\nc: *x"
    first = parse_yaml(text)
    first["a"][1]["b"] = 3
    first["a"].append(4)
    assert parse_yaml(text) == {"a": [1, {"b": 2}], "c": [1, {"b": 2}]}
    for _ in range(2):
        with pytest.raises(YamlError):
            parse_yaml("a: {!!merge <<: {b: 1}, c: 2}")


def test_norwegian_is_a_language(load_text):
    assert load_text(text=MINIMAL.replace("source_lang: en", "source_lang: no")).data.source_lang == "no"


@pytest.mark.parametrize("where", ["file", "--set"])
@pytest.mark.parametrize(
    "value",
    [
        "{a: 1, a: 2}",
        "{[a]: 1}",
        "[1, 2",
        "!!python/object/apply:os.system [ls]",
        "!foo 1",
        "!!int abc",
        "!!float abc",
        "!!bool maybe",
        "!!timestamp yesterday",
        "!!binary aGk=",
        "1" * 5000,
        "[" * 1500,
        "*unknown",
        "\x07",
    ],
    ids=lambda value: ascii(value[:12]),
)
def test_bad_yaml_is_a_usage_error(load_text, where: str, value: str):
    text = MINIMAL + f"seed: {value}\n" if where == "file" else MINIMAL
    with pytest.raises(UsageError, match=r"c\.yaml:\d|--set.*seed") as caught:
        load_text(*[f"seed={value}"] * (where == "--set"), text=text)
    assert "\n" not in str(caught.value)


def test_a_repeated_section_is_rejected(rejection):
    assert "'training' is given twice" in rejection(text=MINIMAL + "training: {max_steps: 20}\n")


def test_a_missing_file_and_a_file_that_is_not_text(tmp_path: Path):
    with pytest.raises(UsageError, match="no such config"):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(UsageError, match="cannot read"):
        load_config(tmp_path)
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    with pytest.raises(UsageError, match=r"loop\.yaml: cannot read the config: Too many levels"):
        load_config(tmp_path / "loop.yaml")
    (tmp_path / "latin.yaml").write_bytes(MINIMAL.encode() + b"# caf\xe9\n")
    with pytest.raises(UsageError, match="yaml:5: not valid UTF-8"):
        load_config(tmp_path / "latin.yaml")


def test_a_named_pipe_is_refused_without_waiting_for_a_writer(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="pipe: a named pipe; give a regular file"):
        load_config(tmp_path / "pipe")


def test_a_pipe_without_a_name_is_read():
    """As in `mtrain fit <(command)`."""
    reader, writer = os.pipe()
    os.write(writer, MINIMAL.encode())
    os.close(writer)
    try:
        assert load_config(f"/dev/fd/{reader}").run_dir == "runs/x"
    finally:
        os.close(reader)


def test_a_byte_order_mark_and_crlf_are_harmless(load_text):
    assert load_text(text="\ufeff" + MINIMAL.replace("\n", "\r\n")) == load_text()


@settings(deadline=None, max_examples=25)
@given(
    run_dir=strings.filter(bool), names=st.lists(strings, max_size=3), path=strings, rate=st.floats(1e-9, 10)
)
def test_the_resolved_config_reads_back_equal(run_dir: str, names: list[str], path: str, rate: float):
    raw = parse_yaml(MINIMAL)
    raw["run_dir"] = run_dir
    raw["data"]["test"] = {name: {"source": path, "target": name} for name in names}
    raw["tokenizer"] = {"path": path, "symbols": list({s for s in names if s.split() == [s]})}
    raw["training"]["learning_rate"] = rate
    config = validate(Config, raw, "test")
    text = to_yaml(config)
    assert validate(Config, parse_yaml(text), "resolved") == config
    assert yaml.safe_load(text) == config.model_dump(mode="json")  # any other YAML reader agrees


@pytest.mark.parametrize("run_dir", ["runs/日本", "runs/😀"])
def test_characters_are_written_as_they_are(load_text, run_dir: str):
    assert f"\nrun_dir: {run_dir}\n" in "\n" + to_yaml(load_text(f"run_dir={run_dir}"))


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ("training max_steps: 3\nseed: x: y\n", 6, "mapping values are not allowed here, in: seed: x: y"),
        ("\tseed: 1\n", 5, "cannot start any token, in: seed: 1"),
        ("decoding:\n  beam_size: !!int five\n", 6, "not a valid int: five"),
        ("seed: *other\n", 5, "undefined alias 'other'"),
        ("# a comment\nseed: \x07\n", 6, r"character U\+0007 is not allowed"),
        ('tokenizer: {symbols: ["\\ud83d"]}\n', 5, r"not a valid str: \ud83d"),
        ("seed: 1 # a\u2028\nseed: 2\n", 6, "'seed' is given twice, in: seed: 2"),
        ("seed: 1\nseed: 2\n", 6, "'seed' is given twice, in: seed: 2"),
    ],
)
def test_invalid_yaml_is_quoted_with_its_file_and_line(load_text, text: str, line: int, problem: str):
    with pytest.raises(UsageError, match=rf"c\.yaml:{line}: not valid YAML: .*{problem}"):
        load_text(text=MINIMAL + text)
