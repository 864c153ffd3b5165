"""Faults while saving: kills, full disks, failing writes, folders that are in use or cannot be written."""

import itertools
import json
import os
import resource
import shutil
import signal
import threading
import time
from collections.abc import Container, Iterator
from concurrent.futures import CancelledError
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mtrain.checkpoint.checkpoint import checkpoint_folders, open_checkpoint
from mtrain.checkpoint.state import TrainState
from mtrain.cli import main
from mtrain.data.epochs.loader import StepInput
from mtrain.errors import DivergedError, StorageError, UsageError
from mtrain.training import loop
from mtrain.training.fit import make_trainer
from mtrain.training.loop import train, train_step
from mtrain.training.model_selection import ModelSelection
from mtrain.training.records.saver import saves_in_background
from mtrain.training.setup.run_folder import locked_run_folder
from mtrain.training.step.learner import StepMetrics
from mtrain.training.trainer import Trainer
from tests.support.cli import one_line
from tests.support.faults.file_operations import Operation, is_save, on_file_operation
from tests.support.faults.processes import run_in_child, start, wait, wait_until
from tests.support.faults.runs import contents_of
from tests.support.faults.saves import Killed, fail_writes, no_space, save_in_background
from tests.support.training import fit_on_cpu, last_checkpoint, losses, make_progress, read_metrics, with_bleu


@pytest.fixture
def killed_saves(make_config, saving):
    """Kill a save at each of its file operations in turn.

    Yields the run after each kill, and the files that the old and the new checkpoint should have.
    """

    def saves(keep: int) -> Iterator[tuple[Path, dict[str, dict[str, bytes]]]]:
        recipe = {"checkpoint_every": 2, "keep_checkpoints": keep, "ema_decay": 0.9}
        trainer = make_trainer(make_config(training=recipe), device="cpu")
        steps, run = trainer.steps(), trainer.run_dir
        for copy in (run.with_name("old"), run.with_name("new")):
            train_step(trainer, next(steps))
            train_step(trainer, next(steps))
            trainer.state.best_step = trainer.state.step
            trainer.saver.save(last=True)
            trainer.selection.validate(lambda: True)  # publishes the weights
            shutil.copytree(run, copy)
        folders = [*checkpoint_folders(run.with_name("old")), checkpoint_folders(run)[-1]]
        expected = {folder.name: contents_of(folder) for folder in folders}
        done = 0

        def kill(operation: Operation) -> None:  # from one operation on, none succeeds
            nonlocal done
            if is_save(operation, run):
                if done >= allowed:
                    raise Killed
                done += 1

        for allowed in itertools.count():  # noqa: B007
            shutil.rmtree(run)
            shutil.copytree(run.with_name("old"), run)
            done, trainer.saver.saved_step = 0, -1
            try:
                with on_file_operation(kill):
                    trainer.saver.save(last=False)
                    trainer.saver.settle()
                    trainer.selection.validate(lambda: True)
            except Killed:
                yield run, expected
            else:
                break
        assert allowed > 30

    return saves


def test_01_killed_at_any_operation_of_a_save_leaves_the_old_or_the_new(killed_saves):
    newest = set()
    for run, expected in killed_saves(keep=3):
        folders = checkpoint_folders(run)
        for folder in folders:
            assert open_checkpoint(folder).state.step == int(folder.name[5:])
            assert contents_of(folder) == expected[folder.name]
        newest.add(folders[-1].name)
        assert folders[0].name == "step-00000002"
    assert newest == expected.keys()


@pytest.mark.slow
def test_06_with_one_checkpoint_kept_a_valid_one_exists_at_every_instant(killed_saves):
    gone = 0
    for run, expected in killed_saves(keep=1):
        folders = checkpoint_folders(run)
        assert folders and all(contents_of(folder) == expected[folder.name] for folder in folders)
        gone += folders[0].name != "step-00000002"
    assert gone  # the old checkpoint is removed in the end


