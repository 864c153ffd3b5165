"""Faults of a training step: non-finite numbers, exhausted memory, loss spikes."""

import logging
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mtrain.checkpoint import checkpoint
from mtrain.data.epochs.packed_batch import split_batches
from mtrain.device import step_unless
from mtrain.errors import DivergedError
from mtrain.training.records.progress import SPIKE_WINDOW
from mtrain.training.step.learner import Learner, StepMetrics
from tests.support.training import (
    Poisoned,
    batches_of,
    fit_on_cpu,
    last_checkpoint,
    losses,
    make_progress,
    read_metrics,
)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_15_a_step_that_is_not_finite_changes_nothing(parts, name):
    config, model, data, tokenizer = parts
    model = Poisoned(model.float())
    learner = Learner(model, config.training.model_copy(update={"optimizer": name}))
    optimizer = learner.optimizer
    batch = batches_of([[0, 1, 2]], data, tokenizer)
    for poison in (False, True, False):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        moments = {
            name: optimizer.state[p]["exp_avg"].clone()
            for name, p in model.named_parameters()
            if p in optimizer.state
        }
        model.poison = poison
        sums = learner.step(batch, batch[0].target_tokens, 0.01)
        assert bool(sums.values[3]) == poison
        assert all(
            torch.equal(p, before[name]) == poison
            for name, p in model.named_parameters()
            if poison or (p.grad is None and "norm" not in name and "bias" not in name)
        )
        if poison:
            assert all(
                torch.equal(optimizer.state[p]["exp_avg"], moments[name])
                for name, p in model.named_parameters()
            )


def test_15_three_steps_in_a_row_that_are_not_finite_end_training(make_config, on_training_forward):
    calls = []

    def poison(_, hidden):
        calls.append(1)  # one batch is tried before the first step, and each step is one micro-batch
        return hidden * float("nan") if len(calls) - 1 in (2, 4, 5, 6) else None

    on_training_forward(poison)
    config = make_config(
        training={"batch_tokens": 512, "micro_batch_tokens": 512, "max_steps": 20, "log_every": 1}
    )
    with pytest.raises(DivergedError, match="3 steps in a row"):
        fit_on_cpu(config)
    lines = read_metrics(Path(config.run_dir))
    assert lines[1]["loss"] == "NaN" and lines[1]["skipped_steps"] == 1
    assert isinstance(lines[2]["loss"], float) and lines[2]["skipped_steps"] == 1


@pytest.mark.parametrize(
    ("error", "workers"),
    [
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 1),
        (RuntimeError("could not create a primitive"), 2),  # oneDNN, in bf16
        (MemoryError(), 2),
    ],
)
def test_16_a_micro_batch_that_does_not_fit_in_memory_is_halved(
    parts, on_training_forward, caplog, workers, error
):
    config, model, data, tokenizer = parts
    batches = batches_of([[0, 1, 2, 3, 4], [5, 6, 7]], data, tokenizer)
    tokens = sum(batch.target_tokens for batch in batches)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    changes, most = [], 99

    def limit(source, _):
        if len(source) > most:
            raise error

    on_training_forward(limit)
    for most in (99, 1):  # noqa: B007
        model.load_state_dict(before)
        learner = Learner(model, config.training, workers)
        learner.optimizer = torch.optim.SGD(model.parameters(), fused=True)
        values = learner.step(batches, tokens, 1.0).values
        changes.append({name: p.detach() - before[name] for name, p in model.named_parameters()})
        changes[-1]["values"] = values
    for name, change in changes[0].items():
        torch.testing.assert_close(change, changes[1][name], rtol=1e-10, atol=1e-12)
    text, most = caplog.text, max(batch.positions for batch in batches)
    limited = f"out of memory in 2 micro-batches (8 pairs); limiting each to {most // 2} padded tokens"
    assert text.count(limited) == 1

    assert text.count("out of memory") == 2
    learner.step(batches, tokens, 1.0)
    assert caplog.text.count("out of memory") == 2  # the limit is known by now


def test_16_micro_batches_that_do_not_fit_are_found_before_the_first_step(
    make_config, on_training_forward, caplog
):
    def limit(source, _):
        if len(source) > 1:
            raise MemoryError

    on_training_forward(limit)
    run = fit_on_cpu(make_config(training={"batch_tokens": 128, "micro_batch_tokens": 128}))
    assert "out of memory in" in caplog.text and last_checkpoint(run).name == "step-00000008"
    fit_on_cpu(make_config(training={"batch_tokens": 128, "micro_batch_tokens": 64, "max_steps": 10}))
    now, before = caplog.text.split("not bit-identically: ")[1].split("; before: ")  # after the dry run
    assert re.search(r"micro-batches of 64 tokens, reduced to [\d.]+ positions", now)
    assert re.search(r"micro-batches of 128 tokens, reduced to [\d.]+ positions", before)
    assert last_checkpoint(run).name == "step-00000010"


