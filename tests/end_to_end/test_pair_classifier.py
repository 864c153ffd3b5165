"""`mtrain fit` with `model.head: pair_classifier`, and what the other commands do with the model."""

import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from mtrain.checkpoint.model_folder import load_any_model, load_classifier
from mtrain.config.load import validate
from mtrain.config.schema import Config
from mtrain.decoding.scoring.classify import classify_pairs
from mtrain.errors import DivergedError, ModelError, UsageError
from mtrain.model.classifier import PairClassifier
from mtrain.training.setup import timing
from mtrain.training.setup.prepare_run import prepare_only
from tests.support.cli import one_line
from tests.support.training import PAIRS, fit_on_cpu, losses, merged, read_metrics, same_weights

CLASSIFIER = {"head": "pair_classifier", "decoder_layers": 0}
RECIPE = {"batch_tokens": 192, "validate_every": 4, "checkpoint_every": 4, "max_steps": 8}
LENGTH, NO_DROPOUT = {"max_length": 32}, {"dropout": 0.0}


@pytest.fixture
def make(make_config):
    """The config of a small classifier with changed sections."""

    def make(run: str = "run", **sections):
        given = {"model": CLASSIFIER, "training": RECIPE, "data": LENGTH}
        return make_config(
            run, **{k: {**given.get(k, {}), **sections.get(k, {})} for k in {*given, *sections}}
        )

    return make


@pytest.fixture(scope="session")
def classifier(raw_config, tmp_path_factory) -> Path:
    """A run whose model has learned to tell eight pairs from misaligned ones."""
    folder = tmp_path_factory.mktemp("classifier") / "run"
    kinds = ("truncated", "extended", "wrong_language", "numbers", "replaced_words", "word_order")
    raw = merged(
        raw_config,
        str(folder),
        model={**CLASSIFIER, "dropout": 0.0},
        data={**LENGTH, "corruptions": dict.fromkeys(kinds, 0)},
        training={
            **RECIPE,
            "max_steps": 150,
            "batch_tokens": 512,
            "validate_every": 50,
            "checkpoint_every": 50,
        },
    )
    return fit_on_cpu(validate(Config, raw, "test"))


@pytest.fixture
def pairs_file(tmp_path) -> Path:
    """Eight good pairs, then the same with the target of the next pair, then a pair that is too long."""
    targets = [pair[1] for pair in PAIRS]
    rows = [*PAIRS, *zip([pair[0] for pair in PAIRS], [*targets[1:], targets[0]], strict=True)]
    rows.append(("A cat. " * 50, "x"))
    file = tmp_path / "pairs.tsv"
    file.write_text("".join(f"{source}\t{target}\tmore\n" for source, target in rows), encoding="utf-8")
    return file


def test_it_learns_and_scores_pairs(classifier, pairs_file, mtrain, tmp_path):
    """The probability is a further column, by which pairs can be filtered; what it has learned is good."""
    validations = [line["validation"] for line in read_metrics(classifier) if "validation" in line]
    assert validations[-1]["auc"] == validations[-1]["auc_misaligned"] > 0.9
    assert {"nll", "auc_truncated", "auc_word_order"} <= validations[-1].keys()  # those left out as well
    out = tmp_path / "scored.tsv"
    code, _, err = mtrain(
        "score", classifier, "--classifier", "--tsv", pairs_file, "-o", out, "--device", "cpu"
    )
    assert code == 0, err
    lines = out.read_text(encoding="utf-8").splitlines()
    assert [line.rpartition("\t")[0] for line in lines] == pairs_file.read_text(encoding="utf-8").splitlines()
    found = [float(line.rpartition("\t")[2]) for line in lines]
    assert min(found[:8]) > max(sorted(found[8:16])[:6]) and all(0 <= p <= 1 for p in found[:16])
    assert math.isnan(found[16])
    sides = [tmp_path / "source", tmp_path / "target"]
    for number, side in enumerate(sides):
        side.write_text("".join(f"{pair[number]}\n" for pair in PAIRS), encoding="utf-8")
    code, stdout, _ = mtrain(
        *("score", classifier, "--classifier", "-i", sides[0], "--target", sides[1], "--batch-tokens", 40)
    )
    assert code == 0
    assert [float(line) for line in stdout.splitlines()] == pytest.approx(found[:8], abs=1e-5)


