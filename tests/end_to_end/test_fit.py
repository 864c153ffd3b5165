"""Training end to end: it learns, it stops when told, it goes on exactly where it stopped."""

import json
import os
import re
import shutil
import threading
from pathlib import Path

import pytest
import torch
import yaml

from mtrain import Translator
from mtrain.checkpoint.model_folder import load_model, save_model_folder
from mtrain.config.schema import ModelConfig
from mtrain.decoding.decode import Decoder
from mtrain.errors import DataError, ModelError, UsageError
from mtrain.model.layers import Dropout
from mtrain.model.transformer import Transformer
from mtrain.tokenizer.tokenizer import Tokenizer
from mtrain.training import loop, step, validate
from mtrain.training.loop import make_trainer
from mtrain.training.run_folder import tokenize
from mtrain.training.step import Learner, make_optimizer
from mtrain.training.validate import Scores
from tests.support.training import (
    PAIRS,
    Poisoned,
    batches_of,
    go,
    last_checkpoint,
    losses,
    read_metrics,
    same_weights,
)

# ------------------------------------------------------------------------------------------------ learning


def test_eight_pairs_are_learnt_by_heart_and_decoded_exactly(run_dir):
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
        ({"norm": "post", "positions": "learned", "activation": "gelu", "tie_embeddings": "decoder"}, {}),
        (
            {"positions": "rotary", "activation": "swiglu", "tie_embeddings": "none"},
            {"joint": False, "vocab_size": 305},
        ),
        ({"positions": "sinusoidal_interleaved", "activation": "silu"}, {"type": "bpe"}),
        ({"encoder_layers": 3, "decoder_layers": 1, "preset": "tiny", "dropout": 0.0}, {"symbols": ["<bt>"]}),
    ],
)  # fmt: skip
def test_every_architecture_trains_saves_and_translates(make_config, model, tokenizer):
    run = go(make_config(model=model, tokenizer=tokenizer, training={"max_steps": 30, "validate_every": 30}))
    history = losses(run)
    assert history[-1][3] < history[0][3]
    assert len(Translator.load(run, "cpu").translate(["A cat sleeps.", ""])) == 2


def test_validation_pairs_can_be_held_out_of_training(make_config):
    run = go(make_config(data={"validation": {"holdout": 2}, "test": {}}))
    held_out = [json.loads(line) for line in (run / "data/validation.jsonl").read_text().splitlines()]
    assert len(held_out) == 2 and all(tuple(pair) in PAIRS for pair in held_out)
    assert json.loads((run / "data/summary.json").read_text())["kept"] == [6]


# ------------------------------------------------------------------------------------------------ the step


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_four_accumulations_are_one_batch(parts, workers):
    config, model, data, tokenizer = parts
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    changes = []
    for split in ([[0, 1, 2, 3, 4, 5, 6, 7]], [[6], [0, 1, 2], [7, 3], [4, 5]]):  # of unequal token counts
        model.load_state_dict(before)
        batches = batches_of(split, data, tokenizer)
        tokens = sum(batch.target_tokens for batch in batches)
        learner = Learner(model, config.training, workers)
        learner.optimizer = torch.optim.SGD(model.parameters(), fused=True)
        sums = learner.step(batches, tokens, 1.0)
        changes.append(
            {name: p.detach() - before[name] for name, p in model.named_parameters()} | {"loss": sums.values}
        )
    assert changes[0].keys() == changes[1].keys()
    for name, change in changes[0].items():
        torch.testing.assert_close(change, changes[1][name], rtol=1e-10, atol=1e-12)
        assert change.abs().max() > 0


