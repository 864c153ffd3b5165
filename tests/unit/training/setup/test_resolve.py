"""Starting from another model: what is loaded, what must match, what is frozen, and how corpora are mixed."""

import hashlib
import json
import logging
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from mtrain.checkpoint.model_folder import load_model
from mtrain.config.load import validate
from mtrain.config.schema import Config
from mtrain.data.epochs.schedule import Position
from mtrain.errors import ModelError, UsageError
from mtrain.training.fit import make_trainer
from mtrain.training.setup.prepare_run import prepare_only
from mtrain.training.setup.resolve import resolve_config
from mtrain.training.setup.tokenizer import tokenize
from tests.support.training import (
    PAIRS,
    fit_on_cpu,
    last_checkpoint,
    losses,
    merged,
    read_metrics,
    same_weights,
    weights,
)


@pytest.fixture
def tuned(raw_config, run_dir, tmp_path):
    """Build the config of a run that starts from the model that has memorized the eight pairs, without the
    automatic recipe."""

    def make(run="run", init_from=run_dir, **sections) -> Config:
        raw = merged(
            {**raw_config, "model": {"preset": None}, "tokenizer": {}}, str(tmp_path / run), **sections
        )
        raw["data"].pop("max_length")
        raw["data"] |= sections.get("data", {})
        raw["training"]["init_from"] = str(init_from)
        return validate(Config, raw, "test")

    return make


def trainer_of(config):
    return make_trainer(config, device="cpu")


def initial(model: Path) -> dict[str, torch.Tensor]:
    return weights(load_model(model).model)


# ---------------------------------------------------------------------------------------------- initial state


def test_a_run_starts_with_the_weights_the_tokenizer_and_the_sizes_of_its_model(tuned, run_dir, tmp_path):
    trainer = trainer_of(tuned(training={"ema_decay": 0.9}))
    loaded = weights(trainer.model)
    for name, tensor in initial(run_dir).items():
        assert torch.equal(loaded[name], tensor), name
        assert torch.equal(trainer.average.weights[name], tensor), name
    assert trainer.selection.tokenizer.fingerprint == load_model(run_dir).tokenizer.fingerprint
    written = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    own = yaml.safe_load((run_dir / "config.yaml").read_text())
    assert written["model"] == own["model"] and written["data"]["max_length"] == 64
    assert written["tokenizer"] == {**own["tokenizer"], "path": str(run_dir)}
    manifest = hashlib.sha256((run_dir / "model/manifest.json").read_bytes()).hexdigest()
    origin = json.loads((tmp_path / "run/origin.json").read_text())
    ancestor = {"name": "by-heart", "hub": False, "origin": {"kind": "trained", "ancestors": []}}
    assert origin == {"init_from": str(run_dir), "fingerprint": manifest, **ancestor}


@pytest.mark.parametrize("rate", [0.5, pytest.param(1e-9, marks=pytest.mark.slow)])
def test_a_fine_tuned_model_is_compared_with_the_initial_one(tuned, caplog, rate):
    """Users would not notice otherwise that fine-tuning has made a model worse, or no better."""
    with caplog.at_level(logging.INFO, "mtrain"):
        run = fit_on_cpu(tuned(training={"learning_rate": rate}))
    assert "initial model: nll 0.0" in caplog.text and "BLEU 100.00" in caplog.text
    assert "no validation was better than the initial model" in caplog.text
    assert all("validation" not in line for line in read_metrics(run) if line["step"] == 0)


def test_a_model_that_fine_tuning_improves_is_not_warned_of(make_config, tuned, caplog):
    sizes = {"max_steps": 2, "validate_every": 2, "best_metric": "nll"}
    first = fit_on_cpu(make_config("first", training=sizes))
    caplog.clear()
    fit_on_cpu(tuned(init_from=first, training={"best_metric": "nll"}))
    assert "no validation was better" not in caplog.text


