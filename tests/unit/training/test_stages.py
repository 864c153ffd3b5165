"""Runs with stages: interruptions, changes, planned steps, logs, shared data folders, and other commands."""

import json
import logging
import re
from itertools import pairwise

import pytest
import yaml

from mtrain.checkpoint.checkpoint import open_checkpoint
from mtrain.errors import DataError, UsageError
from mtrain.runs.limits import allowed_steps
from mtrain.training.fit import make_trainer
from tests.support.training import (
    PAIRS,
    fit_on_cpu,
    last_checkpoint,
    losses,
    merged,
    read_metrics,
    same_weights,
    with_bleu,
)

RECIPE = {"batch_tokens": 96, "validate_every": 1000, "checkpoint_every": 1000, "log_every": 1}
STAGES = [
    {"shares": {"first": 0.5, "second": 0.5}, "max_epochs": 1},
    {"shares": {"first": 0.25, "second": 0.75}, "of": "second", "max_steps": 5},
    {"shares": {"second": 1}},
]


@pytest.fixture
def train(tmp_path):
    """Two corpora with names, of 16 and 8 pairs."""
    corpora = []
    for name, copies in (("first", 2), ("second", 1)):
        lines = [f"{source} {i}\t{target} {name}\n" for i in range(copies) for source, target in PAIRS]
        (tmp_path / f"{name}.tsv").write_text("".join(lines), encoding="utf-8")
        corpora.append({"tsv": str(tmp_path / f"{name}.tsv"), "name": name})
    return corpora


@pytest.fixture
def staged(make_config, train):
    """Make a config with stages of these corpora."""

    def make(run="run", stages=STAGES, training=None, **data):
        data = {"train": train, "stages": stages, **data}
        return make_config(run, data=data, training={**RECIPE, **(training or {})})

    return make


def state_of(run):
    return open_checkpoint(last_checkpoint(run)).state


def test_a_run_resumed_in_any_stage_takes_the_same_steps(staged):
    sampling = {"subword_sampling": 0.2}
    whole = fit_on_cpu(staged("whole", training={"max_steps": 20}, **sampling))
    in_stages = [line["stage"] for line in read_metrics(whole) if "loss" in line]
    assert in_stages == sorted(in_stages) and in_stages.count(2) == 5 and {*in_stages} == {1, 2, 3}
    first = in_stages.count(1)
    stages = []
    for stop in (2, first, first + 3, first + 7, 20):
        parts = fit_on_cpu(staged("parts", training={"max_steps": stop}, **sampling))
        stages.append(len(state_of(parts).position.starts))
    assert stages == [1, 2, 2, 3, 3]
    assert losses(parts) == losses(whole) and same_weights(whole, parts)


def test_stages_are_logged(staged, caplog, mtrain):
    caplog.set_level(logging.INFO, "mtrain")
    run = fit_on_cpu(staged(training={"max_steps": 20}))
    assert re.search(r"^ *stage +3 of 3$", mtrain("info", run)[1], re.MULTILINE)
    lines = [line for line in caplog.messages if line.startswith("data: stage")]
    assert lines == [
        "data: stage 1 of 3: an epoch has first 50.0% (16 pairs), second 50.0% (16 pairs)",
        "data: stage 2 of 3: an epoch has first 25.0% (3 pairs), second 75.0% (8 pairs)",
        "data: stage 3 of 3: an epoch has second 100.0% (8 pairs)",
    ]
    assert any(line.startswith("step 1, stage 1, epoch 1: loss ") for line in caplog.messages)
    assert any(line.startswith("step 20, stage 3, epoch ") for line in caplog.messages)


def test_training_ends_after_the_epochs_of_all_stages(staged):
    config = staged(training={"max_steps": None, "max_epochs": 6, "schedule": "linear"})
    trainer = make_trainer(config, device="cpu")
    run = fit_on_cpu(config)
    state, stages = state_of(run), [line["stage"] for line in read_metrics(run) if "loss" in line]
    assert state.epoch == 6 and state.position.step == 0
    assert abs(trainer.total_steps - state.step) <= 2 and stages.count(2) == 5
    rates = [line["learning_rate"] for line in read_metrics(run) if "loss" in line]
    assert rates[3] == max(rates) and 0 <= rates[-1] < rates[3] / 5
    assert all(one > other for one, other in pairwise(rates[3:]))