@pytest.mark.parametrize("workers", [1, 2])
def test_r_drop_without_dropout_is_the_ordinary_step_and_with_it_costs_more(parts, workers):
    config, model, data, tokenizer = parts
    start = {name: p.detach().clone() for name, p in model.named_parameters()}

    def step(rate, split, **keys):
        model.load_state_dict(start)
        for module in model.modules():
            if isinstance(module, Dropout):
                module.rate = rate
        batches = batches_of(split, data, tokenizer)
        learner = Learner(model, config.training.model_copy(update=keys), workers)
        learner.optimizer = torch.optim.SGD(model.parameters(), fused=True)
        torch.manual_seed(3)
        values = learner.step(batches, sum(batch.target_tokens for batch in batches), 1.0).values
        return values, [p.detach().clone() for p in model.parameters()]

    whole, cut = [[0, 1, 2, 3, 4, 5, 6, 7]], [[6], [0, 1, 2], [7, 3], [4, 5]]  # of unequal token counts
    ordinary = step(0.0, whole)
    for split in (whole, cut):
        torch.testing.assert_close(step(0.0, split, r_drop=5.0), ordinary, rtol=1e-9, atol=1e-12)
        (loss, nll, *_), _ = step(0.3, split, r_drop=1e-9)
        (with_alpha, same_nll, *_), _ = step(0.3, split, r_drop=5.0)
        assert same_nll == nll  # the same dropout
        assert with_alpha > loss > ordinary[0][0]


def test_training_with_r_drop_goes_on_exactly_where_it_stopped(make_config):
    keys = {"model": {"dropout": 0.3, "attention_dropout": 0.1, "word_dropout": 0.1}}
    recipe = {"r_drop": 5.0, "batch_tokens": 128, "micro_batch_tokens": 128}
    whole = go(make_config("whole", **keys, training=recipe))
    go(make_config("parts", **keys, training={**recipe, "max_steps": 5}))
    resumed = go(make_config("parts", **keys, training=recipe))
    assert losses(resumed) == losses(whole) and same_weights(whole, resumed)


def test_a_recipe_gives_the_same_run_however_a_step_is_cut_into_micro_batches(make_config):
    whole = go(make_config("whole", model={"dropout": 0.0}, training={"batch_tokens": 256}))
    cut = go(
        make_config("cut", model={"dropout": 0.0}, training={"batch_tokens": 256, "micro_batch_tokens": 64})
    )
    for one, other in zip(losses(whole), losses(cut), strict=True):
        assert one == pytest.approx(other, rel=1e-4)


def test_every_key_of_the_step_reaches_it(parts):
    config, model, data, tokenizer = parts
    model = model.float()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}

    def step(**keys):
        model.load_state_dict(start)
        recipe = config.training.model_copy(update=keys)
        batches = batches_of([[0, 1, 2, 3]], data, tokenizer)
        learner = Learner(model, recipe)
        learner.optimizer = torch.optim.SGD(model.parameters(), fused=True)
        sums = learner.step(batches, batches[0].target_tokens, 0.5)
        moved = sum(float((p.detach() - start[name]).square().sum()) for name, p in model.named_parameters())
        return sums.values[0], sums.values[1], sums.values[2], moved**0.5

    loss, nll, norm, moved = step(label_smoothing=0.0)
    assert loss == nll and moved == pytest.approx(0.5 * float(norm), rel=1e-3)
    smoothed, same_nll, *_ = step(label_smoothing=0.2)
    assert smoothed > loss and same_nll == nll
    *_, norm, moved = step(clip_norm=0.01)
    assert norm > 0.01 and moved == pytest.approx(0.5 * 0.01, rel=1e-3)
    rough, *_ = step(precision="bf16", label_smoothing=0.0)
    assert rough != loss and rough == pytest.approx(float(loss), rel=0.1)
    betas = make_optimizer(model, config.training.model_copy(update={"betas": (0.8, 0.9)})).defaults["betas"]
    assert betas == (0.8, 0.9)


def test_training_and_translating_in_bf16(make_config, run_dir):
    whole, rough = go(make_config("whole")), go(make_config("rough", training={"precision": "bf16"}))
    for one, other in zip(losses(whole), losses(rough), strict=True):
        assert one != other and one == pytest.approx(other, rel=0.1)
    translator = Translator.load(run_dir, "cpu", ["decoding.precision=bf16"])
    assert [t.text for t in translator.translate([pair[0] for pair in PAIRS])] == [pair[1] for pair in PAIRS]