@pytest.mark.slow
def test_a_resumed_fine_tuning_is_compared_with_the_initial_model(tuned, caplog):
    """The score is in the checkpoints, unless the search has changed since."""
    for max_steps in (4, 8):
        run = fit_on_cpu(tuned(training={"learning_rate": 0.5, "max_steps": max_steps}))
    assert caplog.text.count("no validation was better") == 2
    assert json.loads((last_checkpoint(run) / "state.json").read_text())["initial_scores"]["bleu"] > 99
    decoding = {"no_repeat_ngram": 3}
    fit_on_cpu(tuned(training={"learning_rate": 0.5, "max_steps": 12}, decoding=decoding))
    assert caplog.text.count("no validation was better") == 2


def test_fine_tuning_keeps_what_was_learned_and_resumes_from_the_resolved_config(tuned, tmp_path):
    run = fit_on_cpu(tuned(training={"learning_rate": 1e-6}, model={"dropout": 0.1, "word_dropout": 0.1}))
    assert read_metrics(run)[-1]["validation"]["bleu"] == pytest.approx(100)
    assert load_model(run).config.model.word_dropout == 0.1
    fit_on_cpu(validate(Config, yaml.safe_load((run / "config.yaml").read_text()), "resolved"))
    again = fit_on_cpu(
        tuned("again", run / "model", training={"max_steps": 1})
    )  # from the model folder of a fine-tuned model
    assert load_model(again).config.tokenizer.path == str(run / "model")


def test_a_model_with_an_output_bias_and_two_vocabularies_is_loaded_completely(tuned, make_config):
    shape = {"output_bias": True, "tie_embeddings": "none", "norm": "post"}
    first = fit_on_cpu(make_config("first", model=shape, tokenizer={"joint": False, "vocab_size": 305}))
    trainer = trainer_of(tuned("second", first))
    loaded = weights(trainer.model)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in initial(first).items())


def test_auto_chooses_the_recipe_for_a_model_and_resumes(tuned, run_dir, tmp_path, caplog):
    """Rates of dropout are chosen: none for two epochs. All else about the architecture is inherited."""
    caplog.set_level(logging.INFO, "mtrain")
    limits = {"max_steps": None, "max_epochs": 2}
    config = tuned(model={"preset": "auto"}, training={**limits, "learning_rate": None})
    first = fit_on_cpu(config)
    written = yaml.safe_load((first / "config.yaml").read_text())
    own = yaml.safe_load((run_dir / "config.yaml").read_text())
    assert written["model"] == {**own["model"], "dropout": 0.0, "activation_dropout": 0.0}
    choices = {choice["key"] for choice in json.loads((first / "choices.json").read_text())}
    assert "training.learning_rate" in choices and "model.preset" not in choices
    assert "fine-tuning, model width 64" in caplog.text
    caplog.clear()
    fit_on_cpu(config)
    assert "already finished" in caplog.text


# -------------------------------------------------------------------------------------------------- conflicts


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"d_model": 32}}, r"model\.d_model: 32 was given, but training\.init_from: .* has 64; "),
        ({"model": {"norm": "post"}}, r"model\.norm: post was given, but .* has pre"),
        ({"model": {"preset": "tiny"}}, r"model\.d_model: 128 was given"),
        ({"tokenizer": {"vocab_size": 331}}, r"tokenizer\.vocab_size: 331 was given, but .* has 330"),
        ({"tokenizer": {"symbols": ["<bt>"]}}, r"tokenizer\.symbols: \['<bt>'\] was given"),
        ({"tokenizer": {"path": "runs/other"}}, r"tokenizer\.path: runs/other was given, .* has .*by-heart"),
    ],
)  # fmt: skip
def test_a_key_that_conflicts_with_the_model_is_named_with_both_values(tuned, sections, message):
    with pytest.raises(UsageError, match=message) as caught:
        fit_on_cpu(tuned(**sections))
    assert caught.value.exit_code == 2