@pytest.fixture
def failing():
    """Let some attempts to write the model of a checkpoint fail, by their numbers from 1.

    Returns the list of attempts so far.
    """
    with ExitStack() as stack:

        def fail(numbers: Container[int]) -> list[Path]:
            handle, attempts = fail_writes("model.safetensors", numbers)
            stack.enter_context(on_file_operation(handle))
            return attempts

        yield fail


# The runs of `make_config` save at step 4 and at step 8, which is the last.


def test_02_a_full_disk_keeps_the_old_checkpoint_and_training_continues(make_config, failing, caplog, saving):
    config = make_config(training={"max_steps": 12, "checkpoint_every": 2, "validate_every": 12})
    attempts = failing([2, 3, 4, 5])  # the second and third checkpoint, each tried twice
    run = fit_on_cpu(config)
    assert last_checkpoint(run).name == "step-00000012" and len(attempts) == 8
    assert caplog.text.count("trying again") == 2
    assert caplog.text.count("training continues and saves at the next checkpoint") == 2
    assert "MiB needed" in caplog.text and "MiB free" in caplog.text
    assert not list((run / "checkpoints").glob(".*"))


def test_02_the_third_checkpoint_in_a_row_that_fails_ends_training(make_config, saving):
    config = make_config(training={"max_steps": 12, "checkpoint_every": 2, "validate_every": 12})
    fail, _ = fail_writes("model.safetensors", range(2, 99))
    with on_file_operation(fail), pytest.raises(StorageError, match="No space left on device; 0 MiB needed"):
        fit_on_cpu(config)
    run = Path(config.run_dir)
    assert last_checkpoint(run).name == "step-00000002"
    assert max(record["step"] for record in read_metrics(run)) in (8, 10)  # noticed at the next save
    fit_on_cpu(config)  # it resumes from the last checkpoint
    assert last_checkpoint(run).name == "step-00000012"


def test_training_continues_while_a_checkpoint_is_written(make_config, monkeypatch):
    """The checkpoint has the weights and the random states of its step."""
    recipe = {
        "model": {"dropout": 0.3},
        "training": {"checkpoint_every": 2, "validate_every": 8, "keep_checkpoints": 9},
    }
    expected = contents_of(fit_on_cpu(make_config("expected", **recipe)) / "checkpoints/step-00000002")
    save_in_background(monkeypatch)
    real, stepped, waited = loop.train_step, threading.Event(), []

    def delay(operation: Operation) -> None:
        if operation.name == "write tensors" and not waited:
            waited.append(stepped.wait(60))

    def notice(trainer: Trainer, step: StepInput) -> StepMetrics:
        metrics = real(trainer, step)
        if trainer.state.step == 3:
            stepped.set()
        return metrics

    monkeypatch.setattr(loop, "train_step", notice)
    with on_file_operation(delay):
        run = fit_on_cpu(make_config("run", **recipe))
    assert waited == [True]
    written = contents_of(run / "checkpoints/step-00000002")
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert written[name] == expected[name]
    states = [json.loads(files["state.json"]) for files in (written, expected)]
    assert states[0]["rng"] == states[1]["rng"] and states[0]["step"] == 2


@pytest.mark.parametrize(
    ("device", "shares_weights", "memory", "expected"),
    [
        ("cuda", False, 2**30, True),
        ("cuda", False, 2**30 - 2**20, False),  # the copy would take more than a quarter of it
        ("cuda", True, 2**30, False),
        ("cpu", False, 2**30, False),
    ],
)
def test_a_thread_writes_checkpoints_of_a_gpu_if_host_memory_suffices(
    monkeypatch, device, shares_weights, memory, expected
):
    monkeypatch.setattr("mtrain.training.records.saver.available_memory", lambda device: memory)
    model = torch.nn.Linear(2**12, 2**12, bias=False, device="meta")
    learner = SimpleNamespace(device=torch.device(device), shares_weights=shares_weights, model=model)
    assert saves_in_background(learner) == expected