def test_fp16_scales_the_loss_down_when_it_overflows_and_up_again(parts, monkeypatch):
    config, model, data, tokenizer = parts
    recipe = config.training.model_copy(update={"precision": "fp16"})
    batch = batches_of([[0, 1, 2]], data, tokenizer)
    model = Poisoned(model.float())
    learner, plain = Learner(model, recipe), Learner(model, config.training)
    monkeypatch.setattr(step.LossScale, "GROWTH", 2)
    factors, norms = [], []
    for poison in (True, False, False, False):
        model.poison = poison
        norms.append(float(learner.step(batch, batch[0].target_tokens, 0.0).values[2]))
        factors.append(learner.scale.state()[0])
    assert factors == [32768, 32768, 65536, 65536]
    expected = plain.step(batch, batch[0].target_tokens, 0.0).values
    assert norms[1] == pytest.approx(float(expected[2]), rel=0.02)  # unscaled before it is clipped
    assert plain.scale.state() == []  # else a run that goes on in fp16 would start from a scale of 1
    other = Learner(model, recipe)
    other.scale.restore(learner.scale.state())
    assert other.scale.state() == learner.scale.state() == [65536, 1]


def test_the_update_keeps_to_the_cores_of_one_worker(parts, monkeypatch):
    """All cores would wait for each other at every parameter, and for long where another program has one."""
    config, model, data, tokenizer = parts
    learner, threads = Learner(model, config.training, workers=2), []
    real = learner.optimizer.step
    monkeypatch.setattr(
        learner.optimizer, "step", lambda: (threads.append(threading.current_thread().name), real())
    )
    learner.step(batches_of([[0, 1], [2, 3]], data, tokenizer), 9, 0.1)
    assert len(threads) == 1 and threads[0].startswith("mtrain_")


def test_what_goes_wrong_in_a_worker_is_told(parts, monkeypatch):
    config, model, data, tokenizer = parts
    learner = Learner(model, config.training, workers=2)
    batches = batches_of([[0, 1], [2, 3]], data, tokenizer)
    monkeypatch.setattr(step, "translation_loss", lambda *_: (_ for _ in ()).throw(MemoryError))
    with pytest.raises(MemoryError):
        learner.step(batches, 9, 0.1)


def test_the_start_says_what_was_chosen(make_config, caplog, monkeypatch):
    monkeypatch.setattr(loop, "workers_for", lambda _: 2)
    with caplog.at_level("INFO", logger="mtrain"):
        go(make_config())
    said = r"device: cpu \(.+, \d+ threads\), fp32, torch .+, 2 side by side, micro-batches of 64 tokens$"
    assert re.search(said, caplog.text, re.MULTILINE)


def test_a_run_in_fp16_learns_and_goes_on(make_config):
    keys = {"precision": "fp16", "max_steps": 6, "batch_tokens": 128}
    run = go(make_config(training=keys))
    state = json.loads((last_checkpoint(run) / "state.json").read_text())
    assert state["loss_scale"][1] + state["skipped_steps"] >= 1
    go(make_config(training={**keys, "max_steps": 8}))
    assert losses(run)[-1][3] < losses(run)[0][3]


@pytest.mark.slow
def test_compiled_or_not_the_steps_are_the_same(make_config):
    with_dropout = go(make_config("dropout", training={"compile": "on"}))
    assert losses(with_dropout)[-1][3] < losses(with_dropout)[0][3]
    model = {"dropout": 0.0}
    plain = go(make_config("plain", model=model))
    compiled = go(make_config("compiled", model=model, training={"compile": "on"}))
    for one, other in zip(losses(plain), losses(compiled), strict=True):
        assert one == pytest.approx(other, rel=1e-3)


@pytest.mark.parametrize("tie", ["none", "decoder", "all"])
def test_weight_decay_is_of_matrices_and_embeddings_and_spares_biases_and_norms(make_config, tie):
    words = {"source_vocab_size": 9, "target_vocab_size": 9, "max_positions": 8, "output_bias": True}
    model = Transformer(ModelConfig(**words, d_model=8, ffn_dim=12, positions="learned", tie_embeddings=tie))
    groups = make_optimizer(model, make_config(training={"weight_decay": 0.1}).training).param_groups
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    decayed, spared = ({id(p) for p in group["params"]} for group in groups)
    assert len(decayed) + len(spared) == len(list(model.parameters())) and not decayed & spared
    for name, parameter in model.named_parameters():
        small = "norm" in name or name.endswith("bias")
        assert id(parameter) in (spared if small else decayed), name


