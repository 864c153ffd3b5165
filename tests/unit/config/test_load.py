"""The config: strict about keys and ranges, YAML without surprises, and a resolved form that reads back."""

from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

import mtrain.config.schema
from mtrain.config.load import load_config, parse_yaml, to_yaml, validate
from mtrain.config.schema import PRESETS, Config, Holdout, Preset, Section
from mtrain.errors import UsageError
from tests.support.paths import ROOT

MINIMAL = """
run_dir: runs/x
data: {source_lang: en, target_lang: fr, train: {toy: train}, validation: {toy: validation}}
training: {max_steps: 10}
"""
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
SECTIONS = [
    value
    for value in vars(mtrain.config.schema).values()
    if isinstance(value, type) and issubclass(value, Section)
]


@pytest.fixture
def load(tmp_path: Path):
    def load(*overrides: str, text: str = MINIMAL) -> Config:
        file = tmp_path / "c.yaml"
        file.write_text(text, encoding="utf-8", newline="")
        return load_config(file, overrides)

    return load


@pytest.fixture
def refused(load):
    """Load what must be refused, and return the message: one line, without the path of the config."""

    def refused(*overrides: str, text: str = MINIMAL) -> str:
        with pytest.raises(UsageError) as caught:
            load(*overrides, text=text)
        assert caught.value.exit_code == 2
        message = str(caught.value)
        assert "\n" not in message
        return message.split("c.yaml: ", 1)[-1]

    return refused


# ---------------------------------------------------------------------------------------------- the files


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_of_the_project_loads(path: Path):
    config = load_config(path)
    assert config.model.preset is None
    assert validate(Config, parse_yaml(to_yaml(config)), "resolved") == config


def test_there_are_configs():
    assert {"multi30k-en-de", "toy-en-fr"} <= {path.stem for path in CONFIGS}


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_every_field_has_a_description(section: type[Section]):
    missing = [name for name, field in section.model_fields.items() if not (field.description or "").strip()]
    assert not missing


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_every_number_has_a_lower_limit(section: type[Section]):
    def numbers(schema: Any):
        if isinstance(schema, dict):
            if schema.get("type") in ("integer", "number"):
                yield schema
            schema = list(schema.values())
        if isinstance(schema, list):
            for part in schema:
                yield from numbers(part)

    for number in numbers(section.model_json_schema()):
        assert "minimum" in number or "exclusiveMinimum" in number, number


# --------------------------------------------------------------------------------------------- strictness


@pytest.mark.parametrize(
    ("assignment", "given_key", "nearest"),
    [
        ("sead=2", "sead", "seed"),
        ("data.max_lenght=3", "max_lenght", "max_length"),
        ("data.train.weigth=2", "weigth", "weight"),
        ("data.validation={holdot: 3}", "holdot", "holdout"),
        ("data.test.a={tsv: f, sourcecolumn: 1}", "sourcecolumn", "source_column"),
        ("tokenizer.vocabsize=3", "vocabsize", "vocab_size"),
        ("model.drop_out=0.1", "drop_out", "dropout"),
        ("training.lerning_rate=0.1", "lerning_rate", "learning_rate"),
        ("decoding.beamsize=3", "beamsize", "beam_size"),
    ],
)
def test_a_misspelt_key_names_the_nearest(refused, assignment: str, given_key: str, nearest: str):
    message = refused(assignment)
    assert f"'{given_key}'" in message
    assert f"'{nearest}'" in message


def test_a_key_like_no_other_lists_those_there_are(refused):
    message = refused("decoding.zzzzzz=1")
    assert "decoding" in message
    assert "beam_size" in message


def test_a_misspelt_corpus_key_under_validation_names_the_kinds_of_corpus(refused):
    assert "source" in refused("data.validation={sorce: a.en, target: a.fr}").replace("'sorce'", "")


def test_a_known_key_in_the_wrong_section_is_refused(refused):
    assert "beam_size" in refused("model.beam_size=3")


