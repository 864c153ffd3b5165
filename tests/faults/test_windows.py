"""Runs whose epochs have several windows: resuming, damaged data, and changed windows."""

import errno
import json
import logging
import os
import signal
import threading
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from mtrain.checkpoint.checkpoint import open_checkpoint
from mtrain.data.epochs import windows
from mtrain.data.epochs.windows import WindowedCorpus
from mtrain.data.rewriting import reencode
from mtrain.data.rewriting.rewrite import raise_if_cancelled, replace_rows
from mtrain.data.store.shards import Shard, shard_file
from mtrain.errors import DataError, Interrupted, UsageError
from mtrain.processes.stop_signals import StopSignal
from mtrain.storage.manifest import write_manifest
from mtrain.training import loop
from mtrain.training.fit import make_trainer
from tests.support.encoding import use_sizes, write
from tests.support.faults.file_operations import Operation, on_file_operation
from tests.support.training import PAIRS, fit_on_cpu, last_checkpoint, losses, read_metrics, same_weights

RECIPE = {"batch_tokens": 160, "validate_every": 1000, "checkpoint_every": 1000, "log_every": 1}


@pytest.fixture
def small(make_config, monkeypatch, tmp_path):
    """Make a config of a corpus of 64 pairs, in 8 buckets and 4 shards, for windows of up to 2 buckets."""
    use_sizes(monkeypatch, block=16, shard=16, bucket=8)
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
        windows.add(state_of(parts).position.window)
    assert len(windows) > 2
    resumed = fit_on_cpu(small("parts", training=recipe, subword_sampling=sampling))
    assert losses(resumed) == losses(whole) and same_weights(whole, resumed)


def test_max_epochs_ends_with_the_last_window(small, monkeypatch, caplog):
    caplog.set_level("INFO", "mtrain")
    epochs, real = Counter(), loop.train_step

    def train_step(self, step):
        epochs.update((step.epoch, place) for place in step.locate())
        return real(self, step)

    monkeypatch.setattr(loop, "train_step", train_step)
    run = fit_on_cpu(small(training={"max_steps": None, "max_epochs": 2, "schedule": "cosine"}))
    assert len(epochs) == 2 * 64 and set(epochs.values()) == {1}
    state = state_of(run)
    assert state.position[:3] == (2, 0, 0)
    assert "steps in 5 windows; padding" in caplog.text and "planned: about " in caplog.text


def test_the_steps_of_an_epoch_are_extrapolated_from_its_first_window(small, tmp_path):
    """Here exactly, because each step has one pair, of more than 128 tokens."""
    rotated = [PAIRS[i % 8 :] + PAIRS[: i % 8] for i in range(20)]
    long = [tuple(" ".join(pair[side] for pair in pairs) for side in (0, 1)) for pairs in rotated]
    train = write(tmp_path / "long.tsv", long)
    recipe = {"max_steps": None, "max_epochs": 2, "batch_tokens": 256}
    run = fit_on_cpu(small(training=recipe, train=train, max_length=256))
    state = state_of(run)
    assert state.step == 2 * 20 == 2 * state.steps_in_first_epoch


def test_the_time_that_steps_wait_for_a_window_is_recorded(small, monkeypatch, caplog):
    real, seconds = WindowedCorpus.open, 1.2

    def slow(self, position, cancelled):
        time.sleep(seconds * (position.window == 1))
        return real(self, position, cancelled)

    monkeypatch.setattr(WindowedCorpus, "open", slow)
    run = fit_on_cpu(small(training={"max_steps": 12}))
    waited = [line["data_seconds"] for line in read_metrics(run) if "loss" in line]
    assert len(waited) == 12 and min(waited) >= 0
    assert sorted(waited)[-1] > seconds / 2 > sorted(waited)[-2]
    message = "data: the next window was not ready in time; training waited 1"
    assert next(line for line in caplog.messages if "ready" in line).startswith(message)


def test_training_that_ends_leaves_no_work_behind(small, monkeypatch):
    """While worker processes segment the next window."""
    opened, waited = [], []

    def endless(corpus, blocks, folder, cancelled):
        def slow():
            with closing(blocks):
                for block in blocks:
                    while len(opened) > 1 and not cancelled():
                        waited.append(len(opened))
                        time.sleep(0.01)
                    yield block

        opened.append(corpus)
        return replace_rows(corpus, slow(), folder, cancelled)

    monkeypatch.setattr(reencode, "BLOCK", 2)
    whole = fit_on_cpu(small("whole", training={"max_steps": 12}, subword_sampling=0.2))
    with monkeypatch.context() as patch:
        patch.setattr(windows, "replace_rows", endless)
        fit_on_cpu(small("parts", training={"max_steps": 1}, subword_sampling=0.2))
    names = [thread.name for thread in threading.enumerate()]
    assert waited and not [each for each in names if each.startswith(("windows", "loader", "ThreadPool"))]
    resumed = fit_on_cpu(small("parts", training={"max_steps": 12}, subword_sampling=0.2))
    assert losses(resumed) == losses(whole)