def test_outputs_that_are_not_finite_are_an_error(classifier):
    """As with fp16 on a GPU: they must not become probabilities that a filter compares."""
    loaded = load_classifier(classifier)
    for weight in loaded.model.parameters():
        weight.data *= 1e30
    with pytest.raises(ModelError, match="outputs are not finite"):
        list(classify_pairs(loaded, torch.device("cpu"), PAIRS))


def test_validations_with_outputs_that_are_not_finite_end_training(make, monkeypatch, caplog):
    """Otherwise, no validation would be an improvement, and the run would end without a model."""
    forward = PairClassifier.forward
    factor = {True: 1.0, False: math.nan}  # in training; in validation
    monkeypatch.setattr(
        PairClassifier, "forward", lambda model, *inputs: forward(model, *inputs) * factor[model.training]
    )
    message = "3 validations in a row failed: the model's outputs are not finite"
    with pytest.raises(DivergedError, match=message):
        fit_on_cpu(make(training={"validate_every": 2, "max_steps": 50}))
    assert caplog.text.count("validation failed") == 2


def test_it_needs_no_tokenizer_for_bleu(make):
    """The tokenizer for Japanese is an optional dependency."""
    config = make(data={"target_lang": "ja"}, training={"max_steps": 1})
    prepare_only(config)
    fit_on_cpu(config)


def test_a_column_of_probabilities_filters_a_corpus(classifier, pairs_file, mtrain, tmp_path):
    scored, config = tmp_path / "scored.tsv", tmp_path / "clean.yaml"
    assert mtrain("score", classifier, "--classifier", "--tsv", pairs_file, "-o", scored)[0] == 0
    data = {
        "source_lang": "en",
        "target_lang": "de",
        "train": {"tsv": str(scored)},
        "validation": {"holdout": 1},
    }
    data["filters"] = {"min_score": {"column": 3, "value": 0.5}}
    config.write_text(yaml.safe_dump({"run_dir": str(tmp_path / "run"), "data": data}))
    code, _, err = mtrain("clean", config, "-o", tmp_path / "clean.tsv")
    assert code == 0, err
    kept = [tuple(line.split("\t")[:2]) for line in (tmp_path / "clean.tsv").read_text("utf-8").splitlines()]
    assert {*kept} >= {*PAIRS} and len(kept) < 12


@pytest.mark.parametrize(
    "recipe",
    [
        {"ema_decay": 0.9, "micro_batch_tokens": 64},
        pytest.param({"average_checkpoints": 2, "precision": "bf16"}, marks=pytest.mark.slow),
    ],
    ids=lambda recipe: next(iter(recipe)),
)
def test_a_run_resumed_within_an_epoch_is_bit_identical(make, recipe):
    """With dropout, new segmentations, several micro-batches and averages of weights."""
    keys = {"model": {"dropout": 0.3}, "data": {"subword_sampling": 0.2}}

    def run(name: str, *stops: int) -> Path:
        for steps in (*stops, 11):
            training = {**recipe, "max_steps": steps, "log_every": 1, "validate_every": 3}
            folder = fit_on_cpu(make(name, **keys, training=training))
        return folder

    whole, parts = run("whole"), run("parts", 2, 5)
    assert losses(parts) == losses(whole) and same_weights(parts, whole)
    assert {line["epoch"] for line in read_metrics(whole) if "loss" in line} != {1}


def test_micro_batches_do_not_change_the_steps(make):
    one, other = (
        losses(
            fit_on_cpu(
                make(str(size), training={"micro_batch_tokens": size, "log_every": 1}, model=NO_DROPOUT)
            )
        )
        for size in (192, 64)
    )
    assert one[0] == pytest.approx(other[0], rel=1e-5) and one[-1] == pytest.approx(other[-1], rel=1e-2)


def test_the_log_states_its_units_and_scores(make, caplog):
    caplog.set_level("INFO")
    fit_on_cpu(make())
    assert re.search(r"loss \d\.\d+ nats/pair, .* pairs/s", caplog.text)
    assert re.search(
        r"validation nll \d\.\d+, AUC \d\.\d+ \(misaligned \d\.\d+, truncated .*\(best\)", caplog.text
    )
    assert "exports" not in caplog.text and "BLEU" not in caplog.text