# --------------------------------------------------------------------------------------------------- limits


def test_each_limit_ends_training(make_config, caplog):
    caplog.set_level("INFO", "mtrain")
    steps_an_epoch = len(
        losses(go(make_config("a", training={"max_steps": None, "max_epochs": 1, "log_every": 1})))
    )
    assert steps_an_epoch > 1 and "max_epochs (1)" in caplog.text
    minutes = go(make_config("b", training={"max_steps": None, "max_minutes": 1e-9}))
    assert last_checkpoint(minutes).name == "step-00000001" and "max_minutes (1e-09)" in caplog.text
    patience = {"patience": 1, "validate_every": 1, "learning_rate": 1e-9, "max_steps": 20}
    assert last_checkpoint(go(make_config("c", training=patience))).name == "step-00000002"
    assert "no better bleu in 1 validations" in caplog.text


@pytest.mark.parametrize(("metric", "best"), [("bleu", 6), ("chrf", 4), ("nll", 2)])
def test_the_best_checkpoint_is_kept_and_published(make_config, monkeypatch, metric, best):
    told = iter(
        [
            Scores(1.0, 3, 10, 20),
            Scores(2.0, 7, 10, 40),
            Scores(float("nan"), 9, 30, 30),
            Scores(3.0, 20, 20, 35),
        ]
    )
    monkeypatch.setattr(loop.Validator, "__call__", lambda *_: next(told))
    recipe = {"best_metric": metric, "max_steps": 8, "validate_every": 2, "keep_checkpoints": 1}
    run = go(make_config(training=recipe))
    index = json.loads((run / "checkpoints/index.json").read_text())
    assert index == {"best": f"step-{best:08d}", "last": "step-00000008"}
    kept = {folder.name for folder in (run / "checkpoints").glob("step-*")}
    assert kept == {index["best"], index["last"]}
    best_weights = run / "checkpoints" / index["best"] / "model.safetensors"
    assert (run / "model/model.safetensors").read_bytes() == best_weights.read_bytes()


def test_the_newest_checkpoints_are_kept_whatever_they_were_written_for(make_config, monkeypatch):
    told = iter([Scores(1.0, 3, bleu, 20) for bleu in range(9)])  # each validation is the best so far
    monkeypatch.setattr(loop.Validator, "__call__", lambda *_: next(told))
    run = go(make_config(training={"validate_every": 1, "checkpoint_every": 3, "keep_checkpoints": 2}))
    kept = sorted(folder.name for folder in (run / "checkpoints").glob("step-*"))
    assert kept == [f"step-{step:08d}" for step in (3, 6, 7, 8)]


def test_a_finished_run_says_so_and_goes_on_when_the_limit_is_raised(make_config, caplog):
    caplog.set_level("INFO", "mtrain")
    run = go(make_config())
    before = last_checkpoint(run)
    caplog.clear()
    go(make_config())
    assert "already finished: max_steps (8)" in caplog.text and last_checkpoint(run) == before
    go(make_config(training={"max_steps": 10}))
    assert "training.max_steps: 10, was 8" in caplog.text and last_checkpoint(run).name == "step-00000010"


def test_metrics_have_the_promised_fields_and_no_step_twice(make_config):
    run = go(make_config())
    lines = read_metrics(run)
    training = [line for line in lines if "loss" in line]
    assert [line["step"] for line in training] == [2, 4, 6, 8]
    promised = {"step", "epoch", "loss", "nll", "learning_rate", "grad_norm", "target_tokens"}
    assert promised | {"target_tokens_per_second", "seconds", "time"} <= training[0].keys()
    assert [line["learning_rate"] for line in training] == pytest.approx([0.0025, 0.005, 0.005, 0.005])
    validation = [line for line in lines if "validation" in line]
    assert [line["step"] for line in validation] == [4, 8]
    assert validation[0]["validation"].keys() == {"nll", "perplexity", "bleu", "chrf"}


