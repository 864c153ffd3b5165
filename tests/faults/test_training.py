"""Faults of training, each named by its number in the list of faults that mtrain answers for."""

import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_fit import batches_of, go, last_checkpoint, losses, parts, read_metrics  # noqa: F401  (fixtures)

from mtrain import checkpoint
from mtrain.cli import main
from mtrain.errors import StorageError, UsageError
from mtrain.training import step
from mtrain.training.lock import locked
from mtrain.training.progress import SPIKE_WINDOW, Progress
from mtrain.training.step import Learner, StepSums


def failing(monkeypatch, times: list[int]) -> list[int]:
    """Let the `times`-th attempts (from 1) to write a checkpoint fail; returns the attempts so far."""
    attempts: list[int] = []
    real = checkpoint.write_folder

    def write(folder, fill):
        attempts.append(1)
        if len(attempts) in times:
            raise StorageError(f"{folder}: cannot write: No space left on device")
        real(folder, fill)

    monkeypatch.setattr(checkpoint, "write_folder", write)
    return attempts


# The runs of `make_config` save at steps 4 and 8, the end.


def test_02_a_full_disk_keeps_what_there_was_and_training_goes_on(make_config, monkeypatch, caplog):
    config = make_config(training={"max_steps": 12, "checkpoint_every": 2, "validate_every": 12})
    attempts = failing(monkeypatch, [2, 3, 4, 5])  # the second and third checkpoint, each tried twice
    run = go(config)
    assert last_checkpoint(run).name == "step-00000012" and len(attempts) == 8
    assert caplog.text.count("trying again") == 2
    assert caplog.text.count("going on, to save at the next checkpoint") == 2
    assert "MiB are needed" in caplog.text and "MiB are free" in caplog.text
    assert not list((run / "checkpoints").glob(".*"))


def test_02_the_third_checkpoint_in_a_row_that_fails_ends_training(make_config, monkeypatch):
    config = make_config(training={"max_steps": 12, "checkpoint_every": 2, "validate_every": 12})
    failing(monkeypatch, list(range(2, 99)))
    with pytest.raises(StorageError, match="No space left on device; 0 MiB are needed"):
        go(config)
    run = Path(config.run_dir)
    assert last_checkpoint(run).name == "step-00000002"
    assert max(record["step"] for record in read_metrics(run)) == 8
    monkeypatch.undo()
    go(config)  # and it goes on from what there is
    assert last_checkpoint(run).name == "step-00000012"


def test_02_the_last_save_must_not_fail(make_config, monkeypatch):
    failing(monkeypatch, [2, 3])
    with pytest.raises(StorageError, match="No space left"):
        go(make_config(training={"validate_every": 8, "checkpoint_every": 4, "max_steps": 8}))


def test_02_best_weights_that_could_not_be_saved_do_not_bar_later_ones(make_config, monkeypatch):
    from mtrain.training import loop
    from mtrain.training.validate import Scores

    told = iter([Scores(1.0, 3, bleu, 20) for bleu in (10, 40, 20)])
    monkeypatch.setattr(loop.Validator, "__call__", lambda *_: next(told))
    failing(monkeypatch, [2, 3])
    run = go(make_config(training={"max_steps": 12}))
    assert '"best": "step-00000012"' in (run / "checkpoints/index.json").read_text()


def test_03_one_failed_write_is_tried_again_in_a_fresh_folder(make_config, monkeypatch, caplog):
    attempts = failing(monkeypatch, [1])
    run = go(make_config())
    assert len(attempts) == 3 and "trying again" in caplog.text
    assert [step for step, *_ in losses(run)] == [2, 4, 6, 8]


def test_03_metrics_that_cannot_be_written_come_with_the_next_line(tmp_path, caplog):
    progress = Progress(tmp_path, checkpoint.TrainState(), 10, "fp32", quiet=True)
    progress.state.window = {"loss": 1.0, "nll": 1.0, "tokens": 1.0, "seconds": 1.0, "norm": 1.0}
    (tmp_path / "metrics.jsonl").mkdir()
    progress.log_step(1, 0.1)
    assert "metrics.jsonl: cannot write: Is a directory; tried again" in caplog.text
    (tmp_path / "metrics.jsonl").rmdir()
    progress.state.window = {"loss": 1.0, "nll": 1.0, "tokens": 1.0, "seconds": 1.0, "norm": 1.0}
    progress.log_step(1, 0.2)
    assert [record["learning_rate"] for record in read_metrics(tmp_path)] == [0.1, 0.2]


