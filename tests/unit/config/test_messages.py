"""Validation errors name the key and the values that it accepts, in plain words."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from mtrain.config.load import override, validate
from mtrain.config.messages import accepted_values
from mtrain.config.schema import Config, ModelFolderConfig
from mtrain.config.sections.corpora import (
    HubCorpus,
    JsonlCorpus,
    ParquetCorpus,
    TextCorpus,
    ToyCorpus,
    TsvCorpus,
)
from mtrain.config.sections.decoding import DecodingConfig
from mtrain.config.yaml_io import parse_yaml
from mtrain.errors import UsageError
from tests.support.configs import MINIMAL

CORPORA = {
    TextCorpus: {"source": "a", "target": "b"},
    TsvCorpus: {"tsv": "a"},
    JsonlCorpus: {"jsonl": "a", "source_field": "en", "target_field": "de"},
    ParquetCorpus: {"parquet": "a", "source_field": "en", "target_field": "de"},
    HubCorpus: {"hub": "a", "source_field": "en", "target_field": "de"},
    ToyCorpus: {"toy": "train"},
}
SCHEMA = Config.model_json_schema()


def rejected_values(field: dict[str, Any]) -> Iterator[Any]:
    """Values of another type, and values out of range."""
    parts = field.get("anyOf", [field])
    types = {part.get("type", "section") for part in parts}
    if not types & {"array", "object", "section"}:
        yield from ([1], {"a": 1})
    if not types & {"integer", "number"}:
        yield 5
    if "string" not in types or any("enum" in part or "const" in part for part in parts):
        yield "neither"
    if "null" not in types:
        yield None
    for part in parts:
        if part.get("type") in ("integer", "number"):
            yield from (float("nan"), float("-inf"), float("inf"), 1e308, 10**400, -(10**400))
            yield part["minimum"] - 1 if "minimum" in part else part["exclusiveMinimum"]
            yield from [part["maximum"] + 1] if "maximum" in part else []
            yield from [part["exclusiveMaximum"]] if "exclusiveMaximum" in part else []


def keys_of_sections() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every key of the configuration, corpora excepted, with its JSON schema."""
    for name, field in SCHEMA["properties"].items():
        yield name, field
        for key, inner in (
            SCHEMA["$defs"].get(field.get("$ref", "").rpartition("/")[2], {}).get("properties", {}).items()
        ):
            yield f"{name}.{key}", inner


def message_of(raw: Any) -> str:
    with pytest.raises(UsageError) as caught:
        validate(Config, raw, "config")
    message = str(caught.value).removeprefix("config: ")
    assert "\n" not in message
    assert not re.search(
        r"(?i)input should|value error|valid (integer|number|string)|pydantic|type=", message
    )
    return message


def replaced(path: str, value: Any) -> Any:
    """The minimal config with another value."""
    raw = override(parse_yaml(MINIMAL), f"{path}=0")
    section = raw
    *sections, key = path.split(".")
    for name in sections:
        section = section[name]
    section[key] = value
    return raw


@pytest.mark.parametrize(
    ("key", "field"), list(keys_of_sections()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_rejected_value_names_its_key(key: str, field: dict[str, Any]):
    values = list(rejected_values(field))
    assert values
    for value in values:
        message = message_of(replaced(key, value))
        assert message.startswith(f"{key}: expected "), message
        assert field["description"].partition(";")[0] in message or "such as {" in message


def numbers_of(schema: Any) -> Iterator[dict[str, Any]]:
    """The schemas of all numbers in a JSON schema."""
    for part in schema.values() if isinstance(schema, dict) else schema:
        if isinstance(part, dict | list):
            yield from numbers_of(part)
    if isinstance(schema, dict) and schema.get("type") in ("integer", "number"):
        yield schema


@pytest.mark.parametrize("section", [Config, ModelFolderConfig])
def test_every_number_has_a_range(section):
    """Numbers of hundreds of digits would end in an OverflowError, perhaps hours later."""
    for number in numbers_of(section.model_json_schema()):
        limits = {"minimum", "exclusiveMinimum"}, {"maximum", "exclusiveMaximum"}
        assert all(names & number.keys() for names in limits), number


@pytest.mark.parametrize("kind", CORPORA, ids=lambda kind: kind.__name__)
def test_a_rejected_value_of_a_corpus_names_its_key(kind: type[BaseModel]):
    schema = kind.model_json_schema()
    for key, field in schema["properties"].items():
        for value in rejected_values(field):
            message = message_of(replaced("data.train", CORPORA[kind] | {key: value}))
            assert message.startswith(f"data.train.0.{key}: expected "), message


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        (
            "decoding.beam_size=129",
            "beam_size: expected an integer from 1 to 128 (number of hypotheses per sentence); got 129",
        ),
        (
            "training.max_steps=0",
            "expected an integer from 1 to 1000000000000000, or null (optimizer steps); got 0",
        ),
        ("model.dropout=1", "expected a number of at least 0 and below 1 (dropout rate of "),
        ("training.learning_rate=0", "expected a number above 0 and at most 10, or null ("),
        ("training.max_minutes=.inf", "expected a number above 0 and at most 1000000000.0, or null ("),
        (
            "training.cuda_graphs=on",
            "expected one of auto, off (run training steps on a CUDA device as CUDA graphs); got ",
        ),
        ("training.micro_batch_tokens=some", "expected an integer from 1 to 1000000000000000, or auto ("),
        ("training.betas=[0.9]", "training.betas.1: this key is required"),
        ("training.betas=5", "expected a list of 2, each a number of at least 0 and below 1 ("),
        (
            "training.freeze=encoder",
            "expected a list, each item one of encoder, decoder, embeddings, self_attention, feed_forward (",
        ),
        ("tokenizer.joint=1", "expected true or false ("),
        ("data.source_lang=''", "expected a non-empty string (language code of the source, "),
        ("data.test={5: {toy: test}}", "data.test: names must be strings; got 5"),
        ("run_dir=[a, b]", "; got a list of 2"),
        (f"tokenizer.vocab_size={'9' * 80}", f"; got {'9' * 60}..."),
    ],
)
def test_messages_give_range_meaning_and_value(assignment: str, message: str):
    assert message in message_of(override(parse_yaml(MINIMAL), assignment))


def test_an_unknown_key_is_shown_on_one_line():
    message = message_of(override(parse_yaml(MINIMAL), 'model={"a\\n{hint}": 5}'))
    assert message.startswith("model: unknown key 'a {hint}'; known: preset, ")


def test_further_errors_are_counted():
    raw = override(parse_yaml(MINIMAL), "decoding={beam_size: 0, top_k: -1, seed: -1}")
    assert message_of(raw).endswith("; got 0 (and 2 more errors)")
    raw = override(parse_yaml(MINIMAL), "decoding={beam_size: 0, top_k: -1}")
    assert message_of(raw).endswith("; got 0 (and 1 more error)")


def test_accepted_values_of_a_single_choice_and_of_text():
    schema = DecodingConfig.model_json_schema()
    assert accepted_values(schema["properties"]["mbr"], schema) == "one of chrf, bleu, or null"
    assert accepted_values({"type": "string"}, {}) == "a string"