def test_it_starts_from_the_encoder_of_a_translation_model(make, run_dir, classifier):
    """It also starts from another classifier, and then takes all weights."""
    encoder = load_any_model(run_dir).model.state_dict()
    first = {"max_steps": 1, "learning_rate": 1e-9, "schedule": "constant", "precision": "fp32"}
    sizes = {"d_model": 64, "encoder_layers": 2}
    run = fit_on_cpu(
        make("one", model=sizes, data={"max_length": 64}, training={**first, "init_from": str(run_dir)})
    )
    found = load_classifier(run).model.state_dict()
    shared = found.keys() & encoder.keys()
    assert {"source_embedding.weight", "encoder.1.feed_forward.inner.weight"} <= shared
    assert all(torch.allclose(found[name], encoder[name], atol=1e-6) for name in shared)
    other = fit_on_cpu(make("two", training={**first, "init_from": str(classifier)}))
    before, after = (load_classifier(path).model.state_dict() for path in (classifier, other))
    assert all(torch.allclose(after[name], before[name], atol=1e-6) for name in before)
    with pytest.raises(ModelError, match="is a pair classifier, which cannot translate"):
        fit_on_cpu(
            make(
                "three",
                model={"head": "translation", "decoder_layers": 1},
                training={"init_from": str(classifier)},
            )
        )


@pytest.mark.parametrize(
    "command",
    [
        ["translate", "{}", "Hello."],
        ["evaluate", "{}"],
        ["score", "{}", "--tsv", "{text}"],
        ["export", "{}", "{out}", "--format", "ctranslate2"],
        ["rerank", "{}", "{text}", "-i", "{text}"],
        ["translate", "{translator}", "Hello.", "--ensemble", "{}"],
    ],
    ids=lambda command: " ".join(command[:1] + command[-2:-1]),
)
def test_commands_that_translate_refuse_it(classifier, run_dir, mtrain, tmp_path, command):
    text = tmp_path / "text"
    text.write_text("a\tb\n")
    places = {"text": text, "out": tmp_path / "out", "translator": run_dir}
    code, out, err = mtrain(*(part.format(classifier, **places) for part in command))
    assert (code, out) == (4, "")
    message = "is a pair classifier, which cannot translate; use it with `mtrain score --classifier`"
    assert message in one_line(err)


def test_score_refuses_what_does_not_fit(classifier, run_dir, pairs_file, mtrain):
    for option in (
        ["--json", "-i", pairs_file, "--target", pairs_file],
        ["--tsv", pairs_file, "--reverse", run_dir],
    ):
        code, _, err = mtrain("score", classifier, "--classifier", *option)
        assert code == 2 and "--classifier and --" in one_line(err)
    code, _, err = mtrain("score", run_dir, "--classifier", "--tsv", pairs_file)
    assert code == 4 and "is a translation model; train a pair classifier" in one_line(err)


def test_average_averages_classifiers(classifier, run_dir, mtrain, tmp_path, pairs_file):
    code, _, err = mtrain("average", classifier, classifier / "model", "-o", tmp_path / "average")
    assert code == 0 and "--classifier --tsv pairs.tsv" in err
    assert load_classifier(tmp_path / "average").config == load_classifier(classifier).config
    code, _, err = mtrain("average", classifier, run_dir, "-o", tmp_path / "mixed")
    assert code == 4 and "are not the same as in" in one_line(err)


def test_info_and_the_card_describe_it(classifier, mtrain):
    code, out, _ = mtrain("info", classifier)
    assert code == 0 and "1 encoder, a classifier of sentence pairs" in out and "decoding" not in out
    assert re.search(r"AUC +[01]\.\d{3}", out) and "nll (nats/pair)" in out
    code, card, _ = mtrain("info", classifier, "--card")
    assert "pipeline_tag: text-classification" in card and "translates" not in card
    assert "--classifier --tsv pairs.tsv" in card and "type: auc" in card
    assert json.loads(mtrain("info", classifier, "--json")[1])["config"]["model"]["head"] == "pair_classifier"


def test_the_report_has_its_curves(classifier, mtrain, tmp_path):
    code, _, err = mtrain("report", classifier, "-o", tmp_path / "report.html")
    assert code == 0, err
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "best AUC" in page and "Negative log-likelihood (nats/pair)" in page
    assert 'id="attention"' not in page and 'id="bleu-by-length"' not in page
    assert "perplexity" not in page.lower() and "Not recorded" not in page
    code, _, err = mtrain("report", classifier, "-o", tmp_path / "report.html", "--sentence", "It rains.")
    assert code == 2 and "--sentence has no effect on pair classifiers; leave it out" in one_line(err)


