"""The text of the model card: its metadata, its tables, and what it must not contain."""

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard

from mtrain.checkpoint.card_text import model_card
from mtrain.checkpoint.model_info import (
    Ancestor,
    CorpusInfo,
    DataInfo,
    ExportInfo,
    ModelInfo,
    Origin,
    Score,
    describe_model,
    new_info,
    read_info,
    read_model_config,
    write_info,
)
from mtrain.config.load import validate
from mtrain.config.schema import Config
from tests.support.models import card_of
from tests.support.training import PAIRS, fit_on_cpu, merged, read_metrics


def described(model: Path, **info: object) -> str:
    """The card of a model with changed information."""
    write_info(model, new_info("name", Origin(kind="trained")).model_copy(update=info))
    return model_card(describe_model(model))


def test_fit_writes_a_card_whose_metadata_the_hub_can_read(run_dir):
    card = card_of(run_dir / "model")
    data = card.data.to_dict()
    assert data["language"] == ["en", "de"] and data["pipeline_tag"] == "translation"
    assert data["library_name"] == "mtrain" and data["metrics"] == ["bleu", "chrf"]
    assert {"translation", "mtrain"} <= set(data["tags"])
    assert not {"license", "datasets", "base_model"} & data.keys()
    assert "# by-heart\n" in card.text and "Not stated. mtrain does not know the license" in card.text
    assert 'mtrain translate . "Hello."' in card.text


def test_the_card_has_the_scores_of_the_validation_and_of_the_test_sets(scored_run):
    card = card_of(scored_run / "model")
    results = [asdict(result) for result in card.data.eval_results]
    [test] = json.loads((scored_run / "test_scores.json").read_text())["sets"]
    wanted = {("test", "seen", each["metric"]): round(each["score"], 2) for each in test["scores"]}
    best = int(json.loads((scored_run / "checkpoints/index.json").read_text())["best"][5:])
    [validation] = [
        line["validation"]
        for line in read_metrics(scored_run)
        if line["step"] == best and "validation" in line
    ]
    for metric in ("bleu", "chrf"):
        wanted["validation", "validation set", metric] = round(validation[metric], 2)
    found = {(r["dataset_split"], r["dataset_name"], r["metric_type"]): r["metric_value"] for r in results}
    assert found == wanted and {r["task_type"] for r in results} == {"translation"}
    for score in test["scores"]:
        assert score["signature"].replace("|", "\\|") in card.text
    assert "| seen | 8 | BLEU |" in card.text and "| validation set | 8 | BLEU |" in card.text
    assert "its scores are optimistic" in card.text


def test_the_card_names_the_data_by_its_hashes_and_contains_no_sentence_and_no_folder(scored_run, corpus):
    text = (scored_run / "model/README.md").read_text(encoding="utf-8")
    inputs = json.loads((scored_run / "data/summary.json").read_text())["inputs"]
    for content in inputs["contents"]:
        assert content in text
    assert "| train.en and train.de | training | 8 |" in text
    for everything in (text, (scored_run / "model/info.json").read_text(encoding="utf-8")):
        assert not any(sentence in everything for pair in PAIRS for sentence in pair)
        assert str(corpus) not in everything and str(scored_run.parent) not in everything


def test_scores_of_different_sets_are_not_mixed_up_and_odd_names_do_no_harm(model_copy):
    names = ["news/2014 | a", "news/2014 | b", "<script>`x`</script>\n---\n# no", "日本", "- x: [y"]
    scores = [
        Score(set=name, split="test", sentences=3, metric="bleu", title="BLEU", value=number)
        for number, name in enumerate(names)
    ]
    text = described(model_copy, scores=scores, name="a `b`\n# c | [d](e) <f>")
    data: Any = ModelCard(text).data
    assert [result.dataset_name for result in data.eval_results] == names
    assert [result.metric_value for result in data.eval_results] == [*range(5)]
    types = [result.dataset_type for result in data.eval_results]
    assert all(re.fullmatch(r"(?:[\w-]+/)?[\w.-]+", name) for name in types) and len({*types}) == 5
    assert "<script>" not in text.rpartition("\n---\n")[2] and "\n# no" not in text
    assert [line for line in text.split("\n") if line.startswith("# ")] == [
        "# a \\`b\\` \\# c \\| \\[d\\](e) \\<f\\>"
    ]
    rows = [line for line in text.split("\n") if "| 3 | BLEU |" in line]
    assert [len(re.findall(r"(?<!\\)\|", row)) for row in rows] == [6] * 5


