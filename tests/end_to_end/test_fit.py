"""Whole training runs: they learn, stop at their limits, and resume exactly."""

import json
import re
import shutil
from itertools import islice
from pathlib import Path

import pytest
import torch

from mtrain import Translator
from mtrain.checkpoint.model_folder import load_model
from mtrain.checkpoint.model_info import read_info
from mtrain.config.yaml_io import read_yaml_file
from mtrain.data.epochs.schedule import Position
from mtrain.decoding.alignment_layer import choose_alignment_layer
from mtrain.errors import DataError, ModelError
from mtrain.training.fit import make_trainer
from mtrain.training.validation import translation as validate
from mtrain.training.validation.translation import Scores
from tests.support.training import (
    PAIRS,
    fit_on_cpu,
    last_checkpoint,
    losses,
    read_metrics,
    same_weights,
    with_bleu,
)

# ------------------------------------------------------------------------------------------------ learning


def test_a_small_corpus_is_learned_and_decoded_exactly(run_dir):
    sources, targets = zip(*PAIRS, strict=True)
    for beam_size in (1, 5):
        translator = Translator.load(run_dir, "cpu", [f"decoding.beam_size={beam_size}"])
        assert [t.text for t in translator.translate(list(sources))] == list(targets)
    scores = [line["validation"] for line in read_metrics(run_dir) if "validation" in line]
    assert scores[-1]["bleu"] == pytest.approx(100) and scores[-1]["chrf"] == pytest.approx(100)
    assert scores[-1]["nll"] < 0.1 < scores[-1]["perplexity"]