# --------------------------------------------------------------------------------------------------- resume


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
@pytest.mark.parametrize("stop", [{"max_steps": 3}, {"max_steps": 7}, {"max_epochs": 1}, {"max_epochs": 2}])
def test_resumed_equals_uninterrupted_where_segmentation_is_sampled(make_config, kind, stop):
    sections = {"data": {"subword_sampling": 0.2}, "tokenizer": {"type": kind}, "model": {"dropout": 0.1}}
    recipe = {"log_every": 1, "validate_every": 100}
    whole = go(make_config("whole", **sections, training={**recipe, "max_steps": 14}))
    go(make_config("parts", **sections, training={**recipe, "max_steps": 100, **stop}))
    state = json.loads((last_checkpoint(whole.parent / "parts") / "state.json").read_text())
    assert (state["next_batch"] == 0) == ("max_epochs" in stop)
    resumed = go(make_config("parts", **sections, training={**recipe, "max_steps": 14}))
    assert losses(resumed) == losses(whole) and len({epoch for _, epoch, *_ in losses(whole)}) > 2
    assert same_weights(whole, resumed)


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_max_epochs_ends_with_its_last_epoch_where_epochs_differ_in_length(make_config, schedule):
    """The planned steps are those of the first epoch times the number, and so an estimate."""
    recipe = {"max_steps": None, "max_epochs": 5, "schedule": schedule, "log_every": 1, "validate_every": 99}
    run = go(make_config(data={"subword_sampling": 0.1}, training=recipe))
    epochs = [epoch for _, epoch, *_ in losses(run)]
    assert set(epochs) == {1, 2, 3, 4, 5} and len({epochs.count(epoch) for epoch in range(1, 6)}) > 1
    state = json.loads((last_checkpoint(run) / "state.json").read_text())
    assert (state["epoch"], state["next_batch"]) == (5, 0)
    rates = [line["learning_rate"] for line in read_metrics(run) if "loss" in line]
    assert min(rates) >= 0 and rates[4:] == sorted(rates[4:], reverse=True)


def test_a_batch_comes_from_the_segmentation_of_its_epoch(make_config):
    feed = make_trainer(make_config(data={"subword_sampling": 0.2}), device="cpu", quiet=True).feed
    steps = [taken for taken, _ in zip(feed.steps(0, 0), range(3 * len(feed.plan(0).steps)), strict=False)]
    assert {1, 2, 3} <= {taken.epoch for taken in steps}
    ahead = feed.steps(0, 0)
    for taken in steps:
        again = next(ahead)
        feed.plan(taken.epoch)  # the one after it
        assert again.position == taken.position
        assert all(torch.equal(a.labels, b.labels) for a, b in zip(again.batches, taken.batches, strict=True))
        for batch in taken.batches:
            source, target = feed.corpus.epoch(taken.epoch - 1).fetch(batch.rows)
            assert batch.target_tokens == len(target.flatten())
            assert batch.source[batch.source_keep].tolist() == source.flatten().to_pylist()


def test_validation_searches_as_the_recipe_says_whatever_decoding_does(make_config, monkeypatch):
    searched = []
    monkeypatch.setattr(
        validate, "Decoder", lambda config, *rest, **alone: searched.append(config) or Decoder(config, *rest)
    )
    decoding = {"beam_size": 4, "samples": 4, "mbr": "chrf"}
    go(make_config(decoding=decoding, training={"validation_beam_size": 3, "max_steps": 4}))
    assert [(c.beam_size, c.samples, c.mbr) for c in searched] == [(3, None, None)]


def test_what_may_not_change_is_named(make_config):
    go(make_config())
    with pytest.raises(UsageError, match=r"model\.dropout was 0\.1 .* is 0\.2 now"):
        go(make_config(model={"dropout": 0.2}))
    with pytest.raises(UsageError, match="validation_beam_size was 1 when this run began and is 2 now"):
        go(make_config(training={"validation_beam_size": 2}))
    with pytest.raises(UsageError, match="--resume never"):
        go(make_config(), resume="never")
    with pytest.raises(ModelError, match="no such checkpoint"):
        go(make_config(), resume="nowhere")
    go(make_config(decoding={"beam_size": 2}, training={"patience": 3, "log_every": 1}))


