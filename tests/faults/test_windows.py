"""Runs whose epochs have several windows: resuming, damaged data, and changed windows."""

import json
import logging
from collections import Counter
from pathlib import Path

import pytest

from mtrain.checkpoint.checkpoint import open_checkpoint
from mtrain.data import prepare_data as preparation
from mtrain.data import shard_writer
from mtrain.data.shards import Shard, shard_file
from mtrain.errors import DataError, UsageError
from mtrain.storage.manifest import write_manifest
from mtrain.training import loop
from tests.support.training import PAIRS, fit_on_cpu, last_checkpoint, losses, read_metrics, same_weights

RECIPE = {"batch_tokens": 160, "validate_every": 1000, "checkpoint_every": 1000, "log_every": 1}


@pytest.fixture
def small(make_config, monkeypatch, tmp_path):
    """Make a config of a corpus of 64 pairs, in 8 buckets and 4 shards, for windows of up to 2 buckets."""
    for module, name, value in (
        (shard_writer, "BLOCK", 16),
        (shard_writer, "SHARD", 16),
        (preparation, "BUCKET", 8),
    ):
        monkeypatch.setattr(module, name, value)
    lines = [f"{source} {i}\t{target} {i}\n" for i in range(8) for source, target in PAIRS]
    (tmp_path / "train.tsv").write_text("".join(lines), encoding="utf-8")

    def make(run="run", window_pairs=16, training=None, **data):
        data = {"train": {"tsv": str(tmp_path / "train.tsv")}, "window_pairs": window_pairs, **data}
        return make_config(run, data=data, training={**RECIPE, **(training or {})})

    return make


def state_of(run: Path):
    return open_checkpoint(last_checkpoint(run)).state


def test_a_run_interrupted_in_any_window_takes_the_same_steps(small):
    recipe, sampling = {"max_steps": 24}, 0.2
    whole = fit_on_cpu(small("whole", training=recipe, subword_sampling=sampling))
    assert {epoch for _, epoch, *_ in losses(whole)} >= {1, 2}
    windows = set()
    for stop in (1, 6, 13):
        parts = fit_on_cpu(small("parts", training={**recipe, "max_steps": stop}, subword_sampling=sampling))
        windows.add(state_of(parts).epoch_window)
    assert len(windows) > 2
    resumed = fit_on_cpu(small("parts", training=recipe, subword_sampling=sampling))
    assert losses(resumed) == losses(whole) and same_weights(whole, resumed)


def test_max_epochs_ends_with_the_last_window(small, monkeypatch, caplog):
    caplog.set_level("INFO", "mtrain")
    epochs, real = Counter(), loop.Trainer.train_step

    def train_step(self, step):
        epochs.update((step.epoch, place) for place in step.places())
        return real(self, step)

    monkeypatch.setattr(loop.Trainer, "train_step", train_step)
    run = fit_on_cpu(small(training={"max_steps": None, "max_epochs": 2, "schedule": "cosine"}))
    assert len(epochs) == 2 * 64 and set(epochs.values()) == {1}
    state = state_of(run)
    assert (state.epoch, state.epoch_window, state.next_batch) == (2, 0, 0)
    assert "steps in 5 windows; padding" in caplog.text and "planned: about " in caplog.text
    assert abs(state.steps_in_first_epoch * 2 / state.step - 1) < 0.3
    assert all(line["data_seconds"] >= 0 for line in read_metrics(run) if "loss" in line)


def test_other_windows_restart_the_epoch(small, monkeypatch, caplog):
    later = 24
    before = state_of(fit_on_cpu(small(training={"max_steps": 9})))
    assert (before.epoch, before.epoch_window > 0) == (0, True)
    first, real = [], loop.Trainer.train_step

    def train_step(self, step):
        first.append(step.epoch)
        return real(self, step)

    monkeypatch.setattr(loop.Trainer, "train_step", train_step)
    run = fit_on_cpu(small(window_pairs=later, training={"max_steps": None, "max_epochs": 1}))
    assert (
        caplog.text.count("the windows of an epoch have changed (data.window_pairs); restarting epoch 1") == 1
    )
    assert (state_of(run).epoch, state_of(run).next_batch) == (1, 0) and len(first) > before.step
    caplog.clear()
    fit_on_cpu(small(window_pairs=later, training={"max_steps": None, "max_epochs": 2}))
    assert "windows" not in caplog.text


def test_a_checkpoint_without_windows_resumes_a_corpus_that_is_one_window(small, caplog):
    """As versions before windows wrote it."""
    whole = fit_on_cpu(small("whole", window_pairs=64, training={"max_steps": 12}))
    parts = fit_on_cpu(small("parts", window_pairs=64, training={"max_steps": 5}))
    folder = last_checkpoint(parts)
    state = json.loads((folder / "state.json").read_text())
    assert (state.pop("epoch_window"), state.pop("window_layout")) == (0, [1, 1])
    (folder / "state.json").write_text(json.dumps(state))
    write_manifest(folder)
    resumed = fit_on_cpu(small("parts", window_pairs=64, training={"max_steps": 12}))
    assert losses(resumed) == losses(whole) and same_weights(whole, resumed)
    assert "restarting" not in caplog.text


@pytest.mark.parametrize("writable", [True, False])
def test_damage_is_found_before_a_window_is_used_and_repaired_at_the_next_start(
    small, monkeypatch, caplog, writable
):
    recipe = {"max_steps": 14}
    whole = fit_on_cpu(small("whole", training=recipe))
    run = fit_on_cpu(small("parts", training={"max_steps": 1}))
    file = shard_file(run / "data", 2)
    content = file.read_bytes()
    at = content.index(Shard(file).ids[0][-4:].tobytes())
    damaged = content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
    file.write_bytes(damaged)
    if not writable:
        real = Path.replace
        monkeypatch.setattr(
            Path, "replace", lambda self, target: refuse() if self == file else real(self, target)
        )

    def refuse():
        raise PermissionError(13, "Permission denied")

    cure = "run again to encode this shard again" if writable else "restore it"
    with pytest.raises(DataError, match=f"{file}: damaged .*; {cure}"):
        fit_on_cpu(small("parts", training=recipe))
    reached = state_of(run)
    assert 1 <= reached.step < 14 and reached.step == losses(run)[-1][0]  # what was learned is saved
    assert losses(run) == losses(whole)[: reached.step]
    if writable:
        assert file.with_suffix(".damaged").read_bytes() == damaged  # nothing is lost if the text is gone
        caplog.clear()
        caplog.set_level(logging.WARNING)
        fit_on_cpu(small("parts", training=recipe))
        assert [m for m in caplog.messages if "encoding" in m] == [
            f"{file}: missing; encoding this shard again"
        ]
        assert file.read_bytes() == content and losses(run) == losses(whole)


def test_window_pairs_must_be_positive(small):
    with pytest.raises(UsageError, match=r"data\.window_pairs"):
        small(window_pairs=0)