def test_a_run_that_fails_ends_after_the_checkpoint_that_is_being_written(make_config, monkeypatch):
    save_in_background(monkeypatch)
    real = loop.train_step

    def fail(trainer: Trainer, step: StepInput) -> StepMetrics:
        if trainer.state.step == 2:
            raise DivergedError("diverged")
        return real(trainer, step)

    def delay(operation: Operation) -> None:
        if operation.name == "write tensors":
            time.sleep(0.1)

    monkeypatch.setattr(loop, "train_step", fail)
    with on_file_operation(delay), pytest.raises(DivergedError):
        fit_on_cpu(make_config(training={"checkpoint_every": 2, "validate_every": 8}))
    assert open_checkpoint(last_checkpoint(Path(make_config().run_dir))).state.step == 2


def test_02_the_last_save_must_not_fail(make_config, failing):
    failing([2, 3])
    with pytest.raises(StorageError, match="No space left"):
        fit_on_cpu(make_config(training={"validate_every": 8, "checkpoint_every": 4, "max_steps": 8}))


@pytest.mark.parametrize("numbers", [(2, 3), range(2, 99)])
def test_02_a_save_that_failed_is_repeated_if_the_patience_ends_the_run(
    make_config, failing, scripted_scores, numbers
):
    scripted_scores(*map(with_bleu, (30, 20)))
    failing(numbers)
    config = make_config(training={"max_steps": 100, "patience": 1})
    if 4 in numbers:
        with pytest.raises(StorageError, match="No space left"):
            fit_on_cpu(config)
        return
    run = fit_on_cpu(config)
    assert last_checkpoint(run).name == "step-00000008"
    assert '"best": "step-00000004"' in (run / "checkpoints/index.json").read_text()


def test_02_better_weights_whose_save_failed_become_the_best_if_the_time_ends(
    make_config, failing, monkeypatch
):
    """The weights are saved and validated again."""
    scores, hours, clock = map(with_bleu, (30, 40, 40)), [], time.perf_counter

    def validate(*_):
        found = next(scores)
        hours.extend([1] * (found.bleu == 40))
        return found

    monkeypatch.setattr(ModelSelection, "scores_of", validate)
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + 3600 * len(hours))
    failing([2, 3])
    recipe = {"max_steps": 100, "max_minutes": 30.0, "average_checkpoints": 2}
    run = fit_on_cpu(make_config(training=recipe))
    assert '"best": "step-00000008"' in (run / "checkpoints/index.json").read_text()
    files = run / "model/model.safetensors", run / "checkpoints/step-00000008/average.safetensors"
    assert files[0].read_bytes() == files[1].read_bytes()


def test_02_best_weights_that_could_not_be_saved_do_not_exclude_later_ones(
    make_config, failing, scripted_scores
):
    scripted_scores(*map(with_bleu, (10, 40, 20)))
    failing([2, 3])
    run = fit_on_cpu(make_config(training={"max_steps": 12}))
    assert '"best": "step-00000012"' in (run / "checkpoints/index.json").read_text()