def test_going_back_to_an_older_checkpoint_sets_the_newer_ones_aside(make_config, monkeypatch):
    run = go(make_config(training={"max_steps": 12}))
    first, model = losses(run), (run / "model/manifest.json").read_bytes()
    older = run / "checkpoints/step-00000004"
    go(make_config(training={"max_steps": 4}), resume=str(older))  # nothing to do, so nothing is changed
    assert last_checkpoint(run).is_dir() and not list((run / "checkpoints").glob("superseded-*"))
    assert losses(run) == first and (run / "model/manifest.json").read_bytes() == model
    monkeypatch.chdir(older.parent)
    go(make_config(training={"max_steps": 12}), resume=older.name)
    assert losses(run) == first and last_checkpoint(run).name == "step-00000012"
    names = {folder.name for folder in (run / "checkpoints").iterdir() if folder.is_dir()}
    assert names >= {"superseded-step-00000008", "superseded-step-00000012", "step-00000008", "step-00000012"}
    go(make_config(training={"max_steps": 8}), resume=older.name)  # what was set aside before stays
    assert {f"superseded-step-{step}" for step in ("00000012", "00000008-2", "00000012-2")} <= {
        folder.name for folder in older.parent.iterdir()
    }
    with pytest.raises(ModelError, match="no such checkpoint in"):
        go(make_config("another"), resume=str(older))


def test_the_best_checkpoint_may_be_gone_after_going_back(make_config, caplog):
    run = go(make_config(training={"max_steps": 8, "keep_checkpoints": 3}))
    best = f"step-{json.loads((run / 'checkpoints/step-00000008/state.json').read_text())['best_step']:08d}"
    assert best != "step-00000008"
    (run / "checkpoints" / best).rename(run / "gone")
    model = (run / "model/manifest.json").read_bytes()
    go(make_config(training={"max_steps": 8, "keep_checkpoints": 3}))
    assert f"{best}: is gone; model/ stays as it is" in caplog.text
    assert (run / "model/manifest.json").read_bytes() == model


def test_missing_corpora_show_before_any_work(make_config, tmp_path):
    with pytest.raises(DataError, match=r"nowhere\.en: no such file"):
        go(make_config(data={"test": {"t": {"source": "nowhere.en", "target": "nowhere.de"}}}))
    assert not (tmp_path / "run").exists()


# -------------------------------------------------------------------------------------------- model folder


def test_the_model_folder_is_all_one_needs_and_is_saved_alike_each_time(run_dir, tmp_path):
    contents = (run_dir / "model/config.yaml").read_text()
    best = json.loads((run_dir / "checkpoints/index.json").read_text())["best"]
    weights = run_dir / "checkpoints" / best / "model.safetensors"
    save_model_folder(tmp_path / "copy", weights, contents, Tokenizer(run_dir / "tokenizer"))
    files = {path.relative_to(run_dir / "model") for path in (run_dir / "model").rglob("*") if path.is_file()}
    assert {str(file) for file in files} >= {
        "config.yaml",
        "manifest.json",
        "model.safetensors",
        "tokenizer/joint.model",
    }
    for file in files:
        assert (tmp_path / "copy" / file).read_bytes() == (run_dir / "model" / file).read_bytes()
    assert Translator.load(tmp_path / "copy", "cpu").translate(["It rains."])[0].text == "Es regnet."


def test_a_model_folder_from_before_there_were_kinds_of_dropout_loads(run_dir, tmp_path):
    contents = (run_dir / "model/config.yaml").read_text()
    older = [line for line in contents.splitlines() if "_dropout:" not in line]
    assert len(older) == len(contents.splitlines()) - 3
    weights, copy = run_dir / "model/model.safetensors", tmp_path / "copy"
    save_model_folder(copy, weights, "\n".join(older), Tokenizer(run_dir / "tokenizer"))
    assert load_model(copy).config == load_model(run_dir / "model").config


