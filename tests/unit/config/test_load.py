"""Loading configs: files, the configs that they extend, `--set` overrides, and where errors come from."""

import os
import re
from pathlib import Path

import pytest

from mtrain.config.load import load_config, validate
from mtrain.config.schema import Config
from mtrain.config.sections.corpora import Holdout, TextCorpus, ToyCorpus, TsvCorpus
from mtrain.config.yaml_io import parse_yaml, to_yaml
from mtrain.errors import UsageError
from tests.support.configs import MINIMAL
from tests.support.paths import ROOT

CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_config_of_the_project_loads(path: Path):
    config = load_config(path)
    assert validate(Config, parse_yaml(to_yaml(config)), "resolved") == config


def test_configs_of_all_folders_are_loaded():
    names = {str(path.relative_to(ROOT / "configs").with_suffix("")) for path in CONFIGS}
    assert {"multi30k-en-de", "toy-en-fr", "multi30k/en-de-teacher"} <= names


@pytest.mark.parametrize("text", ["", "5", "[1, 2]", "just words"])
def test_a_config_is_a_mapping(rejection, text: str):
    assert "sections" in rejection(text=text)


# ----------------------------------------------------------------------------------------------- --set


def test_overrides_are_merged_before_validation(load_text):
    broken = MINIMAL.replace("max_steps: 10", "max_steps: 0")
    assert load_text("training.max_steps=7", text=broken).training.max_steps == 7
    # Each alone would be rejected: two vocabularies with tied embeddings.
    config = load_text("tokenizer.joint=false", "model.tie_embeddings=decoder")
    assert (config.tokenizer.joint, config.model.tie_embeddings) == (False, "decoder")


def test_the_last_override_wins(load_text):
    assert load_text("seed=2", "seed=3").seed == 3


def test_override_creates_missing_sections(load_text):
    assert load_text("decoding.beam_size=2").decoding.beam_size == 2
    assert load_text("data.test.mine.toy=test").data.test["mine"].toy == "test"
    assert load_text("model.dropout=0.5", text=MINIMAL + "model:\n").model.dropout == 0.5


def test_override_values_are_yaml(load_text):
    assert load_text("training.betas=[0.8, 0.9]").training.betas == (0.8, 0.9)
    assert load_text("training.learning_rate=5e-4").training.learning_rate == 0.0005
    assert load_text("training.patience=null").training.patience is None
    assert load_text("run_dir=a=b").run_dir == "a=b"


@pytest.mark.parametrize("value", ["auto", "on", "off", "null", "[3]"])
@pytest.mark.parametrize("key", ["training.compile", "model.initialization"])
def test_a_key_that_was_removed_has_no_effect(load_text, key: str, value: str):
    assert load_text("model.dropout=0.2", f"{key}={value}") == load_text("model.dropout=0.2")


def test_list_items_are_addressed_by_index(load_text):
    text = MINIMAL.replace("train: {toy: train}", "train: [{toy: train}, {toy: test}]")
    config = load_text("data.train.1.weight=3", "data.train.0={toy: validation}", text=text)
    assert [(corpus.toy, corpus.weight) for corpus in config.data.train] == [("validation", 1), ("test", 3)]


@pytest.mark.parametrize("index", ["2", "-1", "first", "0x0", pytest.param("9" * 5000, id="long")])
def test_an_index_outside_the_list_is_rejected(rejection, index: str):
    text = MINIMAL.replace("train: {toy: train}", "train: [{toy: train}, {toy: test}]")
    message = rejection(f"data.train.{index}.weight=3", text=text)
    assert "data.train is a list of 2" in message


def test_field_names_may_be_dotted(load_text):
    config = load_text(
        "data.train={jsonl: f, source_field: translation.en, target_field: translation.fr}",
        "data.train.source_field=other.en",
    )
    assert (config.data.train[0].source_field, config.data.train[0].target_field) == (
        "other.en",
        "translation.fr",
    )


@pytest.mark.parametrize(
    "given",
    [
        "{toy: validation, weight: 2}",
        "{source: a.en, target: a.fr}",
        "{tsv: a.tsv, source_column: 3, target_column: 2}",
        "[{toy: validation}, {tsv: a.tsv}]",
    ],
)
def test_a_holdout_replaces_the_validation_corpora_of_the_file(load_text, given: str):
    text = MINIMAL.replace("validation: {toy: validation}", f"validation: {given}")
    assert load_text("data.validation.holdout=500", text=text).data.validation == Holdout(holdout=500)