@pytest.mark.parametrize("key", ["run_dir", "data", "training"])
def test_a_missing_section_is_named(refused, key: str):
    rest = {k: v for k, v in parse_yaml(MINIMAL).items() if k != key}
    assert refused(text=yaml.safe_dump(rest)).startswith(f"{key}: this key is required")


@pytest.mark.parametrize(
    ("assignment", "key", "limit"),
    [
        ("seed=-1", "seed", "0"),
        ("seed=9223372036854775808", "seed", "9223372036854775808"),
        ("run_dir=''", "run_dir", "pattern"),
        ("data.max_length=1", "data.max_length", "2"),
        ("data.max_length=65537", "data.max_length", "65536"),
        ("data.train.weight=0", "data.train.0.weight", "0"),
        ("data.validation={holdout: 0}", "data.validation.holdout", "1"),
        ("tokenizer.vocab_size=7", "tokenizer.vocab_size", "8"),
        ("tokenizer.character_coverage=1.01", "tokenizer.character_coverage", "1"),
        ("tokenizer.type=word", "tokenizer.type", "'bpe'"),
        ("model.dropout=1.0", "model.dropout", "1"),
        ("model.dropout=-0.1", "model.dropout", "0"),
        ("model.heads=0", "model.heads", "1"),
        ("model.preset=tinny", "model.preset", "'tiny'"),
        ("model.preset=[tiny]", "model.preset", "'tiny'"),
        ("training.max_steps=0", "training.max_steps", "1"),
        ("training.learning_rate=0", "training.learning_rate", "0"),
        ("training.learning_rate=11", "training.learning_rate", "10"),
        ("training.learning_rate=.nan", "training.learning_rate", "finite"),
        ("training.betas=[0.9, 1.0]", "training.betas.1", "1"),
        ("training.label_smoothing=1", "training.label_smoothing", "1"),
        ("training.clip_norm=.nan", "training.clip_norm", "0"),
        ("training.micro_batch_tokens=autoo", "training.micro_batch_tokens", "'auto'"),
        ("decoding.beam_size=129", "decoding.beam_size", "128"),
        ("decoding.length_penalty=-10.5", "decoding.length_penalty", "-10"),
    ],
)
def test_out_of_range_names_the_key_and_the_limit(refused, assignment: str, key: str, limit: str):
    problem, _, given_value = refused(assignment).partition("; got")
    assert problem.startswith(f"{key}: ")
    assert limit in problem.removeprefix(key)
    if "[" not in assignment and "{" not in assignment:
        assert given_value.strip()


@pytest.mark.parametrize(
    "assignment",
    [
        "tokenizer.vocab_size='8000'",
        "tokenizer.vocab_size=8000.0",
        "tokenizer.vocab_size=true",
        "tokenizer.joint=1",
        "training.betas=['0.9', 0.98]",
        "run_dir=5",
        "model=null",
        "model=tiny",
        "data.train=file.en",
        "data.train=[]",
        "data.train=[5]",
        "data.train={}",
        "tokenizer.symbols=['<a>', '<a>']",
        "tokenizer.symbols=['a b']",
        "tokenizer.symbols=['']",
    ],
)
def test_types_are_not_guessed(refused, assignment: str):
    assert refused(assignment).startswith(assignment.partition("=")[0].partition(".")[0])


# --------------------------------------------------------------------------------------------------- YAML


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


def test_norwegian_is_a_language(load):
    assert load(text=MINIMAL.replace("source_lang: en", "source_lang: no")).data.source_lang == "no"


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
        "[" * 5000,
        "*unknown",
        "\x07",
    ],
    ids=lambda value: ascii(value[:12]),
)
def test_bad_yaml_is_a_usage_error(refused, where: str, value: str):
    if where == "file":
        refused(text=MINIMAL + f"seed: {value}\n")
    else:
        assert "seed" in refused(f"seed={value}")


