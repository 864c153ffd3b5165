"""Which keys the configuration has, which values they accept, and how sections must agree."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from mtrain.config import schema
from mtrain.config.load import read_config
from mtrain.config.section import Section
from mtrain.config.sections import augment, corpora, data, decoding, model, stages, tokenizer, training
from mtrain.config.sections.corpora import Holdout
from mtrain.config.yaml_io import parse_yaml
from mtrain.errors import UsageError
from tests.support.configs import MINIMAL

SECTIONS = sorted(
    {
        value
        for module in (schema, augment, data, corpora, stages, tokenizer, model, training, decoding)
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Section) and value.model_fields
    },
    key=lambda section: section.__name__,
)


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


@pytest.mark.parametrize(
    ("assignment", "given_key", "nearest"),
    [
        ("sead=2", "sead", "seed"),
        ("data.max_lenght=3", "max_lenght", "max_length"),
        ("data.augment={upercase: 0.1}", "upercase", "uppercase"),
        ("data.train.weigth=2", "weigth", "weight"),
        ("data.validation={holdot: 3}", "holdot", "holdout"),
        ("data.test.a={tsv: f, sourcecolumn: 1}", "sourcecolumn", "source_column"),
        ("tokenizer.vocabsize=3", "vocabsize", "vocab_size"),
        ("model.drop_out=0.1", "drop_out", "dropout"),
        ("training.lerning_rate=0.1", "lerning_rate", "learning_rate"),
        ("decoding.beamsize=3", "beamsize", "beam_size"),
    ],
)
def test_a_misspelled_key_names_the_nearest_one(rejection, assignment: str, given_key: str, nearest: str):
    message = rejection(assignment)
    assert f"'{given_key}'" in message
    assert f"'{nearest}'" in message


def test_an_unknown_key_without_a_similar_one_lists_all_keys(rejection):
    message = rejection("decoding.zzzzzz=1")
    assert "decoding" in message
    assert "beam_size" in message


def test_a_misspelled_corpus_key_in_validation_lists_the_kinds_of_corpora(rejection):
    assert "source" in rejection("data.validation={sorce: a.en, target: a.fr}").replace("'sorce'", "")


def test_a_known_key_in_the_wrong_section_is_rejected(rejection):
    assert "beam_size" in rejection("model.beam_size=3")


@pytest.mark.parametrize("key", ["run_dir", "data"])
def test_a_missing_section_is_named(rejection, key: str):
    rest = {k: v for k, v in parse_yaml(MINIMAL).items() if k != key}
    assert rejection(text=yaml.safe_dump(rest)).startswith(f"{key}: this key is required")


@pytest.mark.parametrize(
    ("assignment", "key", "limit"),
    [
        ("seed=-1", "seed", "0"),
        ("seed=9223372036854775808", "seed", "9223372036854775807"),
        ("run_dir=''", "run_dir", "non-empty"),
        ("data.max_length=1", "data.max_length", "2"),
        ("data.max_length=65537", "data.max_length", "65536"),
        ("data.train.weight=0", "data.train.0.weight", "0"),
        ("data.augment={typos: 1.5}", "data.augment.typos", "1"),
        ("data.augment={merge: -0.1}", "data.augment.merge", "0"),
        ("data.validation={holdout: 0}", "data.validation.holdout", "1"),
        ("tokenizer.vocab_size=7", "tokenizer.vocab_size", "8"),
        ("tokenizer.character_coverage=1.01", "tokenizer.character_coverage", "1"),
        ("tokenizer.type=word", "tokenizer.type", "bpe"),
        ("model.dropout=1.0", "model.dropout", "1"),
        ("model.dropout=-0.1", "model.dropout", "0"),
        ("model.heads=0", "model.heads", "1"),
        ("model.preset=tinny", "model.preset", "tiny"),
        ("model.preset=[tiny]", "model.preset", "tiny"),
        ("training.max_steps=0", "training.max_steps", "1"),
        ("training.learning_rate=0", "training.learning_rate", "0"),
        ("training.learning_rate=11", "training.learning_rate", "10"),
        ("training.learning_rate=.nan", "training.learning_rate", "10"),
        ("training.betas=[0.9, 1.0]", "training.betas.1", "1"),
        ("training.label_smoothing=1", "training.label_smoothing", "1"),
        ("training.clip_norm=.nan", "training.clip_norm", "0"),
        ("training.micro_batch_tokens=autoo", "training.micro_batch_tokens", "auto"),
        ("decoding.beam_size=129", "decoding.beam_size", "128"),
        ("decoding.length_penalty=-10.5", "decoding.length_penalty", "-10"),
    ],
)
def test_out_of_range_names_the_key_and_the_limit(rejection, assignment: str, key: str, limit: str):
    problem, _, given_value = rejection(assignment).partition("; got")
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
def test_values_of_another_type_are_not_converted(rejection, assignment: str):
    assert rejection(assignment).startswith(assignment.partition("=")[0].partition(".")[0])


@pytest.mark.parametrize("key", ["learning_rate", "clip_norm", "weight_decay", "max_minutes"])
def test_numbers_are_finite(load_text, key: str):
    for value in (".inf", ".nan"):
        with pytest.raises(UsageError, match=key):
            load_text(f"training.{key}={value}")


def test_the_former_default_of_decoding_batches_means_auto_in_files(tmp_path: Path, load_text) -> None:
    (tmp_path / "config.yaml").write_text("decoding: {batch_tokens: 8192, beam_size: 2}")
    assert read_config(tmp_path / "config.yaml") == {"decoding": {"batch_tokens": "auto", "beam_size": 2}}
    assert load_text("decoding.batch_tokens=8192").decoding.batch_tokens == 8192
    assert decoding.DecodingConfig().moderate_batch_tokens == 8192
    assert decoding.DecodingConfig(batch_tokens=8000).moderate_batch_tokens == 8000


@pytest.mark.parametrize("section", [None, "data", "tokenizer", "model", "training", "decoding"])
def test_the_config_is_frozen(load_text, section: str | None):
    config = load_text()
    part = getattr(config, section) if section else config
    name = next(iter(type(part).model_fields))
    with pytest.raises(ValidationError, match="frozen"):
        setattr(part, name, getattr(part, name))


# --------------------------------------------------------------------------------- sections that agree


@pytest.mark.parametrize(
    ("assignments", "named"),
    [
        (["tokenizer.joint=false"], ["model.tie_embeddings", "tokenizer.joint"]),
        (
            ["data.max_length=4097", "training.batch_tokens=4096"],
            ["batch_tokens", "max_length", "4097", "4096"],
        ),
        (["training.micro_batch_tokens=255"], ["micro_batch_tokens", "max_length", "255"]),
        (["training.micro_batch_tokens=510", "training.r_drop=5"], ["micro_batch_tokens / 2", "255"]),
        (["training.r_drop_after=5"], ["r_drop_after", "set r_drop"]),
        (["training={patience: null}"], ["max_steps", "max_epochs", "max_minutes", "patience"]),
        (["training.schedule=cosine", "training.max_steps=null"], ["schedule", "max_steps", "max_epochs"]),
        (
            ["training={max_minutes: 5, schedule: linear}", "model.preset=tiny"],
            ["schedule", "max_steps", "max_epochs"],
        ),
        (["model={d_model: 130, heads: 4}"], ["130", "4", "multiple"]),
        (["model={d_model: 3, heads: 3}"], ["even"]),
        (["model={d_model: 12, heads: 4, positions: rotary}"], ["even", "rotary"]),
        (["model={d_model: 2, heads: 1, positions: sinusoidal_marian}"], ["at least 4"]),
        (["model={positions: learned, first_position: 2}"], ["first_position", "learned"]),
    ],
)
def test_sections_that_do_not_agree_are_named(rejection, assignments: list[str], named: list[str]):
    message = rejection(*assignments)
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
def test_sections_that_agree(load_text, assignments: list[str]):
    load_text(*assignments)


@pytest.mark.parametrize(
    ("batch", "micro", "expected"),
    [(4096, "auto", 4096), (100_000, "auto", 100_000), (4096, "1024", 1024), (4096, "9999", 4096)],
)
def test_a_micro_batch_is_at_most_a_batch(load_text, batch: int, micro: str, expected: int):
    config = load_text(f"training.batch_tokens={batch}", f"training.micro_batch_tokens={micro}")
    assert config.training.micro_batch_limit == expected


def test_r_drop_halves_micro_batches_but_not_the_batch(load_text):
    config = load_text(
        "training.r_drop=5", "training.batch_tokens=100000", "training.micro_batch_tokens=16384"
    )
    assert (config.training.micro_batch_limit, config.training.batch_tokens) == (8192, 100_000)


# --------------------------------------------------------------------------------------------- corpora


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        ("{source: a.en, target: a.fr}", "TextCorpus"),
        ("{tsv: a.tsv}", "TsvCorpus"),
        ("{tsv: a.tsv, source_column: 2, target_column: 0}", "TsvCorpus"),
        ("{jsonl: a.jsonl, source_field: en, target_field: fr}", "JsonlCorpus"),
        ("{parquet: 'a-*.parquet', source_field: en, target_field: fr}", "ParquetCorpus"),
        ("{hub: wmt/wmt14, config: de-en, source_field: a.en, target_field: a.de, weight: 2}", "HubCorpus"),
        ("{sacrebleu: wmt14, langs: en-fr}", "SacrebleuCorpus"),
        ("{toy: train}", "ToyCorpus"),
    ],
)
@pytest.mark.parametrize("key", ["train", "validation", "test.mine"])
def test_every_kind_of_corpus(load_text, spec: str, kind: str, key: str):
    if key != "train":
        spec = spec.replace(", weight: 2", "")
    data = load_text(f"data.{key}={spec}").data
    corpus = data.test["mine"] if key == "test.mine" else getattr(data, key)[0]
    assert kind in [base.__name__ for base in type(corpus).mro()][:2]  # of test sets, the second
    assert corpus.weight == (2 if "weight" in spec else 1)


def test_a_list_of_corpora_with_weights(load_text):
    data = load_text(
        "data.train=[{toy: train, weight: 0.5}, {tsv: a.tsv}]", "data.validation=[{tsv: b}]"
    ).data
    assert [corpus.weight for corpus in data.train] == [0.5, 1]
    assert len(data.validation) == 1


def test_holdout(load_text):
    assert load_text("data.validation={holdout: 100}").data.validation == Holdout(holdout=100)


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ("{source: a, tsv: b}", "tsv"),  # two kinds at once
        ("{source: a}", "target"),
        ("{jsonl: a, target_field: fr}", "source_field"),
        ("{parquet: a, source_field: en}", "target_field"),
        ("{toy: trian}", "train"),
        ("{tsv: a, source_column: -1}", "source_column"),
        ("{hub: a, source_field: en, target_field: fr, splt: x}", "'split'"),
    ],
)
def test_an_invalid_corpus_names_the_key_at_fault(rejection, spec: str, named: str):
    message = rejection(f"data.train={spec}")
    assert message.startswith("data.train.0")
    assert named in message.replace(spec, "")


@pytest.mark.parametrize("key", ["validation", "test.mine"])
def test_weights_are_for_training_corpora_only(load_text, key: str):
    with pytest.raises(UsageError, match="weight is allowed in"):
        load_text(f"data.{key}={{toy: test, weight: 2}}")


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("data.test.a={sacrebleu: wmt42, langs: en-fr}", "sacreBLEU has no test set wmt42; did you mean wmt"),
        ("data.test.a={sacrebleu: zzzz, langs: en-fr}", "`sacrebleu --list` prints their names"),
        (
            "data.test.a={sacrebleu: wmt23, langs: en-xx}",
            "wmt23 has no language pair en-xx; choose from cs-uk",
        ),
        ("data.test.a={sacrebleu: wmt23}", "data.test.a.langs: this key is required"),
        ("data.test.a={sacrebleu: wmt23, langs: en-de}", "data translates en-fr; give it a source_lang"),
        ("data.train={source: a, target: b, references: [c]}", "'references'"),
    ],
)
def test_errors_of_test_sets_say_what_is_possible(rejection, assignment, message):
    assert message in rejection(assignment)


def test_test_sets_may_have_names_in_sacrebleu_and_several_references(load_text):
    assert load_text("data.test.a={sacrebleu: wmt14, langs: en-fr}").data.test["a"].sacrebleu == "wmt14"
    test = "data.test.a={source: a, target: b, references: [c, d]}"
    assert load_text(test).model_dump()["data"]["test"]["a"]["references"] == ["c", "d"]