def test_keys_with_the_values_of_the_model_are_allowed(tuned, run_dir):
    model = {"d_model": 64, "norm": "pre", "dropout": 0.3, "attention_dropout": 0.1}
    tokenizer = {"vocab_size": 330, "path": str(run_dir)}
    config = trainer_of(tuned(model=model, tokenizer=tokenizer, data={"max_length": 32})).config
    assert (config.model.dropout, config.data.max_length) == (0.3, 32)


def test_max_length_must_not_change_the_number_of_learned_positions(tuned, make_config):
    learned = fit_on_cpu(make_config("learned", model={"positions": "learned"}, training={"max_steps": 1}))
    with pytest.raises(UsageError, match=r"data\.max_length: 32 was given, .* has 64 learned positions"):
        fit_on_cpu(tuned(init_from=learned, data={"max_length": 32}))
    fit_on_cpu(tuned(init_from=learned, training={"max_steps": 1}))


def test_a_missing_or_damaged_model_is_an_error(tuned, run_dir, tmp_path):
    with pytest.raises(ModelError, match="no such model"):
        fit_on_cpu(tuned(init_from=tmp_path / "nowhere"))
    shutil.copytree(run_dir / "model", tmp_path / "bad")
    with (tmp_path / "bad/model.safetensors").open("r+b") as file:
        file.write(b"?")
    with pytest.raises(ModelError, match="damaged"):
        fit_on_cpu(tuned(init_from=tmp_path / "bad"))


def test_an_existing_tokenizer_of_the_run_must_equal_that_of_the_model(tuned, make_config, run_dir):
    config = tuned()
    assert tokenize(config).fingerprint == load_model(run_dir).tokenizer.fingerprint
    other = tokenize(make_config("other", tokenizer={"type": "bpe"}))
    shutil.copyfile(other.files[0], Path(config.run_dir, "tokenizer/joint.model"))
    with pytest.raises(UsageError, match=r"its tokenizer is not the one of .*by-heart"):
        fit_on_cpu(config)


def test_a_tokenizer_that_does_not_suit_the_model_is_an_error_before_encoding(make_config, monkeypatch):
    monkeypatch.delattr("mtrain.training.setup.prepare_run.prepare_data")
    separate = {"model": {"tie_embeddings": "decoder"}, "tokenizer": {"joint": False, "vocab_size": 300}}
    tokenized = make_config("tokenized", **separate)
    tokenize(tokenized)
    config = make_config(
        model={"tie_embeddings": "all"}, tokenizer={"path": tokenized.run_dir, "vocab_size": 300}
    )
    with pytest.raises(UsageError, match=r"model\.tie_embeddings: all needs a joint vocabulary"):
        prepare_only(config)


@pytest.mark.parametrize("key", ["vocab_size", "character_coverage"])
def test_settings_beside_a_tokenizer_path_must_agree_with_that_tokenizer(make_config, run_dir, key):
    value = {"vocab_size": 331, "character_coverage": 0.99}[key]
    with pytest.raises(
        UsageError, match=rf"tokenizer\.{key}: {value} was given, but tokenizer\.path: .* has"
    ):
        fit_on_cpu(make_config(tokenizer={"path": str(run_dir), key: value}))


def test_a_tokenizer_of_a_run_without_a_model_keeps_the_normalization_of_its_time(make_config, tmp_path):
    """`mtrain tokenize` writes only the given keys to RUN/config.yaml. The default was once nmt_nfkc."""
    tokenized = make_config("tokenized", tokenizer={"normalization": "nmt_nfkc"})
    tokenize(tokenized)
    settings = Path(tokenized.run_dir, "config.yaml")
    settings.write_text(settings.read_text().replace("  normalization: nmt_nfkc\n", ""))
    for given in ({}, {"normalization": "nmt_nfkc"}):
        config = make_config("other", tokenizer={"path": tokenized.run_dir, **given})
        assert resolve_config(config).config.tokenizer.normalization == "nmt_nfkc"