def test_a_repeated_section_is_refused(refused):
    assert "'training' is given twice" in refused(text=MINIMAL + "training: {max_steps: 20}\n")


@pytest.mark.parametrize("text", ["", "5", "[1, 2]", "just words"])
def test_a_config_is_a_mapping(refused, text: str):
    assert "sections" in refused(text=text)


def test_a_file_that_is_not_there_or_not_text(tmp_path: Path):
    with pytest.raises(UsageError, match="no such config"):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(UsageError, match="cannot read"):
        load_config(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(MINIMAL.encode() + b"# caf\xe9\n")
    with pytest.raises(UsageError, match="not valid YAML"):
        load_config(tmp_path / "latin.yaml")


def test_a_byte_order_mark_and_crlf_are_harmless(load):
    assert load(text="\ufeff" + MINIMAL.replace("\n", "\r\n")) == load()


# -------------------------------------------------------------------------------------------------- --set


def test_overrides_are_merged_before_validation(load):
    broken = MINIMAL.replace("max_steps: 10", "max_steps: 0")
    assert load("training.max_steps=7", text=broken).training.max_steps == 7
    # Each alone would be refused: two vocabularies with tied embeddings.
    config = load("tokenizer.joint=false", "model.tie_embeddings=decoder")
    assert (config.tokenizer.joint, config.model.tie_embeddings) == (False, "decoder")


def test_the_last_override_wins(load):
    assert load("seed=2", "seed=3").seed == 3


def test_override_creates_missing_sections(load):
    assert load("decoding.beam_size=2").decoding.beam_size == 2
    assert load("data.test.mine.toy=test").data.test["mine"].toy == "test"
    assert load("model.dropout=0.5", text=MINIMAL + "model:\n").model.dropout == 0.5


def test_override_values_are_yaml(load):
    assert load("training.betas=[0.8, 0.9]").training.betas == (0.8, 0.9)
    assert load("training.learning_rate=5e-4").training.learning_rate == 0.0005
    assert load("training.patience=null").training.patience is None
    assert load("run_dir=a=b").run_dir == "a=b"


def test_list_items_go_by_index(load):
    text = MINIMAL.replace("train: {toy: train}", "train: [{toy: train}, {toy: test}]")
    config = load("data.train.1.weight=3", "data.train.0={toy: validation}", text=text)
    assert [(corpus.toy, corpus.weight) for corpus in config.data.train] == [("validation", 1), ("test", 3)]


@pytest.mark.parametrize("index", ["2", "-1", "first", "0x0"])
def test_an_index_outside_the_list_is_refused(refused, index: str):
    text = MINIMAL.replace("train: {toy: train}", "train: [{toy: train}, {toy: test}]")
    message = refused(f"data.train.{index}.weight=3", text=text)
    assert "data.train is a list of 2" in message


def test_field_names_may_be_dotted(load):
    config = load(
        "data.train={jsonl: f, source_field: translation.en, target_field: translation.fr}",
        "data.train.source_field=other.en",
    )
    assert (config.data.train[0].source_field, config.data.train[0].target_field) == (
        "other.en",
        "translation.fr",
    )


@pytest.mark.parametrize(
    "assignment",
    ["seed", "=3", ".seed=3", "training..max_steps=3", "run_dir.x=3", "training.max_steps.y.z=1"],
)
def test_a_malformed_override_is_quoted(refused, assignment: str):
    assert f"--set {assignment}" in refused(assignment)


def test_override_of_one_alias_leaves_the_other(load):
    text = MINIMAL.replace("train: {toy: train}", "train: &toy {toy: train}")
    text = text.replace("validation: {toy: validation}", "validation: *toy")
    config = load("data.validation.toy=test", text=text)
    assert (config.data.train[0].toy, config.data.validation[0].toy) == ("train", "test")


# ------------------------------------------------------------------------------------------------ presets

SIZES = {
    "tiny": (128, 256, 4, 4, 4),
    "small": (256, 1024, 4, 3, 3),
    "base": (512, 2048, 8, 6, 6),
    "big": (1024, 4096, 16, 6, 6),
    "tiny_deep": (128, 256, 4, 6, 1),
    "small_deep": (256, 1024, 4, 6, 1),
    "base_deep": (512, 2048, 8, 12, 1),
    "big_deep": (1024, 4096, 16, 12, 1),
}


@pytest.mark.parametrize("preset", SIZES)
def test_a_preset_fills_the_sizes(load, preset: str):
    model = load(f"model.preset={preset}").model
    sizes = (model.d_model, model.ffn_dim, model.heads, model.encoder_layers, model.decoder_layers)
    assert sizes == SIZES[preset]
    assert model.preset is None


def test_presets_are_the_documented_ones():
    assert PRESETS.keys() == SIZES.keys() == set(get_args(Preset)) - {"auto"}


def test_explicit_keys_win_over_a_preset(load):
    model = load("model={decoder_layers: 1, preset: base, d_model: 256}").model
    assert (model.d_model, model.decoder_layers, model.encoder_layers, model.ffn_dim) == (256, 1, 6, 2048)


def test_the_resolved_config_holds_numbers(load):
    resolved = parse_yaml(to_yaml(load("model.preset=big")))
    assert resolved["model"]["preset"] is None
    assert resolved["model"]["d_model"] == 1024


# ---------------------------------------------------------------------------------------- resolved config

ODD = ["1e3", "no", "~", "null", "true", "010", "0x1F", "1_000", "12:30", "", " a ", "a: b", "# c", "- d",
       "=", "<<", "!t", "&a", "*a", "'", '"', "\\", "{", "\t", "\x85", "\u2028", "\ufeff", "é", "日本", "😀",
       "a\nb", "a\r\nb", "2026-01-01", ".inf", "%x", "@", "`", "?", "---", "..."]  # fmt: skip
strings = st.sampled_from(ODD) | st.text(st.characters(codec="utf-8"), max_size=20)


@settings(deadline=None, max_examples=60)
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


@pytest.mark.parametrize("key", ["learning_rate", "clip_norm", "weight_decay", "max_minutes"])
def test_numbers_are_finite(load, key: str):
    for value in (".inf", ".nan"):
        with pytest.raises(UsageError, match=key):
            load(f"training.{key}={value}")


@pytest.mark.parametrize("section", [None, "data", "tokenizer", "model", "training", "decoding"])
def test_the_config_is_frozen(load, section: str | None):
    config = load()
    part = getattr(config, section) if section else config
    name = next(iter(type(part).model_fields))
    with pytest.raises(ValidationError, match="frozen"):
        setattr(part, name, getattr(part, name))


# --------------------------------------------------------------------------------------------- cross-rules


@pytest.mark.parametrize(
    ("assignments", "named"),
    [
        (["tokenizer.joint=false"], ["model.tie_embeddings", "tokenizer.joint"]),
        (["data.max_length=4097"], ["batch_tokens", "max_length", "4097", "4096"]),
        (["training.micro_batch_tokens=255"], ["micro_batch_tokens", "max_length", "255"]),
        (["training.micro_batch_tokens=510", "training.r_drop=5"], ["micro_batch_tokens / 2", "255"]),
        (["training.max_steps=null"], ["max_steps", "max_epochs", "max_minutes"]),
        (["training={max_minutes: 5, schedule: cosine}"], ["schedule", "max_steps", "max_epochs"]),
        (["training={max_minutes: 5, schedule: linear}"], ["schedule", "max_steps", "max_epochs"]),
        (["model={d_model: 130, heads: 4}"], ["130", "4", "multiple"]),
        (["model={d_model: 3, heads: 3}"], ["even"]),
        (["model={d_model: 12, heads: 4, positions: rotary}"], ["even", "rotary"]),
    ],
)
def test_sections_that_disagree(refused, assignments: list[str], named: list[str]):
    message = refused(*assignments)
    assert all(name in message for name in named), message


@pytest.mark.parametrize(
    "assignments",
    [
        ["tokenizer.joint=false", "model.tie_embeddings=decoder"],
        ["tokenizer.joint=false", "model.tie_embeddings=none"],
        ["tokenizer={joint: false, path: other/model}"],
        ["data.max_length=4096"],
        ["training.micro_batch_tokens=256"],
        ["training={max_minutes: 5}"],
        ["training={max_epochs: 5, schedule: cosine}"],
        ["model={d_model: 12, heads: 3, positions: rotary}"],
        ["model={d_model: 3, heads: 3, positions: learned}"],
    ],
)
def test_sections_that_agree(load, assignments: list[str]):
    load(*assignments)


@pytest.mark.parametrize(
    ("batch", "micro", "expected"),
    [(4096, "auto", 4096), (100_000, "auto", 100_000), (4096, "1024", 1024), (4096, "9999", 4096)],
)
def test_a_micro_batch_is_at_most_a_step(load, batch: int, micro: str, expected: int):
    config = load(f"training.batch_tokens={batch}", f"training.micro_batch_tokens={micro}")
    assert config.training.micro_batch_limit == expected


def test_r_drop_halves_what_a_device_takes_but_not_the_step(load):
    config = load("training.r_drop=5", "training.batch_tokens=100000", "training.micro_batch_tokens=16384")
    assert (config.training.micro_batch_limit, config.training.batch_tokens) == (8192, 100_000)


# ------------------------------------------------------------------------------------------------- corpora


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        ("{source: a.en, target: a.fr}", "TextCorpus"),
        ("{tsv: a.tsv}", "TsvCorpus"),
        ("{tsv: a.tsv, source_column: 2, target_column: 0}", "TsvCorpus"),
        ("{jsonl: a.jsonl, source_field: en, target_field: fr}", "JsonlCorpus"),
        ("{parquet: 'a-*.parquet', source_field: en, target_field: fr}", "ParquetCorpus"),
        ("{hub: wmt/wmt14, config: de-en, source_field: a.en, target_field: a.de, weight: 2}", "HubCorpus"),
        ("{toy: train}", "ToyCorpus"),
    ],
)
@pytest.mark.parametrize("key", ["train", "validation", "test.mine"])
def test_every_kind_of_corpus(load, spec: str, kind: str, key: str):
    if key != "train":
        spec = spec.replace(", weight: 2", "")
    data = load(f"data.{key}={spec}").data
    corpus = data.test["mine"] if key == "test.mine" else getattr(data, key)[0]
    assert type(corpus).__name__ == kind
    assert corpus.weight == (2 if "weight" in spec else 1)