@pytest.mark.parametrize(
    ("number", "slow"),
    [
        (signal.SIGTERM, 0),
        *(pytest.param(number, 1, marks=pytest.mark.slow) for number in (signal.SIGINT, signal.SIGTERM)),
        pytest.param(signal.SIGINT, 0, marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_the_wait_for_a_window(small, monkeypatch, number, slow):
    """Re-segmenting it may take minutes."""
    recipe = {"max_steps": 12}
    whole = fit_on_cpu(small("whole", training=recipe))
    real = WindowedCorpus.open

    def endless(self, position, cancelled):
        if position[:2] == (0, slow):
            threading.Timer(0.3, os.kill, (os.getpid(), number)).start()
            while True:
                raise_if_cancelled(cancelled)
                time.sleep(0.01)
        return real(self, position, cancelled)

    with monkeypatch.context() as patch:
        patch.setattr(WindowedCorpus, "open", endless)
        message = f"stopped by {number.name} before the first step; run it again"
        if slow:
            message = f"stopped by {number.name}; saved at step [1-9]; run it again to resume"
        with pytest.raises(Interrupted, match=message) as error:
            fit_on_cpu(small("parts", training=recipe))
    assert error.value.exit_code == 128 + number
    resumed = fit_on_cpu(small("parts", training=recipe))
    assert losses(resumed) == losses(whole) and same_weights(whole, resumed)


def test_a_signal_right_after_resuming_says_that_the_state_is_saved(small, monkeypatch):
    real = WindowedCorpus.open

    def slow(self, position, cancelled):
        raise_if_cancelled(cancelled)
        return real(self, position, cancelled)

    checkpoint = last_checkpoint(fit_on_cpu(small("run", training={"max_steps": 3})))
    before = (checkpoint / "state.json").stat().st_mtime_ns
    stop = StopSignal()
    stop.received = signal.SIGTERM
    trainer = make_trainer(small("run", training={"max_steps": 6}), device="cpu")
    monkeypatch.setattr(WindowedCorpus, "open", slow)
    with pytest.raises(Interrupted, match="stopped by SIGTERM; saved at step 3; run it again to resume"):
        loop.train(trainer, stop)
    assert (checkpoint / "state.json").stat().st_mtime_ns == before


def test_windows_without_pairs_are_skipped(small, tmp_path):
    """Low weights leave about 6 of 64 pairs in an epoch, and none in many windows."""
    train = {"train": {"tsv": str(tmp_path / "train.tsv"), "weight": 0.1}}
    recipe = {"max_steps": None, "max_epochs": 6, "patience": None}
    whole = fit_on_cpu(small("whole", training=recipe, **train))
    state, steps = state_of(whole), losses(whole)
    assert state.epoch == 6 and {epoch for _, epoch, *_ in steps} == {1, 2, 3, 4, 5, 6}
    assert len(steps) < 6 * 5  # windows
    for stop in (2, len(steps) // 2, len(steps) + 3):
        fit_on_cpu(small("parts", training={**recipe, "max_steps": stop}, **train))
    assert losses(tmp_path / "parts") == steps and state_of(tmp_path / "parts").epoch == 6


def test_an_epoch_without_pairs_is_an_error(small, tmp_path):
    train = {"train": {"tsv": str(tmp_path / "train.tsv"), "weight": 0.001}}
    with pytest.raises(DataError, match=r"epoch 1 has no training pairs; raise the weights of data\.train"):
        fit_on_cpu(small(**train))


def test_other_windows_restart_the_epoch(small, monkeypatch, caplog):
    later = 24
    before = state_of(fit_on_cpu(small(training={"max_steps": 9})))
    assert (before.epoch, before.position.window > 0) == (0, True)
    first, real = [], loop.train_step

    def train_step(self, step):
        first.append(step.epoch)
        return real(self, step)

    monkeypatch.setattr(loop, "train_step", train_step)
    run = fit_on_cpu(small(window_pairs=later, training={"max_steps": None, "max_epochs": 1}))
    assert (
        caplog.text.count("the windows of an epoch have changed (data.window_pairs); restarting epoch 1") == 1
    )
    assert (state_of(run).epoch, state_of(run).position.step) == (1, 0) and len(first) > before.step
    caplog.clear()
    fit_on_cpu(small(window_pairs=later, training={"max_steps": None, "max_epochs": 2}))
    assert "the windows of an epoch have changed" not in caplog.text


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


@pytest.fixture
def damaged(small):
    """A run that has taken a step, an uninterrupted one, and a shard of the first whose rows are damaged."""
    whole = fit_on_cpu(small("whole", training={"max_steps": 14}))
    run = fit_on_cpu(small("parts", training={"max_steps": 1}))
    file = shard_file(run / "data", 2)
    content = file.read_bytes()
    at = content.index(Shard(file).rows([0]).ids[0][-4:].tobytes())
    file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    return run, whole, file, content


def test_damage_is_found_before_a_window_is_used_and_repaired_at_the_next_start(small, damaged, caplog):
    run, whole, file, content = damaged
    recipe, found = {"max_steps": 14}, file.read_bytes()
    with pytest.raises(DataError, match=f"{file}: damaged .*; run again to encode this shard again"):
        fit_on_cpu(small("parts", training=recipe))
    reached = state_of(run)
    assert 1 <= reached.step < 14 and reached.step == losses(run)[-1][0]  # what was learned is saved
    assert losses(run) == losses(whole)[: reached.step]
    assert file.read_bytes() == found  # nothing is lost if the text is gone
    caplog.clear()
    caplog.set_level(logging.WARNING)
    fit_on_cpu(small("parts", training=recipe))
    [message] = [message for message in caplog.messages if "encoding" in message]
    assert message.startswith(f"{file}: damaged ") and message.endswith("; encoding this shard again")
    assert file.read_bytes() == content and losses(run) == losses(whole)
    assert not (run / "suspect-shards.json").exists()


@pytest.mark.parametrize("content", ["unknown ids", pytest.param("other ids", marks=pytest.mark.slow)])
def test_a_shard_that_is_overwritten_while_a_single_window_is_trained_on_is_named(
    small, tmp_path, monkeypatch, content
):
    """Ids that are not in the vocabulary would be an IndexError; others are found in the next epoch."""
    real, file = loop.train_step, shard_file(tmp_path / "run/data", 2)

    def overwrite(self, step):
        if self.state.step == 1:
            ids = Shard(file).rows([0]).ids[0]
            new = b"\xff" * ids.nbytes if content == "unknown ids" else ids[::-1].tobytes()
            with file.open("r+b") as stream:
                stream.seek(file.read_bytes().index(ids.tobytes()))
                stream.write(new)
        return real(self, step)

    monkeypatch.setattr(loop, "train_step", overwrite)
    with pytest.raises(DataError, match=f"{file}: damaged .*; run again to encode this shard again"):
        fit_on_cpu(small(window_pairs=64, training={"max_steps": 60}))
    fit_on_cpu(small(window_pairs=64, training={"max_steps": 60}))


def test_damage_that_an_earlier_version_has_recorded_is_repaired(small, damaged, caplog):
    run, whole, file, content = damaged
    (run / "suspect-shards.json").write_text("[2]\n")
    fit_on_cpu(small("parts", training={"max_steps": 14}))
    assert file.read_bytes() == content and losses(run) == losses(whole)
    assert not (run / "suspect-shards.json").exists()


@pytest.mark.slow
def test_a_shard_that_was_repaired_after_its_damage_was_found_is_kept(small, damaged, caplog):
    """By another run with the same data folder."""
    run, whole, file, content = damaged
    with pytest.raises(DataError, match="damaged"):
        fit_on_cpu(small("parts", training={"max_steps": 14}))
    file.write_bytes(content)
    written = file.stat().st_mtime_ns
    caplog.clear()
    fit_on_cpu(small("parts", training={"max_steps": 14}))
    assert losses(run) == losses(whole) and file.stat().st_mtime_ns == written
    assert "encoding" not in caplog.text and not (run / "suspect-shards.json").exists()


@pytest.mark.slow
def test_a_run_folder_that_cannot_be_written_does_not_hide_the_damage(small, damaged):
    _, _, file, _ = damaged

    def refuse(operation: Operation) -> None:
        if "suspect-shards.json" in operation.path.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with on_file_operation(refuse), pytest.raises(DataError, match=f"{file}: damaged .*; restore it"):
        fit_on_cpu(small("parts", training={"max_steps": 14}))


def test_window_pairs_must_be_positive(small):
    with pytest.raises(UsageError, match=r"data\.window_pairs"):
        small(window_pairs=0)