def test_planned_steps_add_up_over_the_stages(staged):
    def steps(max_epochs: int, max_steps: int | None = None) -> int | None:
        recipe = staged().training.model_copy(update={"max_epochs": max_epochs, "max_steps": max_steps})
        return allowed_steps(recipe, staged().data.stages, None, [7, 3, 4].__getitem__)

    assert steps(1) == 7  # the other stages are not planned
    assert [steps(2), steps(3), steps(4), steps(9)] == [7 + 3, 7 + 5, 7 + 5 + 4, 7 + 5 + 6 * 4]
    assert steps(9, max_steps=20) == 20


@pytest.mark.parametrize(
    "stages",
    [
        pytest.param(STAGES, marks=pytest.mark.slow),
        [{"shares": {"first": 1}, "max_steps": 4}, {"shares": {"second": 1}}],
    ],
)
def test_patience_applies_to_the_last_stage(staged, scripted_scores, stages):
    """The validation after the last step of a stage belongs to that stage."""
    scripted_scores(*map(with_bleu, range(40, 0, -1)))
    recipe = {"max_steps": 40, "patience": 2, "validate_every": 2}
    state = state_of(fit_on_cpu(staged(stages=stages, training=recipe)))
    assert len(state.position.starts) == len(stages)
    assert state.position.stage_step in (3, 4)  # at the second validation in it


def test_stages_that_have_begun_must_not_change(staged):
    def refuse(stages: list | None, steps: int, message: str) -> None:
        with pytest.raises(UsageError, match=message):
            fit_on_cpu(staged(stages=stages, training={"max_steps": steps}))

    first, *later = STAGES
    begun = "stage 1 has begun; only its max_epochs and max_steps can change"
    fit_on_cpu(staged(training={"max_steps": 2}))
    refuse([{**first, "shares": {"first": 1}}, *later], 12, begun)
    refuse([{**first, "of": "second"}, *later], 12, begun)
    refuse(None, 12, r"data\.stages was given when this run began and is not now; restore it")
    fit_on_cpu(staged(training={"max_steps": 12}))
    refuse([{**first, "max_epochs": 3}, *later], 13, "stage 1 has ended and cannot change")
    fit_on_cpu(staged(training={"max_steps": 13}))


def test_corpora_with_stages_may_be_renamed_but_not_exchanged(staged, train):
    stages = [{"shares": {"first": 0.25, "second": 0.75}}]
    fit_on_cpu(staged(stages=stages, training={"max_steps": 2}))
    names = {"first": "second", "second": "first"}
    exchanged = [{**corpus, "name": names[corpus["name"]]} for corpus in train]
    with pytest.raises(UsageError, match="stage 1 has begun"):
        fit_on_cpu(staged(stages=stages, train=exchanged, training={"max_steps": 3}))
    renamed = [{"shares": {"second": 0.25, "first": 0.75}}]
    fit_on_cpu(staged(stages=renamed, train=exchanged, training={"max_steps": 3}))


def test_a_run_without_stages_keeps_having_none(staged):
    fit_on_cpu(staged(stages=None, training={"max_steps": 2}))
    with pytest.raises(UsageError, match=r"data\.stages was not given when this run began; remove it"):
        fit_on_cpu(staged(training={"max_steps": 4}))
    fit_on_cpu(staged("fewer", training={"max_steps": 12}))
    with pytest.raises(UsageError, match="stage 1 has ended"):
        fit_on_cpu(staged("fewer", stages=STAGES[2:], training={"max_steps": 14}))