def test_a_key_of_another_kind_of_corpus_replaces_the_corpus(load_text):
    text = MINIMAL.replace("train: {toy: train}", "train: {source: a.en, target: a.fr, weight: 3}")
    text = text.replace(
        "validation: {toy: validation}", "test: {mine: {toy: test}}, validation: {holdout: 5}"
    )
    config = load_text(
        "data.train.tsv=a", "data.train.weight=2", "data.validation.tsv=b", "data.test.mine.tsv=c", text=text
    )
    [train], [validation], test = config.data.train, config.data.validation, config.data.test["mine"]
    assert train == TsvCorpus(tsv="a", weight=2)
    assert (validation, test) == (TsvCorpus(tsv="b"), TsvCorpus(tsv="c"))
    text = MINIMAL.replace("train: {toy: train}", "train: [{toy: train}, {toy: test}]")
    assert load_text("data.train.1.tsv=a", text=text).data.train == [
        ToyCorpus(toy="train"),
        TsvCorpus(tsv="a"),
    ]


def test_a_key_of_the_same_kind_of_corpus_is_merged(load_text):
    text = MINIMAL.replace("train: {toy: train}", "train: {source: a.en, target: a.fr, weight: 3}")
    [corpus] = load_text("data.train.source=b.en", text=text).data.train
    assert corpus == TextCorpus(source="b.en", target="a.fr", weight=3)


@pytest.mark.parametrize(
    "assignment",
    ["seed", "=3", ".seed=3", "training..max_steps=3", "run_dir.x=3", "training.max_steps.y.z=1"],
)
def test_a_malformed_override_is_quoted(load_text, assignment: str):
    with pytest.raises(UsageError, match=re.escape(f"--set {assignment}: ")):
        load_text(assignment)


def test_override_of_one_alias_leaves_the_other(load_text):
    text = MINIMAL.replace("train: {toy: train}", "train: &toy {toy: train}")
    text = text.replace("validation: {toy: validation}", "validation: *toy")
    config = load_text("data.validation.toy=test", text=text)
    assert (config.data.train[0].toy, config.data.validation[0].toy) == ("train", "test")


# --------------------------------------------------------------------------------------------- extends


@pytest.fixture
def write(tmp_path: Path):
    """Write config files: `write(base="...", child="...")`; returns the path of the last one."""

    def write(**texts: str) -> Path:
        for name, text in texts.items():
            (tmp_path / f"{name}.yaml").write_text(text, encoding="utf-8")
        return tmp_path / f"{name}.yaml"

    return write


def test_a_config_takes_what_it_does_not_give_from_the_one_it_extends(write):
    base = MINIMAL + "model: {preset: small, dropout: 0.3}\n"
    config = load_config(write(base=base, child="extends: base.yaml\nmodel: {dropout: 0.2, heads: 8}\n"))
    assert (config.model.dropout, config.model.heads, config.model.d_model) == (0.2, 8, 256)
    assert config.training.max_steps == 10 and config.run_dir == "runs/x"


def test_values_that_are_not_mappings_replace(write):
    base = MINIMAL.replace("train: {toy: train}", "train: [{toy: train}, {toy: test}]")
    base = base.replace("max_steps: 10", "max_steps: 10, patience: 5, betas: [0.8, 0.9]")
    child = "extends: base.yaml\ndata: {train: [{tsv: a}]}\ntraining: {patience: null, betas: [0.7, 0.7]}\n"
    config = load_config(write(base=base, child=child))
    assert [corpus.tsv for corpus in config.data.train] == ["a"]
    assert (config.training.patience, config.training.betas) == (None, (0.7, 0.7))
    single = write(base=MINIMAL, child="extends: base.yaml\ndata: {train: [{tsv: a}]}\n")
    assert load_config(single).data.train[0].tsv == "a"