@pytest.mark.parametrize(
    ("model", "tokenizer"),
    [
        pytest.param(
            {"norm": "post", "positions": "learned", "activation": "gelu", "tie_embeddings": "decoder"},
            {},
            marks=pytest.mark.slow,
        ),
        (
            {"positions": "rotary", "activation": "swiglu", "tie_embeddings": "none"},
            {"joint": False, "vocab_size": 305},
        ),
        ({"positions": "sinusoidal_interleaved", "activation": "silu"}, {"type": "bpe"}),
        pytest.param(
            {"encoder_layers": 3, "decoder_layers": 1, "preset": "tiny", "dropout": 0.0},
            {"symbols": ["<bt>"]},
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_every_architecture_trains_saves_and_translates(make_config, model, tokenizer):
    run = fit_on_cpu(
        make_config(model=model, tokenizer=tokenizer, training={"max_steps": 12, "validate_every": 12})
    )
    history = losses(run)
    assert history[-1][3] < history[0][3]
    assert len(Translator.load(run, "cpu").translate(["A cat sleeps.", ""])) == 2


def test_validation_pairs_can_be_held_out_of_training(make_config):
    run = fit_on_cpu(make_config(data={"validation": {"holdout": 2}, "test": {}}))
    held_out = [json.loads(line) for line in (run / "data/validation.jsonl").read_text().splitlines()]
    assert len(held_out) == 2 and all(tuple(pair) in PAIRS for pair in held_out)
    assert json.loads((run / "data/summary.json").read_text())["kept"] == [6]


# ------------------------------------------------------------------------------ precision and micro-batches


def test_r_drop_begins_after_some_steps(make_config):
    recipe = {"r_drop": 5.0, "r_drop_after": 4, "batch_tokens": 128, "micro_batch_tokens": 128}
    model = {"dropout": 0.1}

    def run(name: str, steps: int, **changes: object) -> Path:
        training = {**recipe, "max_steps": steps, "warmup_steps": 2, "schedule": "constant", **changes}
        return fit_on_cpu(make_config(name, model=model, training=training))

    without = {"r_drop": 0.0, "r_drop_after": 0, "micro_batch_tokens": 64}  # R-Drop halves them
    plain = run("plain", 4, **without)
    assert same_weights(run("late", 4), plain)
    whole = run("whole", 8)
    assert not same_weights(whole, run("never", 8, **without))
    run("parts", 3)  # before R-Drop begins
    assert same_weights(run("parts", 8), whole)


def test_the_encoder_is_trained_after_some_steps(make_config):
    """Until then, all weights match those of a run with a frozen encoder, unless gradients are clipped."""
    recipe = {"warmup_steps": 2, "clip_norm": 0.0, "weight_decay": 0.1, "schedule": "constant"}

    def run(name: str, steps: int, **changes: object) -> Path:
        training = {**recipe, "max_steps": steps, **changes}
        return fit_on_cpu(make_config(name, model={"norm": "post", "dropout": 0.1}, training=training))

    late = load_model(run("late", 4, encoder_after=4)).model.state_dict()
    frozen = load_model(run("frozen", 4, freeze=["encoder"])).model.state_dict()
    for name, weight in late.items():
        if name.startswith("encoder"):
            assert torch.equal(weight, frozen[name])
        elif not name.endswith("query_key_value.bias"):  # that of keys has no gradient, except for rounding
            torch.testing.assert_close(weight, frozen[name])
    whole = run("whole", 8, encoder_after=4)
    assert not same_weights(whole, run("never", 8, freeze=["encoder"]))
    assert same_weights(run("default", 24), run("twice", 24, encoder_after=4))
    run("parts", 3, encoder_after=4)  # before it is trained
    assert same_weights(run("parts", 8), whole)  # the run keeps the number of steps


def test_a_run_that_ends_before_r_drop_or_the_encoder_begins_says_so(make_config, caplog):
    late = {"r_drop": 5.0, "r_drop_after": 2, "encoder_after": 3}
    for steps, warnings in ((1, 2), (3, 1), (4, 0)):
        caplog.clear()
        fit_on_cpu(make_config(f"run-{steps}", training={**late, "max_steps": steps}))
        assert caplog.text.count("is not reached in the planned") == warnings
        assert ("training.encoder_after (3) is not reached in the planned" in caplog.text) == (warnings > 0)


def test_a_run_of_an_earlier_version_trains_its_encoder_from_the_first_step(make_config):
    """Its config lacks the keys of later versions. A config that gives them as null resumes as well."""

    def run(name: str, steps: int, **changes: object) -> Path:
        training = {"max_steps": steps, "warmup_steps": 4, "schedule": "constant", **changes}
        return fit_on_cpu(make_config(name, model={"norm": "post"}, training=training))

    whole = run("whole", 6, encoder_after=0)
    for name, key in (("old", {}), ("null", {"encoder_after": None})):
        file = run(name, 3, encoder_after=0) / "config.yaml"
        if name == "old":
            lines = file.read_text().splitlines(keepends=True)
            kept = [line for line in lines if not re.match(" *(encoder_after|alignment_head):", line)]
            file.write_text("".join(kept))
            assert len(lines) - len(kept) == 2
        assert same_weights(run(name, 6, **key), whole)


@pytest.mark.parametrize("before", [False, True])
def test_a_model_or_run_may_get_an_alignment_head_later(make_config, before):
    first = fit_on_cpu(make_config(model={"alignment_head": before}, training={"max_steps": 2}))
    for head in (None, not before):
        model = {"alignment_head": head} if head is not None else {}
        later = {"max_steps": 2, "init_from": str(first)}
        tuned = fit_on_cpu(make_config(f"tuned-{head}", model=model, training=later))
        assert load_model(tuned).config.model.alignment_head == (before if head is None else head)
        decoding = read_yaml_file(tuned / "config.yaml")["decoding"]
        # That of a head is the last one.
        assert (decoding["alignment_layer"] is None) == (before or head is True)
    resumed = fit_on_cpu(make_config(model={"alignment_head": not before}, training={"max_steps": 4}))
    assert load_model(resumed).config.model.alignment_head != before
    if not before:  # the fine-tuned run has a layer, which would hide the head
        later = {"max_steps": 4, "init_from": str(first)}
        gained = fit_on_cpu(make_config("tuned-None", model={"alignment_head": True}, training=later))
        assert read_yaml_file(gained / "config.yaml")["decoding"]["alignment_layer"] is None


@pytest.mark.slow
def test_training_with_r_drop_resumes_exactly(make_config):
    keys = {"model": {"dropout": 0.3, "attention_dropout": 0.1, "word_dropout": 0.1}}
    recipe = {"r_drop": 5.0, "batch_tokens": 128, "micro_batch_tokens": 128}
    whole = fit_on_cpu(make_config("whole", **keys, training=recipe))
    fit_on_cpu(make_config("parts", **keys, training={**recipe, "max_steps": 5}))
    resumed = fit_on_cpu(make_config("parts", **keys, training=recipe))
    assert losses(resumed) == losses(whole) and same_weights(whole, resumed)


def test_the_size_of_micro_batches_does_not_change_a_run(make_config):
    whole = fit_on_cpu(make_config("whole", model={"dropout": 0.0}, training={"batch_tokens": 256}))
    cut = fit_on_cpu(
        make_config("cut", model={"dropout": 0.0}, training={"batch_tokens": 256, "micro_batch_tokens": 64})
    )
    for one, other in zip(losses(whole), losses(cut), strict=True):
        assert one == pytest.approx(other, rel=1e-4)


def test_training_and_translating_in_bf16(make_config, run_dir):
    whole, rough = (
        fit_on_cpu(make_config("whole")),
        fit_on_cpu(make_config("rough", training={"precision": "bf16"})),
    )
    for one, other in zip(losses(whole), losses(rough), strict=True):
        assert one != other and one == pytest.approx(other, rel=0.1)
    translator = Translator.load(run_dir, "cpu", ["decoding.precision=bf16"])
    assert [t.text for t in translator.translate([pair[0] for pair in PAIRS])] == [pair[1] for pair in PAIRS]


def test_the_arithmetic_is_logged_at_startup(make_config, caplog, set_threads):
    set_threads(2)
    with caplog.at_level("INFO", logger="mtrain"):
        fit_on_cpu(make_config())
    expected = r"device: cpu \(.+, \d+ threads\), fp32, torch .+, 2 workers, micro-batches of 64 tokens$"
    assert re.search(expected, caplog.text, re.MULTILINE)


def test_a_run_in_fp16_learns_and_resumes(make_config):
    keys = {"precision": "fp16", "max_steps": 6, "batch_tokens": 128}
    run = fit_on_cpu(make_config(training=keys))
    state = json.loads((last_checkpoint(run) / "state.json").read_text())
    assert state["loss_scale"][1] + state["skipped_steps"] >= 1
    fit_on_cpu(make_config(training={**keys, "max_steps": 8}))
    assert losses(run)[-1][3] < losses(run)[0][3]


# --------------------------------------------------------------------------------------------------- limits


def test_each_limit_ends_training(make_config, caplog):
    caplog.set_level("INFO", "mtrain")
    steps_an_epoch = len(
        losses(fit_on_cpu(make_config("a", training={"max_steps": None, "max_epochs": 1, "log_every": 1})))
    )
    assert steps_an_epoch > 1 and "max_epochs (1)" in caplog.text
    minutes = fit_on_cpu(make_config("b", training={"max_steps": None, "max_minutes": 1e-9}))
    assert last_checkpoint(minutes).name == "step-00000001" and "max_minutes (1e-09)" in caplog.text
    patience = {"patience": 1, "validate_every": 1, "learning_rate": 1e-9, "max_steps": 20}
    assert last_checkpoint(fit_on_cpu(make_config("c", training=patience))).name == "step-00000002"
    assert "no improvement in 1 validations" in caplog.text


@pytest.mark.parametrize(
    ("metric", "best"), [("bleu", 6), pytest.param("chrf", 4, marks=pytest.mark.slow), ("nll", 2)]
)
def test_the_best_checkpoint_is_kept_and_published(make_config, scripted_scores, metric, best):
    scripted_scores(
        Scores(1.0, 3, 10, 20, {}),
        Scores(2.0, 7, 10, 40, {}),
        Scores(float("nan"), 9, 30, 30, {}),
        Scores(3.0, 20, 20, 35, {}),
    )
    recipe = {"best_metric": metric, "max_steps": 8, "validate_every": 2, "keep_checkpoints": 1}
    run = fit_on_cpu(make_config(training=recipe))
    index = json.loads((run / "checkpoints/index.json").read_text())
    assert (index["best"], index["last"]) == (f"step-{best:08d}", "step-00000008")
    kept = {folder.name for folder in (run / "checkpoints").glob("step-*")}
    assert kept == {index["best"], index["last"]}
    best_weights = run / "checkpoints" / index["best"] / "model.safetensors"
    assert (run / "model/model.safetensors").read_bytes() == best_weights.read_bytes()


def test_the_newest_checkpoints_are_kept_whatever_caused_them(make_config, scripted_scores):
    scripted_scores(*map(with_bleu, range(9)))  # each validation is the best so far
    run = fit_on_cpu(
        make_config(training={"validate_every": 1, "checkpoint_every": 3, "keep_checkpoints": 2})
    )
    kept = sorted(folder.name for folder in (run / "checkpoints").glob("step-*"))
    assert kept == [f"step-{step:08d}" for step in (3, 6, 7, 8)]


def test_a_finished_run_resumes_only_when_its_limit_is_raised(make_config, caplog):
    caplog.set_level("INFO", "mtrain")
    run = fit_on_cpu(make_config())
    before = last_checkpoint(run)
    caplog.clear()
    fit_on_cpu(make_config())
    assert "already finished: max_steps (8)" in caplog.text and last_checkpoint(run) == before
    fit_on_cpu(make_config(training={"max_steps": 10}))
    assert "training.max_steps: 10, was 8" in caplog.text and last_checkpoint(run).name == "step-00000010"


@pytest.mark.parametrize("averaged", [1, 2])
def test_a_run_that_a_lowered_limit_ends_is_validated_once(make_config, scripted_scores, averaged):
    scripted_scores(*map(with_bleu, (10, 30, 20)))
    recipe = {"validate_every": 100, "checkpoint_every": 2, "average_checkpoints": averaged}

    def fit_to(steps: int, **more) -> list[int]:
        run = fit_on_cpu(make_config(training={**recipe, "max_steps": steps}, **more))
        return [line["step"] for line in read_metrics(run) if "validation" in line]

    assert fit_to(8) == [8]
    run = Path(make_config().run_dir)
    for part in ("checkpoints/step-00000006", "checkpoints/step-00000008", "model"):
        shutil.rmtree(run / part)  # as if it had been stopped at step 4
    (run / "checkpoints/index.json").unlink()
    state = run / "checkpoints/step-00000004/state.json"
    before = state.read_bytes()
    assert fit_to(4) == fit_to(4) == [4] and read_info(run / "model").training.steps == 4
    assert state.read_bytes() == before
    assert fit_to(8) == [4, 8]
    index = json.loads((run / "checkpoints/index.json").read_text())
    assert index["best"] == "step-00000004"  # whose outcome the run has not forgotten


def test_a_lowered_limit_does_not_replace_a_model_with_incomparable_scores(make_config, scripted_scores):
    scripted_scores(with_bleu(30), with_bleu(20))
    recipe = {"validate_every": 4, "checkpoint_every": 2, "max_steps": 8}
    run = fit_on_cpu(make_config(training=recipe))
    shutil.rmtree(run / "checkpoints/step-00000008")  # as if it had been stopped at step 6
    fit_on_cpu(make_config(training={**recipe, "max_steps": 6}, decoding={"max_length_ratio": 1.0}))
    assert read_info(run / "model").training.steps == 4


def test_metrics_have_the_documented_fields_and_each_step_once(make_config):
    run = fit_on_cpu(make_config())
    lines = read_metrics(run)
    training = [line for line in lines if "loss" in line]
    assert [line["step"] for line in training] == [2, 4, 6, 8]
    documented = {"step", "epoch", "loss", "nll", "learning_rate", "grad_norm", "target_tokens"}
    assert documented | {"target_tokens_per_second", "seconds", "time"} <= training[0].keys()
    assert [line["learning_rate"] for line in training] == pytest.approx([0.0025, 0.005, 0.005, 0.005])
    validation = [line for line in lines if "validation" in line]
    assert [line["step"] for line in validation] == [4, 8]
    assert validation[0]["validation"].keys() == {"nll", "perplexity", "bleu", "chrf"}


# --------------------------------------------------------------------------------------------------- resume


FEW_STOPS = [{"max_steps": 3}, {"max_epochs": 2}]
MORE_STOPS = [{"max_steps": 7}, {"max_epochs": 1}]


@pytest.mark.parametrize(
    ("kind", "stops"),
    [
        ("unigram", FEW_STOPS),
        pytest.param("unigram", MORE_STOPS, marks=pytest.mark.slow),
        pytest.param("bpe", FEW_STOPS + MORE_STOPS, marks=pytest.mark.slow),
    ],
)
def test_resumed_equals_uninterrupted_with_subword_sampling(make_config, kind, stops):
    sections = {"data": {"subword_sampling": 0.2}, "tokenizer": {"type": kind}, "model": {"dropout": 0.1}}
    recipe = {"log_every": 1, "validate_every": 100}
    whole = fit_on_cpu(make_config("whole", **sections, training={**recipe, "max_steps": 14}))
    assert len({epoch for _, epoch, *_ in losses(whole)}) > 2
    for number, stop in enumerate(stops):
        name = f"parts{number}"
        parts = fit_on_cpu(make_config(name, **sections, training={**recipe, "max_steps": 100, **stop}))
        state = json.loads((last_checkpoint(parts) / "state.json").read_text())
        assert (state["next_batch"] == 0) == ("max_epochs" in stop)
        resumed = fit_on_cpu(make_config(name, **sections, training={**recipe, "max_steps": 14}))
        assert losses(resumed) == losses(whole) and same_weights(whole, resumed), stop


@pytest.mark.parametrize("schedule", ["cosine", pytest.param("linear", marks=pytest.mark.slow)])
def test_max_epochs_ends_with_the_last_epoch_when_epochs_differ_in_length(make_config, schedule):
    """The planned number of steps assumes epochs as long as the first, so it is an estimate."""
    recipe = {"max_steps": None, "max_epochs": 5, "schedule": schedule, "log_every": 1, "validate_every": 99}
    sections = {"data": {"subword_sampling": 0.1}, "tokenizer": {"type": "bpe"}}
    run = fit_on_cpu(make_config(**sections, training=recipe))
    epochs = [epoch for _, epoch, *_ in losses(run)]
    assert set(epochs) == {1, 2, 3, 4, 5} and len({epochs.count(epoch) for epoch in range(1, 6)}) > 1
    state = json.loads((last_checkpoint(run) / "state.json").read_text())
    assert (state["epoch"], state["next_batch"]) == (5, 0)
    rates = [line["learning_rate"] for line in read_metrics(run) if "loss" in line]
    assert min(rates) >= 0 and rates[4:] == sorted(rates[4:], reverse=True)


def test_a_batch_uses_the_segmentation_of_its_epoch(make_config):
    loader = make_trainer(make_config(data={"subword_sampling": 0.2}), device="cpu").loader
    steps = list(islice(loader.steps(), 3 * loader.planner.open(Position()).steps_in_epoch))
    assert {1, 2, 3} <= {taken.epoch for taken in steps}
    ahead = loader.steps()
    for taken in steps:
        again = next(ahead)
        loader.planner.open(Position(taken.epoch))  # plans the next epoch
        assert again.next == taken.next
        assert all(torch.equal(a.labels, b.labels) for a, b in zip(again.batches, taken.batches, strict=True))
        for batch in taken.batches:
            source, target = loader.planner.corpus.open(Position(taken.epoch - 1)).fetch(batch.rows)
            assert batch.target_tokens == len(target.ids)
            assert batch.source[batch.source_keep].tolist() == source.ids.tolist()


def test_validation_decodes_alike_whatever_the_decoding_section_says(make_config):
    recipe = {"validation_beam_size": 3, "max_steps": 4}
    decoding = {"beam_size": 4, "samples": 4, "mbr": "chrf"}
    plain, other = (
        make_config("plain", training=recipe),
        make_config("other", decoding=decoding, training=recipe),
    )
    used = make_trainer(other, device="cpu").selection.validator.decoding
    assert (used.beam_size, used.samples, used.mbr) == (3, None, None)
    scores = [
        [line.get("validation") for line in read_metrics(fit_on_cpu(config))] for config in (plain, other)
    ]
    assert scores[0] == scores[1] and scores[0][-1]


def test_resuming_from_an_older_checkpoint_renames_the_newer_ones(make_config, monkeypatch):
    run = fit_on_cpu(make_config(training={"max_steps": 12}))
    first, model = losses(run), (run / "model/manifest.json").read_bytes()
    older = run / "checkpoints/step-00000004"
    fit_on_cpu(
        make_config(training={"max_steps": 4}), resume=str(older)
    )  # already finished, so nothing changes
    assert last_checkpoint(run).is_dir() and not list((run / "checkpoints").glob("superseded-*"))
    assert losses(run) == first and (run / "model/manifest.json").read_bytes() == model
    monkeypatch.chdir(older.parent)
    fit_on_cpu(make_config(training={"max_steps": 12}), resume=older.name)
    assert losses(run) == first and last_checkpoint(run).name == "step-00000012"
    names = {folder.name for folder in (run / "checkpoints").iterdir() if folder.is_dir()}
    assert names >= {"superseded-step-00000008", "superseded-step-00000012", "step-00000008", "step-00000012"}
    fit_on_cpu(make_config(training={"max_steps": 8}), resume=older.name)  # what was renamed before stays
    assert {f"superseded-step-{step}" for step in ("00000012", "00000008-2", "00000012-2")} <= {
        folder.name for folder in older.parent.iterdir()
    }
    with pytest.raises(ModelError, match="no such checkpoint in"):
        fit_on_cpu(make_config("another"), resume=str(older))


def test_the_layer_for_word_alignments_is_chosen_for_the_best_model(make_config):
    run = fit_on_cpu(make_config(model={"decoder_layers": 3}, training={"max_steps": 8}))
    found = load_model(run)
    layer = choose_alignment_layer(found.model, found.tokenizer, PAIRS, torch.device("cpu"))
    assert found.config.decoding.alignment_layer == layer is not None
    fit_on_cpu(make_config(model={"decoder_layers": 3}, training={"max_steps": 8}))  # already finished
    assert load_model(run).config.decoding.alignment_layer == layer
    explicit = (layer + 1) % 3
    fit_on_cpu(
        make_config(
            training={"max_steps": 8}, model={"decoder_layers": 3}, decoding={"alignment_layer": explicit}
        )
    )
    assert load_model(run).config.decoding.alignment_layer == explicit


def test_training_continues_without_a_layer_for_word_alignments(make_config, monkeypatch, caplog):
    def failing(*_):
        raise RuntimeError("out of memory")

    whole = fit_on_cpu(make_config("whole"))
    monkeypatch.setattr(validate, "choose_alignment_layer", failing)
    run = fit_on_cpu(make_config("failing"))
    assert "the layer for word alignments could not be chosen: out of memory" in caplog.text
    assert load_model(run).config.decoding.alignment_layer is None
    assert losses(run) == losses(whole) and same_weights(run, whole)


def test_the_best_checkpoint_may_be_missing(make_config, scripted_scores, caplog):
    scripted_scores(with_bleu(20), with_bleu(10))
    run = fit_on_cpu(make_config(training={"max_steps": 8, "keep_checkpoints": 3}))
    best = f"step-{json.loads((run / 'checkpoints/step-00000008/state.json').read_text())['best_step']:08d}"
    assert best != "step-00000008"
    (run / "checkpoints" / best).rename(run / "gone")
    model = (run / "model/manifest.json").read_bytes()
    fit_on_cpu(make_config(training={"max_steps": 8, "keep_checkpoints": 3}))
    assert f"{best}: no longer exists; model/ is not updated" in caplog.text
    assert (run / "model/manifest.json").read_bytes() == model


def test_an_epoch_without_pairs_is_an_error_and_no_hang(make_config, raw_config):
    files = {**raw_config["data"]["train"], "weight": 0.001}
    with pytest.raises(DataError, match="no training pairs"):
        fit_on_cpu(make_config(data={"train": files}))