# --------------------------------------------------------------------------------------------------- resuming


def test_a_run_resumes_exactly_without_the_model_that_it_started_from(tuned, run_dir, tmp_path):
    shutil.copytree(run_dir, tmp_path / "model")
    keys = {"ema_decay": 0.9, "r_drop": 1.0, "freeze": ["encoder"], "weight_decay": 0.1}
    model = {"dropout": 0.2}

    def run(name, steps, **other):
        start = other.pop("init_from", tmp_path / "model")
        return fit_on_cpu(tuned(name, start, training={**keys, "max_steps": steps, **other}, model=model))

    whole = run("whole", 8)
    parts = run("parts", 4)
    shutil.rmtree(tmp_path / "model")
    assert run("parts", 8) == parts
    assert same_weights(whole, parts) and losses(whole) == losses(parts)
    assert json.loads((parts / "origin.json").read_text())["init_from"] == str(tmp_path / "model")
    with pytest.raises(UsageError, match=r"training\.init_from was .*model.* and is .*by-heart"):
        run("parts", 9, init_from=run_dir)
    with pytest.raises(UsageError, match=r"training.freeze was encoder when this run began and is none now"):
        run("parts", 9, freeze=[])
    with pytest.raises(UsageError, match=r"model\.d_model was 64 when this run began"):
        fit_on_cpu(tuned("parts", tmp_path / "model", training=keys, model={**model, "d_model": 32}))


# --------------------------------------------------------------------------------------------------- freezing


@pytest.mark.parametrize(
    ("freeze", "tie", "positions", "recipe"),
    [
        (["encoder"], "all", "sinusoidal", {"ema_decay": 0.9}),
        pytest.param(
            *(["decoder"], "all", "rotary", {"average_checkpoints": 3, "checkpoint_every": 1}),
            marks=pytest.mark.slow,
        ),
        pytest.param(["embeddings"], "all", "learned", {"precision": "bf16"}, marks=pytest.mark.slow),
        pytest.param(
            ["embeddings", "encoder"], "decoder", "learned", {"r_drop": 1.0}, marks=pytest.mark.slow
        ),
        pytest.param(
            *(["embeddings", "encoder", "decoder"], "none", "sinusoidal", {"average_checkpoints": 2}),
            marks=pytest.mark.slow,
        ),
        (["embeddings", "encoder", "decoder"], "all", "sinusoidal", {}),  # only the output bias is trained
        # All but the cross-attention of the decoder, the last norm and the bias.
        (["embeddings", "encoder", "self_attention", "feed_forward"], "all", "sinusoidal", {}),
    ],
)
def test_frozen_parameters_do_not_change_and_all_others_do(
    tuned, make_config, freeze, tie, positions, recipe
):
    shape = {"tie_embeddings": tie, "positions": positions, "output_bias": True}
    first = fit_on_cpu(make_config("first", model=shape, training={"max_steps": 1}))
    run = fit_on_cpu(tuned(init_from=first, training={**recipe, "freeze": freeze, "weight_decay": 0.5}))
    prefixes: dict[str, tuple[str, ...]] = {"embeddings": ("source_emb", "target_emb", "learned_")}
    prefixes |= {
        part: tuple(f"{stack}.{layer}.{part}" for stack in ("encoder", "decoder") for layer in range(9))
        for part in ("self_attention", "feed_forward")
    }
    frozen = tuple(prefix for part in freeze for prefix in prefixes.get(part, (part,)))
    before = initial(first)
    last = last_checkpoint(run)
    moments = {name.partition(".")[2] for name in load_file(last / "optimizer.safetensors")}
    for file in last.glob("[ma]*.safetensors"):  # the model, and the average
        for name, tensor in load_file(file).items():
            assert torch.equal(tensor, before[name]) == name.startswith(frozen), name
            assert (name in moments) == (not name.startswith(frozen)), name
    assert load_model(run)