def test_07_a_second_fit_in_a_run_folder_names_the_first(make_config, config_file, tmp_path, capsys):
    config = make_config()
    run = go(config)
    code = f"""if True:
        from pathlib import Path
        from mtrain.training.lock import locked
        with locked(Path({str(run)!r})):
            print("held", flush=True)
            input()
    """
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
    before = {file: file.stat().st_mtime_ns for file in run.rglob("*")}
    for command in ("fit", "tokenize"):
        with pytest.raises(SystemExit) as stop:
            main([command, str(config_file), "--run-dir", str(run), "--quiet"])
        assert stop.value.code == 2
        assert f"process {holder.pid} on" in capsys.readouterr().err
    assert {file: file.stat().st_mtime_ns for file in run.rglob("*")} == before
    holder.kill()
    holder.wait()
    go(config)  # who died holds nothing


def test_07_a_file_system_without_locks_is_told_of(tmp_path, monkeypatch, caplog):
    import fcntl

    def no_locks(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with locked(tmp_path):
        assert "cannot be locked" in caplog.text
    with pytest.raises(StorageError, match="cannot write"), locked(tmp_path / "nowhere"):
        pass


def test_07_the_lock_is_free_again_afterwards(tmp_path):
    with locked(tmp_path):
        refused = pytest.raises(UsageError, match="works here; wait, or give another --run-dir")
        with refused, locked(tmp_path):
            pass
    with locked(tmp_path):
        pass


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("error", [RuntimeError("DefaultCPUAllocator: can't allocate memory"), MemoryError()])
def test_16_a_pass_that_memory_does_not_hold_is_halved(parts, monkeypatch, caplog, workers, error):  # noqa: F811
    config, model, data, tokenizer = parts
    batches = batches_of([[0, 1, 2, 3, 4], [5, 6, 7]], data, tokenizer)
    tokens = sum(batch.target_tokens for batch in batches)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    changes, real = [], step.projected_cross_entropy
    for most in (99, 2):

        def limited(hidden, *arguments, most=most):
            if len(hidden) > most:
                raise error
            return real(hidden, *arguments)

        monkeypatch.setattr(step, "projected_cross_entropy", limited)
        model.load_state_dict(before)
        learner = Learner(model, config.training, workers)
        learner.optimizer = torch.optim.SGD(model.parameters(), fused=True)
        values = learner.step(batches, tokens, 1.0).values
        changes.append({name: p.detach() - before[name] for name, p in model.named_parameters()})
        changes[-1]["values"] = values
    for name, change in changes[0].items():
        torch.testing.assert_close(change, changes[1][name], rtol=1e-10, atol=1e-12)
    assert caplog.text.count("out of memory in 2 passes of 8 pairs; they are halved") == 1
    assert "out of memory in 4 passes of 8 pairs" in caplog.text


def test_16_a_single_pair_that_memory_does_not_hold_ends_training(parts, monkeypatch):  # noqa: F811
    config, model, data, tokenizer = parts
    batches = batches_of([[0, 1]], data, tokenizer)

    def none(*_):
        raise MemoryError

    monkeypatch.setattr(step, "projected_cross_entropy", none)
    with pytest.raises(MemoryError):
        Learner(model, config.training).step(batches, 9, 0.1)


def test_a_loss_spike_is_told_with_its_rows(tmp_path, caplog):
    progress = Progress(tmp_path, checkpoint.TrainState(), 200, "fp32", quiet=True)

    def add(loss: float, rows: list[int]) -> None:
        progress.state.step += 1
        progress.add(StepSums(torch.tensor([loss * 10, loss * 10, 1.0, 0.0]), 10), rows)

    generator = torch.Generator().manual_seed(0)
    for _ in range(SPIKE_WINDOW + 20):
        add(3 + 0.1 * float(torch.randn((), generator=generator)), [1])
    assert caplog.text == ""
    with caplog.at_level(logging.WARNING):
        add(9.0, list(range(20)))
        add(3.0, [1])
    assert f"step {SPIKE_WINDOW + 21}: loss 9.00 nats/token, 3.0" in caplog.text
    assert "rows 0, 1, 2, 3, 4, 5, 6, 7, .." in caplog.text and caplog.text.count("step ") == 1


def test_halves_of_a_batch_are_its_pairs(parts):  # noqa: F811
    _, _, data, tokenizer = parts
    [batch] = batches_of([[3, 1, 6]], data, tokenizer)
    first, second = batch.halves()
    assert (first.rows, second.rows) == ([3], [1, 6])
    assert first.target_tokens + second.target_tokens == batch.target_tokens
    assert torch.equal(torch.cat([first.labels, second.labels]), batch.labels)
    assert first.halves() == [first] and replace(first).rows == [3]