@pytest.mark.parametrize(
    "child", ["{tsv: mine.tsv}", "{jsonl: f, source_field: s, target_field: t}", "{toy: test}"]
)
def test_a_corpus_of_another_kind_replaces_the_one_below(write, child: str):
    base = MINIMAL.replace("train: {toy: train}", "train: {source: a.en, target: a.fr, weight: 3}")
    base = base.replace("validation: {toy", "test: {mine: {tsv: a}, other: {toy: test}}, validation: {toy")
    data = f"extends: base.yaml\ndata:\n  train: {child}\n  test: {{mine: {child}}}\n"
    config = load_config(write(base=base, child=data))
    expected = parse_yaml(child)
    for corpus in (config.data.train[0], config.data.test["mine"]):
        assert corpus.model_dump(exclude_defaults=True) == expected
    assert config.data.test["other"].toy == "test"


def test_a_holdout_replaces_a_validation_corpus_and_the_reverse(write):
    child = write(base=MINIMAL, child="extends: base.yaml\ndata: {validation: {holdout: 500}}\n")
    assert load_config(child).data.validation.holdout == 500
    grandchild = write(grandchild="extends: child.yaml\ndata: {validation: {tsv: a}}\n")
    assert load_config(grandchild).data.validation[0].tsv == "a"


def test_a_corpus_of_the_same_kind_is_merged(write):
    base = MINIMAL.replace("train: {toy: train}", "train: {tsv: a, source_column: 2, weight: 3}")
    config = load_config(write(base=base, child="extends: base.yaml\ndata: {train: {tsv: b, weight: 2}}\n"))
    corpus = config.data.train[0]
    assert (corpus.tsv, corpus.source_column, corpus.weight) == ("b", 2, 2)


def test_names_of_test_sets_are_not_kinds_of_corpora(write):
    base = MINIMAL.replace("validation:", "test: {toy: {toy: test}}, validation:")
    config = load_config(write(base=base, child="extends: base.yaml\ndata: {test: {tsv: {tsv: a}}}\n"))
    assert {name: type(corpus).__name__ for name, corpus in config.data.test.items()} == {
        "toy": "ToyCorpus",
        "tsv": "TsvCorpus",
    }


def test_extended_configs_form_chains_across_folders(write, tmp_path: Path):
    write(base=MINIMAL, middle="extends: base.yaml\nseed: 2\ntraining: {max_steps: 20}\n")
    (tmp_path / "deep" / "er").mkdir(parents=True)
    child = tmp_path / "deep" / "er" / "child.yaml"
    child.write_text("extends: ../../middle.yaml\ntraining: {warmup_steps: 3}\n")
    config = load_config(child)
    assert (config.seed, config.training.max_steps, config.training.warmup_steps) == (2, 20, 3)
    child.write_text(f"extends: {tmp_path / 'base.yaml'}\n")
    assert load_config(child).seed == 1


def test_overrides_and_validation_come_after_merging(write):
    """The base alone is incomplete, and the child alone breaks a rule."""
    base = MINIMAL.replace("training: {max_steps: 10}", "tokenizer: {joint: false}")
    child = write(base=base, child="extends: base.yaml\nmodel: {tie_embeddings: none}\n")
    config = load_config(child, ["training.max_steps=7", "model.tie_embeddings=decoder"])
    assert (config.training.max_steps, config.model.tie_embeddings) == (7, "decoder")