@pytest.mark.parametrize(
    ("source", "target", "languages"),
    [("no", "nn-NO", ["no", "nn"]), ("zh_CN", "zh-TW", ["zh"]), ("und", "EN", ["en"]), ("und", "und", None)],
)
def test_languages_are_iso_codes(model_copy, source, target, languages):
    raw = yaml.safe_load((model_copy / "config.yaml").read_text())
    (model_copy / "config.yaml").write_text(
        yaml.safe_dump({**raw, "source_lang": source, "target_lang": target})
    )
    assert ModelCard(described(model_copy)).data.to_dict().get("language") == languages


def test_datasets_and_models_of_the_hub_are_named_in_the_metadata(model_copy):
    hub = Ancestor(name="Helsinki-NLP/opus-mt-en-de", hub=True)
    imported = Ancestor(name="base", origin=Origin(kind="imported", ancestors=[hub]))
    corpora = [CorpusInfo(name="wmt/wmt14 de-en train", pairs=5, hub="wmt/wmt14"), CorpusInfo(name="a.tsv")]
    both = [imported, imported]
    for origin, words in [
        (Origin(kind="imported", ancestors=[hub]), "converted from `Helsinki-NLP/opus-mt-en-de` by"),
        (Origin(kind="trained", ancestors=[imported]), "fine-tuned from `base` with"),
        (Origin(kind="averaged", ancestors=both), "made by averaging the weights of `base`, `base` with"),
    ]:
        text = described(model_copy, origin=origin, data=DataInfo(train=corpora, validation=corpora[:1]))
        data: Any = ModelCard(text).data
        assert data.datasets == ["wmt/wmt14"] and data.base_model == ["Helsinki-NLP/opus-mt-en-de"]
        assert f"It was {words} [mtrain]" in text
        assert "The licenses of `Helsinki-NLP/opus-mt-en-de` also apply." in text


@pytest.mark.parametrize("format", ["marian", "ctranslate2"])
def test_the_example_of_an_exported_model_has_its_language_tag(model_copy, format):
    config = read_model_config(model_copy).model_copy(update={"language_tags": "target"})
    export = ExportInfo(format=format, parameters=5, config=config)
    (model_copy / "config.yaml").unlink()
    text = described(model_copy, export=export)
    assert '"<2de> Hello."' in text and "mtrain translate" not in text


def test_rounds_of_training_and_averaging_are_described_in_little_space(model_copy):
    first = Ancestor(name="first", fingerprint="0", origin=Origin(kind="trained"))
    for number in range(1, 30):
        trained = Origin(kind="trained", ancestors=[first])
        three = [
            Ancestor(name=f"{number}.{i}", fingerprint=f"{number}.{i}", origin=trained) for i in range(3)
        ]
        info = new_info("average", Origin(kind="averaged", ancestors=three))
        first = Ancestor(name=f"average {number}", fingerprint=str(number), origin=info.origin)
    write_info(model_copy, info)
    assert (model_copy / "info.json").stat().st_size < 300_000 and read_info(model_copy) == info
    assert "The licenses of `first` also apply." in model_card(describe_model(model_copy))


def test_a_fine_tuned_model_names_the_model_that_it_started_from(run_dir, raw_config, tmp_path):
    raw = merged(raw_config, str(tmp_path / "run"), training={"init_from": str(run_dir), "max_steps": 1})
    run = fit_on_cpu(validate(Config, {**raw, "model": {}, "tokenizer": {}}, "test"))
    info = read_info(run / "model")
    [ancestor] = info.origin.ancestors
    manifest = json.loads((run / "origin.json").read_text())["fingerprint"]
    assert (ancestor.name, ancestor.fingerprint, ancestor.origin.kind) == ("by-heart", manifest, "trained")
    assert "fine-tuned from `by-heart`" in (run / "model/README.md").read_text()


def test_a_model_about_which_nothing_is_known_has_a_card(model_copy):
    (model_copy / "info.json").unlink()
    card: Any = ModelCard(model_card(describe_model(model_copy)))
    assert card.data.eval_results is None and "## Scores" not in card.text and "## License" in card.text


def test_an_unknown_key_of_a_later_version_is_ignored(model_copy):
    values = json.loads((model_copy / "info.json").read_text())
    (model_copy / "info.json").write_text(
        json.dumps({**values, "later": [1], "origin": {"kind": "trained", "x": 1}})
    )
    assert read_info(model_copy).origin == Origin(kind="trained") and read_info(model_copy) != ModelInfo()