def test_02_best_weights_whose_copy_failed_are_published_with_the_next_checkpoint(
    make_config, failing, scripted_scores
):
    scripted_scores(*map(with_bleu, (10, 40, 20)))
    copies, saved = [], failing([])

    def fail(operation: Operation) -> None:
        path = operation.path
        if (operation.name, path.parent.name, path.name) == ("open", ".model.tmp", "model.safetensors"):
            copies.append(path)
            if len(copies) in (2, 3):
                no_space()

    with on_file_operation(fail):
        run = fit_on_cpu(make_config(training={"max_steps": 12, "keep_checkpoints": 1}))
    assert '"best": "step-00000008"' in (run / "checkpoints/index.json").read_text()
    weights = [folder / "model.safetensors" for folder in (run / "model", run / "checkpoints/step-00000008")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert len(copies) == 4 and len(saved) == 3  # the checkpoint itself was saved only once


def test_06_a_kill_while_a_checkpoint_is_replaced_is_repaired(make_config, caplog):
    other = fit_on_cpu(make_config("other"))
    config = make_config(training={"keep_checkpoints": 1}, tokenizer={"path": str(other)})
    run = fit_on_cpu(config)
    shutil.rmtree(other)  # no longer needed once the run has started
    [*_, newest] = checkpoint_folders(run)
    for folder in checkpoint_folders(run)[:-1]:
        shutil.rmtree(folder)
    shutil.copytree(newest, newest.with_name(f".{newest.name}.tmp"))
    newest.rename(newest.with_name(f".{newest.name}.old"))
    with caplog.at_level("INFO", logger="mtrain"):
        fit_on_cpu(config)
    assert newest.is_dir() and f"resuming from {newest}" in caplog.text
    assert not list(newest.parent.glob(".*"))


def test_03_one_failed_write_is_repeated_in_a_new_folder(make_config, failing, caplog):
    attempts = failing([1])
    run = fit_on_cpu(make_config())
    assert len(attempts) == 3 and "trying again" in caplog.text
    assert [step for step, *_ in losses(run)] == [2, 4, 6, 8]


def test_03_metrics_that_cannot_be_written_are_written_with_the_next_line(tmp_path, caplog):
    progress = make_progress(tmp_path)
    progress.sums = dict.fromkeys(("loss", "nll", "tokens", "seconds", "norm", "steps"), 1.0)
    (tmp_path / "metrics.jsonl").mkdir()
    progress.log_step(1, 0.1)
    assert "metrics.jsonl: cannot write: Is a directory; trying again" in caplog.text
    (tmp_path / "metrics.jsonl").rmdir()
    progress.sums = dict.fromkeys(("loss", "nll", "tokens", "seconds", "norm", "steps"), 1.0)
    progress.log_step(1, 0.2)
    assert [record["learning_rate"] for record in read_metrics(tmp_path)] == [0.1, 0.2]


def test_03_the_last_line_of_metrics_that_cannot_be_written_is_written_at_the_end(tmp_path, caplog):
    progress = make_progress(tmp_path)
    progress.sums = dict.fromkeys(("loss", "nll", "tokens", "seconds", "norm", "steps"), 1.0)
    (tmp_path / "metrics.jsonl").mkdir()
    progress.log_step(1, 0.1)
    progress.close()
    assert "metrics.jsonl: cannot write: Is a directory; some lines are not written" in caplog.text
    (tmp_path / "metrics.jsonl").rmdir()
    progress.close()
    assert [record["learning_rate"] for record in read_metrics(tmp_path)] == [0.1]


def test_03_the_line_of_a_validation_that_is_repeated_is_not_written(tmp_path):
    """The disk is full, so neither the line nor the outcome of the validation can be written."""
    progress = make_progress(tmp_path, step=4)
    progress.state.validation_due = True
    (tmp_path / "metrics.jsonl").mkdir()
    progress.sums = dict.fromkeys(("loss", "nll", "tokens", "seconds", "norm", "steps"), 1.0)
    progress.log_step(1, 0.1)
    progress.log_validation(with_bleu(30), best=True)
    (tmp_path / "metrics.jsonl").rmdir()
    progress.remove_later_records()
    progress.close()
    [record] = read_metrics(tmp_path)
    assert record["learning_rate"] == 0.1


def test_03_a_line_of_metrics_half_written_on_a_full_disk_is_written_once(tmp_path):
    def write() -> None:
        progress = make_progress(tmp_path)
        for rate, room in ((0.1, 10**6), (0.2, None), (0.3, 10**6)):
            size = progress.file.stat().st_size if progress.file.exists() else 0
            resource.setrlimit(resource.RLIMIT_FSIZE, (room or size + 20, resource.RLIM_INFINITY))
            progress.sums = {"loss": 1.0, "nll": 1.0, "tokens": 1.0, "seconds": 1.0, "norm": 1.0, "steps": 1}
            progress.log_step(1, rate)

    assert run_in_child(write) == 0
    assert [record["learning_rate"] for record in read_metrics(tmp_path)] == [0.1, 0.2, 0.3]


def test_03_an_incomplete_last_line_of_metrics_is_removed(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}')
    make_progress(tmp_path, step=2).remove_later_records()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'


def test_the_speed_of_steps_excludes_the_time_of_saving(make_config, monkeypatch):
    hours, clock = [], time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + 3600 * len(hours))

    def last_an_hour(operation: Operation) -> None:
        if operation.name == "open" and operation.path.match(".index.json.*.tmp"):
            hours.append(1)

    with on_file_operation(last_an_hour):
        lines = read_metrics(fit_on_cpu(make_config()))
    assert lines[-1]["seconds"] > 3600 and min(x.get("target_tokens_per_second", 9) for x in lines) > 1


