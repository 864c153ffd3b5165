"""The config that `mtrain init` writes."""

import re
from itertools import product

import pytest

from mtrain.config.load import validate
from mtrain.config.new_config import NewConfig, holdout_size, new_config_text
from mtrain.config.schema import Config
from mtrain.config.yaml_io import parse_yaml

TEXT = ({"source": "a b: #1.en", "target": "no"}, 10)
TSV = ({"tsv": "x.tsv", "source_column": 1, "target_column": 3, "header": True}, 1_000_000)


def load(text: str) -> Config:
    return validate(Config, parse_yaml(text), "text")


@pytest.mark.parametrize(
    ("train", "validation", "tests", "minutes", "skipped"),
    [*product(([TEXT], [TSV, TEXT]), ([], [TEXT]), ({}, {"2016": TEXT}), (None, 0.5), ("", "x.tsv:3: bad"))],
)
def test_each_config_loads(train, validation, tests, minutes, skipped):
    text = new_config_text(
        NewConfig("c.yaml", "runs/no", "no", "en", train, validation, tests, minutes, skipped)
    )
    config = load(text)
    assert (config.run_dir, config.data.source_lang, config.model.preset) == ("runs/no", "no", "auto")
    written = [corpus.model_dump(exclude_unset=True) for corpus in config.data.train]
    assert written == [spec for spec, _ in train]
    assert config.training.max_minutes == minutes
    assert config.data.bad_lines == ("skip" if skipped else "error")
    assert list(config.data.test) == list(tests)
    assert isinstance(config.data.validation, list) == bool(validation)


def test_keys_that_are_commented_out_are_valid():
    text = new_config_text(NewConfig("c.yaml", "runs/x", "en", "de", [TEXT], [], {}, None))
    uncommented = re.sub(r"^( *)# ( *\w+:(?: |$))(?!.*[a-z]{3}\.$)", r"\1\2", text, flags=re.MULTILINE)
    config = load(uncommented)
    assert (config.tokenizer.vocab_size, config.training.max_minutes, config.training.max_epochs) == (
        8000,
        60,
        10,
    )


def test_several_corpora_have_an_example_of_stages():
    for count in (1, 2, 30):
        corpora = [({"tsv": f"{number}: #.tsv"}, 10) for number in range(count)]
        text = new_config_text(NewConfig("c.yaml", "runs/x", "en", "de", corpora, [], {}, None))
        lines = [line for line in text.splitlines() if line.startswith("  # stages: ")]
        assert len(lines) == (count == 2)
    two = new_config_text(NewConfig("c.yaml", "runs/x", "en", "de", corpora[:2], [], {}, None))
    [stage] = load(two.replace("# stages", "stages")).data.stages
    assert stage.shares == {"0: #.tsv": 1, "1: #.tsv": 1}


def test_lines_are_not_too_long():
    text = new_config_text(NewConfig("c.yaml", "runs/x", "en", "de", [TEXT, TSV], [], {"t": TEXT}, None, "x"))
    assert max(map(len, text.splitlines())) <= 110


@pytest.mark.parametrize(("pairs", "size"), [(2, 1), (30, 1), (5_000, 250), (10**8, 1000)])
def test_a_twentieth_is_held_out(pairs, size):
    assert holdout_size(pairs) == size