def test_16_a_single_pair_that_does_not_fit_in_memory_ends_training(parts, on_training_forward):
    config, model, data, tokenizer = parts
    batches = batches_of([[0, 1]], data, tokenizer)

    def fail(*_):
        raise MemoryError

    on_training_forward(fail)
    with pytest.raises(MemoryError):
        Learner(model, config.training).step(batches, 9, 0.1)


def test_16_the_steps_before_memory_does_not_suffice_for_a_pair_are_saved(make_config, on_training_forward):
    calls, most = [], 7

    def fail(*_):
        calls.append(1)
        if len(calls) > most:
            torch.rand(1)  # as for a dropout mask
            raise MemoryError

    on_training_forward(fail)
    recipe = {"checkpoint_every": 100, "validate_every": 100, "log_every": 1, "max_steps": 12}
    config = make_config(training=recipe)
    with pytest.raises(MemoryError):
        fit_on_cpu(config)
    run = Path(config.run_dir)
    step = losses(run)[-1][0]
    assert 1 < step < 12 and last_checkpoint(run).name == f"step-{step:08d}"
    most = 10**6
    whole = fit_on_cpu(make_config("whole", training={**recipe, "max_steps": step}))
    saved, expected = (checkpoint.open_checkpoint(last_checkpoint(each)).state for each in (run, whole))
    assert saved.rng == expected.rng
    fit_on_cpu(config)
    assert [step for step, *_ in losses(run)] == list(range(1, 13))


def test_16_weights_that_a_failed_update_may_have_changed_are_not_saved(make_config, monkeypatch):
    calls = []

    def fail(*arguments):
        calls.append(1)
        if len(calls) > 4:
            raise MemoryError
        step_unless(*arguments)

    monkeypatch.setattr("mtrain.training.step.learner.step_unless", fail)
    config = make_config(training={"checkpoint_every": 100, "validate_every": 100})
    with pytest.raises(MemoryError):
        fit_on_cpu(config)
    assert not checkpoint.checkpoint_folders(Path(config.run_dir))


def test_a_spike_of_the_nll_is_logged_with_its_pairs(tmp_path, caplog):
    progress = make_progress(tmp_path)

    def add(nll: float, rows: list[int], r_drop: float = 0.0) -> None:
        progress.state.step += 1
        metrics = StepMetrics(torch.tensor([(nll + r_drop) * 10, nll * 10, 1.0, 0.0]), 10)
        progress.add_step(metrics, lambda: [f"a.en:{row}" for row in rows])

    generator = torch.Generator().manual_seed(0)
    for _ in range(SPIKE_WINDOW + 20):
        add(3 + 0.1 * float(torch.randn((), generator=generator)), [1])
    add(3.0, [1], r_drop=5.0)  # R-Drop begins
    with caplog.at_level(logging.WARNING):
        add(9.0, list(range(20)), r_drop=5.0)
        assert caplog.text == ""  # metrics are read one step late
        add(3.0, [1], r_drop=5.0)
    assert f"step {SPIKE_WINDOW + 22}: nll 9.00 nats/token, 3.0" in caplog.text
    assert (
        "pairs a.en:0, a.en:1, a.en:2, a.en:3, a.en:4, a.en:5, a.en:6, a.en:7, .." in caplog.text
        and caplog.text.count("step ") == 1
    )


def test_a_batch_is_cut_between_its_pairs(parts):
    _, _, data, tokenizer = parts
    [batch] = batches_of([[3, 1, 6]], data, tokenizer)
    assert split_batches([batch], batch.positions) == [batch]
    first, second = split_batches([batch], batch.positions - 1)
    assert (first.rows, second.rows) == ([3], [1, 6])
    assert max(first.positions, second.positions) == batch.positions * 2 // 3
    assert first.target_tokens + second.target_tokens == batch.target_tokens
    assert torch.equal(torch.cat([first.labels, second.labels]), batch.labels)
    assert split_batches([first], 0) == [first] and replace(first).rows == [3]
    assert [part.rows for part in split_batches([batch], 0)] == [[3], [1], [6]]


def test_15_a_run_that_diverged_ends_with_exit_code_5_and_finite_weights(
    mtrain, config_file, tmp_path, on_training_forward
):
    calls = []

    def poison(_, hidden):
        calls.append(1)
        return None if len(calls) < 12 else hidden * float("inf")

    on_training_forward(poison)
    every_step = ["--set", "training.log_every=1", "--set", "training.max_steps=30"]
    code, _, err = mtrain("fit", config_file, "--device", "cpu", "--quiet", *every_step)
    assert code == 5 and "3 steps in a row" in err and "start another run (--run-dir) with a lower" in err
    weights = load_file(last_checkpoint(tmp_path / "run") / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in weights.values())
    assert read_metrics(tmp_path / "run")[-1]["skipped_steps"] in (1, 2)


def test_16_a_sentence_that_does_not_fit_in_memory_ends_with_exit_code_8(
    mtrain, config_file, on_training_forward
):
    def fail(*_):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    on_training_forward(fail)
    code, _, err = mtrain("fit", config_file, "--device", "cpu", "--quiet")
    assert code == 8 and "lower data.max_length" in err