def test_04_a_file_in_the_place_of_the_run_folder_is_an_error_before_the_first_step(
    mtrain, config_file, tmp_path
):
    (tmp_path / "file").write_text("precious")
    for place in (tmp_path / "file", tmp_path / "file" / "run"):
        code, out, err = mtrain("fit", config_file, "--run-dir", place, "--device", "cpu")
        assert (code, out) == (6, "") and "cannot create the run folder" in one_line(err)
    assert (tmp_path / "file").read_text() == "precious"


def test_07_a_second_fit_in_a_run_folder_names_the_first(make_config, config_file, tmp_path, capsys):
    config = make_config()
    run = fit_on_cpu(config)
    held = tmp_path / "held"

    def hold() -> None:
        with locked_run_folder(run):
            held.touch()
            time.sleep(120)

    holder = start(hold)
    assert wait_until(holder, held.exists) is None
    before = {file: file.stat().st_mtime_ns for file in run.rglob("*")}
    for command in ("fit", "tokenize"):
        with pytest.raises(SystemExit) as stop:
            main([command, str(config_file), "--run-dir", str(run), "--quiet"])
        assert stop.value.code == 2
        assert f"process {holder} on" in capsys.readouterr().err
    assert {file: file.stat().st_mtime_ns for file in run.rglob("*")} == before
    os.kill(holder, signal.SIGKILL)
    wait(holder)
    fit_on_cpu(config)  # the lock of a dead process is released


def test_07_an_owner_that_cannot_be_recorded_does_not_prevent_locking(tmp_path):
    (tmp_path / ".lock-owner").mkdir()
    with locked_run_folder(tmp_path):
        pass


def test_07_the_lock_is_released_at_the_end(tmp_path):
    with locked_run_folder(tmp_path):
        refused = pytest.raises(UsageError, match=r"in use by process .*; wait, or give another --run-dir")
        with refused, locked_run_folder(tmp_path):
            pass
    with locked_run_folder(tmp_path):
        pass


def test_a_save_that_fails_after_a_stop_signal_is_repeated_once(make_config, monkeypatch):
    """A batch system may kill the process soon. The time that was spent waiting for data is saved as well."""
    trainer = make_trainer(make_config(training={"log_every": 100}), device="cpu")
    real, tries, stop = trainer.steps, [], SimpleNamespace(received=None)

    def stopped_steps(_: object) -> Iterator[StepInput]:
        yield from itertools.islice(real(), 3)
        time.sleep(0.2)
        stop.received = signal.SIGTERM
        raise CancelledError

    def fail(run: Path, tensors: object, state: TrainState, *_: object) -> None:
        tries.append(state.metric_sums["data_seconds"])
        raise StorageError("no space")

    monkeypatch.setattr(trainer, "steps", stopped_steps)
    monkeypatch.setattr("mtrain.training.records.saver.save_checkpoint", fail)
    with pytest.raises(StorageError):
        train(trainer, stop)
    assert len(tries) == 2 and min(tries) >= 0.2