def test_later_stages_and_limits_may_change(staged, caplog):
    caplog.set_level(logging.INFO, "mtrain")
    fit_on_cpu(staged(training={"max_steps": 2}))
    later = [{**STAGES[0], "max_epochs": None, "max_steps": 1}, {"shares": {"first": 1}}]
    run = fit_on_cpu(staged(stages=later, training={"max_steps": 6}))
    assert "data.stages: the stages from stage 1 on have changed" in caplog.text
    lines = [(line["stage"], line["epoch"]) for line in read_metrics(run) if "loss" in line]
    assert lines == [(1, 1)] * 2 + [(2, 2)] * 4  # the first stage has ended with the steps that it had
    appended = [later[0], {**later[1], "max_epochs": 1}, {"shares": {"second": 1}}]
    run = fit_on_cpu(staged(stages=appended, training={"max_steps": 12}))
    assert [line["stage"] for line in read_metrics(run) if "loss" in line][-1] == 3


def test_names_may_change_without_stages_and_do_not_change_the_data(staged, train):
    run = fit_on_cpu(staged(stages=None, training={"max_steps": 2}))
    before = state_of(run).data_fingerprint
    renamed = [{**corpus, "name": f"new {corpus['name']}"} for corpus in train]
    run = fit_on_cpu(staged(stages=None, train=renamed, training={"max_steps": 4}))
    assert state_of(run).data_fingerprint == before


def test_runs_with_different_stages_share_a_data_folder(staged, tmp_path):
    def stamps():
        return {file: file.stat().st_mtime_ns for file in (tmp_path / "encoded").rglob("*.safetensors")}

    folder, stages = {"folder": str(tmp_path / "encoded")}, {"one": STAGES, "two": None, "three": STAGES[2:]}
    made = []
    for name, given in stages.items():
        fit_on_cpu(staged(name, stages=given, training={"max_steps": 2}, **folder))
        made.append(stamps())
    assert len(made[0]) == 2 and made[0] == made[1] == made[2]
    assert len({state_of(tmp_path / name).data_fingerprint for name in stages}) == 1


def test_a_corpus_without_pairs_cannot_have_a_share(staged, train, tmp_path):
    (tmp_path / "second.tsv").write_text("\t\n", encoding="utf-8")
    with pytest.raises(
        DataError, match=r"second: this corpus has no usable pair; remove its share from stage 1"
    ):
        fit_on_cpu(staged(train=train))


@pytest.fixture
def automatic(raw_config, train, tmp_path):
    """The config file of a run with stages that chooses its recipe."""
    raw = merged(raw_config, str(tmp_path / "auto"), data={"train": train, "stages": STAGES})
    raw["model"], raw["tokenizer"] = {}, {}
    raw["training"] = {"max_epochs": 4, "precision": "fp32"}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(raw), encoding="utf-8")
    return tmp_path / "c.yaml"


def test_plans_take_an_average_epoch(mtrain, automatic):
    _, _, err = mtrain("plan", automatic, "--hardware", "h100")
    assert "the shares of data.stages are ignored; run `mtrain prepare` first" in err
    assert mtrain("prepare", automatic)[0] == 0
    code, out, _ = mtrain("plan", automatic, "--hardware", "h100", "--json")
    epoch = json.loads(out)["epoch"]
    # One epoch of 16 + 16 pairs, one of 8 + 8 / 3, and two of 8.
    assert code == 0 and abs(epoch["pairs"] - (32 + 32 / 3 + 16) / 4) < 2
    assert "average epoch" in epoch["origin"]


@pytest.mark.slow
def test_automatic_recipes_take_an_average_epoch(mtrain, automatic):
    assert mtrain("fit", automatic, "--device", "cpu", "--quiet")[0] == 0


def test_the_check_counts_the_pairs_of_each_corpus(mtrain, raw_config, train, tmp_path):
    raw = merged(raw_config, str(tmp_path / "run"), data={"train": train, "stages": STAGES})
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(raw), encoding="utf-8")
    code, out, _ = mtrain("check", tmp_path / "c.yaml")
    assert code == 0 and out.startswith(
        "train: 24 pairs (empty: 0, unreadable: 0)\n  first: 16 pairs\n  second: 8 pairs\n"
    )
    assert json.loads(mtrain("check", tmp_path / "c.yaml", "--json")[1])["corpora"] == {
        "first": 16,
        "second": 8,
    }