def test_a_model_folder_that_a_crash_left_behind_is_made_anew(make_config):
    run = go(make_config())
    good = (run / "model/model.safetensors").read_bytes()
    (run / "model/model.safetensors").write_bytes(b"stale")
    (run / "model/manifest.json").write_text("{}")
    go(make_config())  # a finished run
    assert (run / "model/model.safetensors").read_bytes() == good
    go(make_config(decoding={"beam_size": 2, "max_length_ratio": 1.4}))
    assert load_model(run).config.decoding.beam_size == 2
    assert load_model(run).config.decoding.max_length_ratio == 1.4


def test_a_tokenizer_can_be_taken_from_another_model(make_config, run_dir):
    run = go(make_config(tokenizer={"path": str(run_dir)}))
    assert (run / "tokenizer/joint.model").read_bytes() == (run_dir / "tokenizer/joint.model").read_bytes()
    with pytest.raises(ModelError, match="no tokenizer/"):
        go(make_config("other", tokenizer={"path": str(run_dir / "checkpoints")}))


def test_a_tokenizer_learnt_with_other_settings_is_not_used(make_config):
    config = make_config()
    tokenize(config)
    with pytest.raises(UsageError, match="other tokenizer settings"):
        go(make_config(tokenizer={"vocab_size": 331}))
    settings = Path(config.run_dir) / "tokenizer" / "config.yaml"
    known = yaml.safe_load(settings.read_text())
    del known["symbols"]  # as an mtrain wrote that did not know the key yet
    settings.write_text(yaml.safe_dump(known))
    tokenize(config)
    tokenize(make_config(tokenizer={"vocab_size": 331}), force=True)
    go(make_config(tokenizer={"vocab_size": 331}))
    with pytest.raises(UsageError, match="checkpoints need this tokenizer"):
        tokenize(config, force=True)


# --------------------------------------------------------------------------- what is not ours stays untouched


@pytest.mark.parametrize(
    "name", ["data/train.en", "config.yaml", "model/readme", "metrics.jsonl", "origin.json"]
)
def test_a_folder_with_files_of_somebody_else_is_no_run_folder(make_config, tmp_path, name):
    file = tmp_path / "mine" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("precious")
    for start in (go, tokenize):
        with pytest.raises(UsageError, match="is no run folder of mtrain"):
            start(make_config("mine"))
    assert [path for path in (tmp_path / "mine").rglob("*") if path.is_file()] == [file]
    assert file.read_text() == "precious"


def test_a_model_folder_is_no_run_folder(make_config, run_dir, tmp_path):
    shutil.copytree(run_dir / "model", tmp_path / "model")
    with pytest.raises(UsageError, match="is no run folder of mtrain"):
        go(make_config("model"))
    assert Translator.load(tmp_path / "model", "cpu").translate(["It rains."])[0].text == "Es regnet."


def test_what_a_crash_left_in_a_run_is_cleared(make_config):
    run = go(make_config())
    (run / "checkpoints/.step-00000009.tmp").mkdir()
    (run / ".data.tmp").mkdir()
    (run / "data/.epoch-x").write_text("")
    go(make_config(training={"max_steps": 10}))
    left = [file.name for name in ("", "checkpoints", "data") for file in (run / name).glob(".*")]
    assert left == [".lock"]


def test_an_epoch_without_pairs_is_an_error_and_no_hang(make_config, raw_config):
    files = {**raw_config["data"]["train"], "weight": 0.001}
    with pytest.raises(DataError, match="no pair to train on"):
        go(make_config(data={"train": files}))


def test_a_tokenizer_older_than_the_text_is_told(make_config, corpus, tmp_path, caplog):
    files = {"source": str(tmp_path / "t.en"), "target": str(tmp_path / "t.de")}
    for side, language in (("source", "en"), ("target", "de")):
        Path(files[side]).write_bytes((corpus / f"train.{language}").read_bytes())
    tokenize(make_config(data={"train": files}))
    os.utime(files["source"])
    tokenize(make_config(data={"train": files}))
    assert "learnt before" not in caplog.text  # a touched file is the same text
    Path(files["source"]).write_bytes(Path(files["source"]).read_bytes().replace(b"cat", b"cow"))
    go(make_config(data={"train": files}))
    assert "learnt before data.train changed" in caplog.text
    caplog.clear()
    go(make_config(data={"train": files}, training={"max_steps": 10}))
    assert "learnt before" not in caplog.text  # the checkpoints need this one