def test_the_resolved_config_does_not_extend(write):
    config = load_config(write(base=MINIMAL, child="extends: base.yaml\nseed: 3\n"))
    text = to_yaml(config)
    assert "extends" not in text and validate(Config, parse_yaml(text), "resolved") == config


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (
            {"a": "seed: 1\nextends: a.yaml\n"},
            r"a\.yaml:2: extends: .*a\.yaml: a config cannot extend itself",
        ),
        (
            {"b": "extends: a.yaml\n", "a": "extends: b.yaml\n"},
            r"b\.yaml:1: extends: .*a\.yaml: circular extends: it extends .*b\.yaml",
        ),
        ({"a": "\nextends: none.yaml\n"}, r"a\.yaml:2: extends: .*none\.yaml: no such config file"),
        ({"a": "extends: 5\n"}, r"a\.yaml:1: extends: expected the path of another config"),
        ({"a": "extends:\n"}, r"a\.yaml:1: extends: expected the path of another config"),
        ({"b": "seed: [1\n", "a": "extends: b.yaml\n"}, r"b\.yaml:2: not valid YAML"),
        ({"b": "", "a": "extends: b.yaml\n"}, r"b\.yaml: expected sections such as [^;]*$"),
        ({"a": "I like oranges.\nShe eats pears.\n"}, r"a\.yaml: expected sections .*; `mtrain init` writes"),
    ],
)
def test_a_file_that_cannot_be_a_config_is_named_with_its_line(write, texts: dict[str, str], message: str):
    with pytest.raises(UsageError, match=message) as caught:
        load_config(write(**texts))
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("base", "problem"),
    [
        (".", r"cannot read the config: Is a directory"),
        ("pipe", "a named pipe; give a regular file"),
        ("loop.yaml", "cannot read the config: Too many levels of symbolic links"),
        ("a.yaml/b.yaml", "no such config file"),
        ("x" * 300, "cannot read the config: File name too long"),
        (r'"a\0b"', "not a valid path"),
        ("/dev/zero", "too large for a config"),
        ("/dev/null", "expected sections"),
    ],
    ids=["folder", "pipe", "loop", "below a file", "long", "NUL", "endless", "empty"],
)
def test_what_is_not_a_file_cannot_be_extended(write, tmp_path: Path, base: str, problem: str):
    os.mkfifo(tmp_path / "pipe")  # reading from it would block forever
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    with pytest.raises(UsageError, match=rf"^{tmp_path}/a\.yaml:2: extends: .*: {problem}") as caught:
        load_config(write(a=f"seed: 1\nextends: {base}\n"))
    assert "\n" not in str(caught.value)


def test_extends_cannot_be_set(load_text):
    with pytest.raises(UsageError, match=r"--set extends=b\.yaml: extends works in a config file only"):
        load_text("extends=b.yaml")


def test_configs_that_contain_themselves_are_rejected(write):
    """YAML aliases may form loops, which merging must not follow."""
    loop = "data: &loop {inner: *loop}\n"
    with pytest.raises(UsageError, match="a value contains itself"):
        load_config(write(base=loop, child="extends: base.yaml\n" + loop))
    with pytest.raises(UsageError, match=r"base\.yaml:1: not valid YAML: a value contains itself"):
        load_config(write(base=loop))


# --------------------------------------------------------------------------- where an error comes from

BASE = """
run_dir: runs/x
data:
  source_lang: en
  target_lang: fr
  train: {source: a.en, target: a.fr}
  validation: {toy: validation}
training:
  max_steps: 0
decoding: {beam_size: 0}
"""


@pytest.mark.parametrize(
    ("child", "overrides", "message"),
    [
        ("", [], r"base\.yaml:9: training\.max_steps: "),
        ("training: {max_steps: 5}\n", [], r"base\.yaml:10: decoding\.beam_size: "),
        (
            "training:\n  max_steps: 5\ndecoding:\n  beam_size: -1\n",
            [],
            r"child\.yaml:5: decoding\.beam_size: ",
        ),
        ("training: {max_stps: 5}\n", [], r"child\.yaml:2: training: unknown key 'max_stps'"),
        ("data:\n  train: {weight: 0}\n", [], r"child\.yaml:3: data\.train\.0\.weight: "),
        ("data:\n  train:\n  - {source: a.en}\n", [], r"child\.yaml:4: data\.train\.0\.target: .* required"),
        (
            "data:\n  train:\n    jsonl: f\n",  # replaces the corpus of the base
            [],
            r"child\.yaml:3: data\.train\.0\.source_field: .* required",
        ),
        ("training: 5\n", [], r"child\.yaml:2: training: expected keys and values"),
        ("", ["training.max_steps=-1"], r"--set: training\.max_steps: "),
        ("", ["training={max_steps: -1}"], r"--set: training\.max_steps: "),
        ("", ["data.train.weight=0"], r"--set: data\.train\.0\.weight: "),
        ("", ["training.max_steps=5", "decoding={}", "model.heads=3"], r"child\.yaml: model: d_model"),
        (
            "training: {schedule: cosine}\n",
            ["training.max_steps=null", "decoding={}"],
            r"child\.yaml: training\.schedule",  # no single line is at fault
        ),
    ],
)
def test_an_error_names_the_file_and_line_of_the_value(write, child, overrides, message):
    file = write(base=BASE, child="extends: base.yaml\n" + child)
    with pytest.raises(UsageError, match=message):
        load_config(file, overrides)