def test_plan_predicts_its_costs(raw_config, classifier, mtrain, tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "TIMED_SECONDS", 0.0)
    monkeypatch.setattr(timing, "STEADY", math.inf)
    raw = merged(raw_config, str(tmp_path / "run"), model=CLASSIFIER, data=LENGTH, training=RECIPE)
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(raw))
    code, out, err = mtrain("plan", config, "--hardware", "cpu", "--json")
    assert code == 0, err
    plan = json.loads(out)
    assert plan["parameters"]["decoder"] == 0 and plan["epoch"]["target_tokens"] == len(PAIRS)
    config.write_text(yaml.safe_dump({**raw, "training": {**RECIPE, "max_epochs": 2}}))
    assert mtrain("plan", config, "--hardware", "measured")[0] == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"decoder_layers": 2}}, "a pair classifier has no decoder; remove decoder_layers"),
        ({"model": {"alignment_head": True}}, "a pair classifier has no decoder; remove decoder_layers"),
        (
            {"model": {"preset": "auto"}},
            "presets auto and student_.* are for translation models; give another",
        ),
        ({"model": {"preset": "student_tiny"}}, "presets auto and student_.* are for translation models"),
        ({"training": {"r_drop": 1.0}}, "training.r_drop does not apply to a pair classifier"),
        (
            {"training": {"freeze": ["decoder"]}},
            "training.freeze: decoder does not apply to a pair classifier",
        ),
        (
            {"training": {"best_metric": "bleu"}},
            "training.best_metric: bleu scores translations; use auc or nll",
        ),
        ({"tokenizer": {"joint": False}}, "needs tokenizer.joint: true"),
        ({"data": {"augment": {"noise": 0.1}}}, "data.augment.noise would be examples of good pairs"),
        ({"data": {"max_length": 128}}, r"twice data.max_length \(256\) must not exceed .* \(192\)"),
        (
            {"data": {"corruptions": {"misaligned": -1}}},
            "data.corruptions.misaligned: expected a number from 0",
        ),
        ({"data": {"corruptions": {"numbres": 1}}}, "did you mean 'numbers'"),
        ({"model": {"head": "translation"}}, "decoder_layers must be at least 1"),
        ({"export": {"require": ["marian"]}}, "marian does not support this model: model.head"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_settings_that_do_not_fit_are_errors(make, changes, message):
    with pytest.raises(UsageError, match=message):
        fit_on_cpu(make(**changes))


def test_corpora_may_have_several_target_languages(make):
    corpus = make().data.train[0].model_dump(mode="json", exclude_none=True)
    train = [corpus, {**corpus, "target_lang": "fr"}]
    assert [each.target for each in make(data={"train": train}).data.directions] == ["de", "fr"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"training": {"best_metric": "auc"}}, "training.best_metric: auc needs model.head: pair_classifier"),
        ({"data": {"corruptions": {}}}, "data.corruptions needs model.head: pair_classifier"),
    ],
)
def test_translation_models_have_neither_auc_nor_corruptions(make_config, changes, message):
    with pytest.raises(UsageError, match=message):
        make_config(**changes)


def test_its_defaults_are_those_of_a_classifier(make, make_config):
    config = make()
    assert (config.training.best_metric, config.training.label_smoothing) == ("auc", 0.0)
    assert config.data.corruptions is not None and config.data.corruptions.misaligned == 1
    sizes = make(model={"preset": "micro", "decoder_layers": 0}).model
    assert (sizes.encoder_layers, sizes.decoder_layers) == (1, 0)  # as given
    assert make(training={"best_metric": "auto"}).training.best_metric == "auc"
    assert make_config().training.best_metric == "auto"


def test_all_kinds_at_zero_are_an_error(make):
    kinds = make().data.corruptions
    with pytest.raises(UsageError, match="all kinds of corruption are 0"):
        make(data={"corruptions": dict.fromkeys(dict(kinds), 0)})


def test_corruptions_must_not_change_when_a_run_resumes(make):
    fit_on_cpu(make())
    with pytest.raises(UsageError, match=r"data\.corruptions\.word_order was 1\.0 when this run began"):
        fit_on_cpu(make(data={"corruptions": {"word_order": 0}}, training={"max_steps": 9}))


def test_a_validation_pair_longer_than_the_limit_is_cut(make, corpus, tmp_path):
    long = tmp_path / "long.tsv"
    long.write_text(
        "A cat sleeps. " * 40 + "\tEine Katze schläft.\n" + "It rains.\tEs regnet.\n", encoding="utf-8"
    )
    run = fit_on_cpu(make(data={"validation": {"tsv": str(long)}}))
    assert [line["validation"]["nll"] for line in read_metrics(run) if "validation" in line]
    shutil.rmtree(run)