def test_frozen_parameters_are_excluded_from_the_gradient_norm(tuned):
    trainers = [trainer_of(tuned(f"{freeze}", training={"freeze": freeze})) for freeze in ([], ["encoder"])]
    step = next(trainers[0].steps())
    learner = trainers[0].learner
    (learner.loss(learner.model, step.batches[0]).loss / step.tokens).backward()
    grads = [p.grad for name, p in learner.model.named_parameters() if not name.startswith("encoder")]
    norm = trainers[1].learner.step(step.batches[:1], step.tokens, 0.0).values[2]
    torch.testing.assert_close(norm, torch.stack([grad.norm() for grad in grads]).norm())


def test_freezing_everything_is_an_error_and_the_log_states_how_much_is_frozen(tuned, caplog):
    caplog.set_level("INFO", "mtrain")
    with pytest.raises(UsageError, match="encoder, decoder, embeddings leave nothing to train"):
        fit_on_cpu(tuned(training={"freeze": ["encoder", "decoder", "embeddings"]}))
    with pytest.raises(
        UsageError, match=r'one of encoder, decoder, embeddings, self_attention, .*; got "encodr"'
    ):
        tuned(training={"freeze": ["encodr"]})
    fit_on_cpu(tuned("embeddings", training={"freeze": ["embeddings"], "max_steps": 1}))
    assert "(0.02 frozen)" in caplog.text  # 330 pieces, 64 wide


# --------------------------------------------------------------------------------------------- mixing corpora


def test_a_new_domain_is_mixed_with_the_old_corpus_by_weights(tuned, tmp_path):
    """Weights are how often a pair occurs in an epoch, so domains mix as weight x pairs."""
    sizes, mixture = {"new": 40, "old": 400}, {"new": 2, "old": 0.1}
    corpora = []
    for name, size in sizes.items():
        lines = [f"{PAIRS[i % 8][0]} {i}\t{PAIRS[i % 8][1]} {i}\n" for i in range(size)]
        (tmp_path / f"{name}.tsv").write_text("".join(lines), encoding="utf-8")
        corpora.append({"tsv": str(tmp_path / f"{name}.tsv"), "weight": mixture[name]})
    trainer = trainer_of(tuned(data={"train": corpora}, training={"batch_tokens": 512}))
    epochs = []
    for number in range(20):
        steps = trainer.planner.open(Position(number)).plan.steps
        epochs.append(Counter(int(row) for step in steps for rows in step for row in rows))
    assert all(epoch[row] == 2 for epoch in epochs for row in range(40))
    drawn = [{row for row in epoch if row >= 40} for epoch in epochs]
    assert 30 < sum(map(len, drawn)) / 20 < 50  # 400 x 0.1, different ones in each epoch
    assert len(set.union(*drawn)) > 300 and all(
        epoch[row] == 1 for epoch in epochs for row in epoch if row > 39
    )


def test_a_tokenizer_path_without_its_settings_is_an_error(make_config):
    tokenized = make_config("tokenized")
    tokenize(tokenized)
    file = Path(tokenized.run_dir, "tokenizer/config.yaml")
    file.write_text("vocab_size: many\n")
    message = rf"tokenizer\.path: {file} has no valid tokenizer settings: .*vocab_size"
    with pytest.raises(ModelError, match=message):
        resolve_config(make_config("other", tokenizer={"path": tokenized.run_dir}))


def test_a_tokenizer_path_without_a_tokenizer_is_an_error(make_config, tmp_path):
    for path, reason in (
        (tmp_path / "nowhere", "no such model or run folder"),
        (tmp_path, "not a model folder"),
    ):
        config = make_config(tokenizer={"path": str(path)})
        with pytest.raises(ModelError, match=f"tokenizer.path: {path}: {reason}"):
            resolve_config(config)