def test_a_list_of_corpora_with_weights(load):
    data = load("data.train=[{toy: train, weight: 0.5}, {tsv: a.tsv}]", "data.validation=[{tsv: b}]").data
    assert [corpus.weight for corpus in data.train] == [0.5, 1]
    assert len(data.validation) == 1


def test_holdout(load):
    assert load("data.validation={holdout: 100}").data.validation == Holdout(holdout=100)


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ("{source: a, tsv: b}", "tsv"),  # two kinds at once
        ("{source: a}", "target"),
        ("{jsonl: a, target_field: fr}", "source_field"),
        ("{parquet: a, source_field: en}", "target_field"),
        ("{toy: trian}", "'train'"),
        ("{tsv: a, source_column: -1}", "source_column"),
        ("{hub: a, source_field: en, target_field: fr, splt: x}", "'split'"),
    ],
)
def test_a_corpus_that_is_none(refused, spec: str, named: str):
    message = refused(f"data.train={spec}")
    assert message.startswith("data.train.0")
    assert named in message.replace(spec, "")


@pytest.mark.parametrize("key", ["validation", "test.mine"])
def test_weights_are_for_training_alone(load, key: str):
    with pytest.raises(UsageError, match="weights are for train"):
        load(f"data.{key}={{toy: test, weight: 2}}")
