"""Faults of one of several ranks: signals, kills, differences, non-finite numbers, exhausted memory."""

import os
import shutil
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import yaml

from mtrain.checkpoint.checkpoint import checkpoint_folders, open_checkpoint
from mtrain.checkpoint.model_folder import load_model
from mtrain.checkpoint.tensors import model_without_weights
from mtrain.config.load import load_config
from mtrain.config.yaml_io import to_yaml
from mtrain.data.epochs.windows import WindowedCorpus
from mtrain.distributed import many_ranks, store
from mtrain.model.build import build_model
from mtrain.training import loop, trainer
from mtrain.training.fit import make_trainer
from mtrain.training.model_selection import ModelSelection
from mtrain.training.setup.micro_batch import read_limit
from mtrain.training.step import average
from mtrain.training.validation.translation import Scores, Validator
from tests.support.encoding import use_sizes
from tests.support.faults.file_operations import on_file_operation
from tests.support.faults.processes import wait, wait_until
from tests.support.faults.runs import make_run_config, result_of
from tests.support.faults.saves import fail_writes
from tests.support.ranks import (
    command,
    copy_prepared,
    exit_codes,
    fit_command,
    read_logs,
    run_ranks,
    started_ranks,
)
from tests.support.training import last_checkpoint, losses, read_metrics
from tests.support.undocumented import documented_only

STEPS = 26  # of 23 in an epoch


def fit(run: Path, steps: int = STEPS, *more: object) -> Callable[[], None]:
    """A function that trains in a run folder until `steps`."""
    return fit_command(run, steps, *more)


def is_trained(run: Path, steps: int) -> Callable[[], bool]:
    """A condition: metrics.jsonl has that many steps."""
    file = run / "metrics.jsonl"
    return lambda: file.exists() and len(file.read_text().splitlines()) >= steps


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run of two ranks that nothing has disturbed."""
    folder = tmp_path_factory.mktemp("ranks")
    assert exit_codes(run_ranks(2, fit(folder / "whole"), folder)) == [0, 0], read_logs(folder)
    return folder / "whole"


@pytest.fixture
def run(whole, tmp_path) -> Path:
    """The folder of a new run that needs no preparation."""
    return copy_prepared(whole, tmp_path / "run")


def test_02_if_the_disk_is_full_for_rank_0_the_others_end_with_its_message(run, tmp_path, saving):
    """A failed save is tried again at the next checkpoint, except after the last step."""

    def work() -> None:
        fail, _ = fail_writes("model.safetensors", range(99))
        with on_file_operation(fail):
            fit(run, 7)()

    assert exit_codes(run_ranks(2, work, tmp_path)) == [6, 7]
    logs = read_logs(tmp_path)
    assert "training continues and saves at the next checkpoint" in logs[0]
    assert "error: " in logs[0].splitlines()[-1] and "MiB needed" in logs[0].splitlines()[-1]
    assert "rank 1: error: rank 0 on " in logs[1] and "MiB needed" in logs[1] and logs[1].count("\n") == 1


@pytest.mark.slow
def test_02_if_the_patience_ends_the_run_all_ranks_repeat_the_save_that_failed(
    run, tmp_path, monkeypatch, saving
):
    scores = (Scores(nll, 3, 20, 20, {}) for nll in (1.0, 2.0))
    monkeypatch.setattr(ModelSelection, "scores_of", lambda *_: next(scores))

    def work() -> None:
        fail, _ = fail_writes("model.safetensors", (2, 3))
        with on_file_operation(fail):
            fit(run, STEPS, "--set", "training.validate_every=5", "--set", "training.patience=1")()

    assert exit_codes(run_ranks(2, work, tmp_path)) == [0, 0], read_logs(tmp_path)
    assert last_checkpoint(run).name == "step-00000010" and losses(run)[-1][0] == 10


def test_13_sigterm_to_one_rank_stops_all_at_the_same_step(run, tmp_path):
    with started_ranks(2, fit(run, 10**6), tmp_path) as children:
        assert wait_until(children[0], is_trained(run, 3), every=0.005) is None, read_logs(tmp_path)
        for _ in range(2):  # torchrun forwards a signal that all processes have received
            os.kill(children[1], signal.SIGTERM)
            time.sleep(0.1)  # or both may arrive as one
        assert exit_codes([wait(child) for child in children]) == [143, 143]
    step = losses(run)[-1][0]
    assert last_checkpoint(run).name == f"step-{step:08d}"
    line = f"stopped by SIGTERM; saved at step {step}; run it again to resume\n"
    assert read_logs(tmp_path) == [line, f"rank 1: {line}"]


def test_14_if_a_rank_is_killed_the_others_end_and_the_run_resumes_exactly(whole, run, tmp_path, monkeypatch):
    monkeypatch.setattr(store, "GRACE", 2.0)
    with started_ranks(2, fit(run), tmp_path) as children:
        assert wait_until(children[0], is_trained(run, 3), every=0.005) is None, read_logs(tmp_path)
        os.kill(children[1], signal.SIGKILL)
        assert exit_codes([wait(child) for child in children]) == [7, -signal.SIGKILL]
    [message, _] = read_logs(tmp_path)
    assert message.startswith("error: rank 1 on ") and "ended without a message" in message
    assert message.count("\n") == 1
    assert last_checkpoint(run).name == f"step-{losses(run)[-1][0]:08d}"  # nothing is lost
    assert exit_codes(run_ranks(2, fit(run), tmp_path)) == [0, 0], read_logs(tmp_path)
    assert result_of(run) == result_of(whole)


def test_14_a_rank_that_is_killed_before_the_first_step_is_named(run, tmp_path, monkeypatch):
    real = build_model

    def make_model(*arguments):
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments)

    monkeypatch.setattr(store, "GRACE", 2.0)
    monkeypatch.setattr(trainer, "build_model", make_model)
    assert exit_codes(run_ranks(2, fit(run), tmp_path)) == [7, -signal.SIGKILL]
    assert "error: rank 1 on " in read_logs(tmp_path)[0]


@pytest.mark.slow
@pytest.mark.parametrize("last", [10, STEPS])
def test_14_a_step_after_which_a_rank_is_killed_is_logged_and_validated(
    whole, run, tmp_path, monkeypatch, last
):
    monkeypatch.setattr(store, "GRACE", 2.0)
    real = loop.train_step

    def train_step(self, step):
        metrics = real(self, step)
        if self.ranks.rank == 1 and self.state.step == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return metrics

    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_step", train_step)
        assert exit_codes(run_ranks(2, fit(run), tmp_path)) == [7, -signal.SIGKILL]
    assert last_checkpoint(run).name == f"step-{last:08d}"
    assert exit_codes(run_ranks(2, fit(run), tmp_path)) == [0, 0], read_logs(tmp_path)
    assert result_of(run) == result_of(whole)
    assert [line["step"] for line in read_metrics(run) if "validation" in line] == [10, 20, STEPS]


@pytest.mark.slow
def test_14_a_rank_that_does_not_respond_is_named(run, tmp_path, monkeypatch):
    monkeypatch.setattr(many_ranks, "STEP_TIMEOUT", timedelta(seconds=2))
    monkeypatch.setattr(store, "GRACE", 2.0)
    with started_ranks(2, fit(run, 10**6), tmp_path) as children:
        assert wait_until(children[0], is_trained(run, 3), every=0.005) is None, read_logs(tmp_path)
        os.kill(children[1], signal.SIGSTOP)
        assert wait(children[0]).exit_code == 7
    assert " did not respond in time; " in read_logs(tmp_path)[0]
    assert checkpoint_folders(run)


@pytest.mark.slow
def test_14_a_rank_that_opens_a_window_late_is_waited_for(tmp_path, monkeypatch):
    """The second window of the first epoch, and the first window of the second epoch."""
    use_sizes(monkeypatch, 20, 100, 50)
    monkeypatch.setattr(many_ranks, "STEP_TIMEOUT", timedelta(seconds=1))
    real, late = WindowedCorpus.open, [(0, 1), (1, 0)]

    def open_late(self, position, cancelled):
        if position[:2] in late and os.environ["RANK"] == "1":
            time.sleep(2.5)
            (tmp_path / "late-{}-{}".format(*position[:2])).touch()
        return real(self, position, cancelled)

    monkeypatch.setattr(WindowedCorpus, "open", open_late)
    work = fit(tmp_path / "run", STEPS, "--set", "data.window_pairs=150")
    assert exit_codes(run_ranks(2, work, tmp_path)) == [0, 0], read_logs(tmp_path)
    assert len(list(tmp_path.glob("late-*"))) == len(late)


@pytest.mark.parametrize(
    ("count", "sizes"),
    [
        (2, [1]),
        pytest.param(2, [2, 1], marks=pytest.mark.slow),
        pytest.param(4, [4, 2, 1], marks=pytest.mark.slow),
    ],
)
def test_11_a_checkpoint_resumes_on_any_number_of_ranks(whole, tmp_path, monkeypatch, count, sizes):
    """Exactly on the same number; otherwise with a warning, and without repeating or losing a pair."""
    real = loop.train_step

    def train_step(self, step):
        with (self.run_dir / f"rows-{self.ranks.rank}").open("a") as file:
            file.writelines(f"{step.epoch} {row}\n" for batch in step.batches for row in batch.rows)
        return real(self, step)

    monkeypatch.setattr(loop, "train_step", train_step)
    if count != 2:
        whole = tmp_path / "whole"
        assert exit_codes(run_ranks(count, fit(whole), tmp_path)) == [0] * count
    assert exit_codes(run_ranks(count, fit(tmp_path / "half", 10), tmp_path)) == [0] * count
    for size in sizes:
        run = Path(shutil.copytree(tmp_path / "half", tmp_path / f"on-{size}"))
        assert exit_codes(run_ranks(size, fit(run), tmp_path)) == [0] * size, read_logs(tmp_path)
        rows = sorted(line for file in run.glob("rows-*") for line in file.read_text().splitlines())
        first = [line for line in rows if line.startswith("1 ")]
        pairs = len(set(first))
        assert len(first) == pairs == 292
        assert len(rows) == len(set(rows)) > pairs  # no pair twice in the second epoch either
        assert (result_of(run) == result_of(whole)) == (size == count)
        assert ("not bit-identically" in read_logs(tmp_path)[0]) == (size != count)
        assert abs(losses(run)[-1][2] - losses(whole)[-1][2]) < 0.5


@pytest.mark.slow
def test_11_stages_resume_exactly_on_two_ranks_and_begin_at_the_same_steps_on_one(whole, tmp_path):
    train = "[{toy: validation, name: a}, {toy: test, name: b}]"
    stages = "[{shares: {a: 1, b: 1}, max_steps: 5}, {shares: {a: 2, b: 1}, max_steps: 6}, {shares: {b: 1}}]"
    # Learning a vocabulary may hang in a process that was forked after SentencePiece has started threads.
    more = (
        "--set",
        f"data.train={train}",
        "--set",
        f"data.stages={stages}",
        "--set",
        f"tokenizer.path={whole}",
    )
    once, parts, alone = (tmp_path / name for name in ("once", "parts", "alone"))
    for run, steps, ranks in ((once, 16, 2), (parts, 4, 2), (parts, 8, 2), (parts, 16, 2), (alone, 16, 1)):
        assert exit_codes(run_ranks(ranks, fit(run, steps, *more), tmp_path)) == [0] * ranks
    assert result_of(parts) == result_of(once)
    lines = [[line for line in read_metrics(run) if "loss" in line] for run in (once, alone)]
    places = [[(line["epoch"], line["stage"], line["target_tokens"]) for line in found] for found in lines]
    assert places[0] == places[1] and {stage for _, stage, _ in places[0]} == {1, 2, 3}


def test_15_a_number_that_is_not_finite_on_one_rank_skips_the_step_on_all(run, tmp_path, on_training_forward):
    calls = []

    def poison(_, hidden):
        calls.append(1)
        return hidden * float("nan") if os.environ["RANK"] == "1" and len(calls) == 9 else None

    on_training_forward(poison)
    assert exit_codes(run_ranks(2, fit(run, 9), tmp_path)) == [0, 0], read_logs(tmp_path)
    lines = [line for line in read_metrics(run) if "loss" in line]
    assert [line["loss"] == "NaN" for line in lines].count(True) == 1 and lines[-1]["skipped_steps"] == 1
    logs = read_logs(tmp_path)
    assert logs[0].count("step skipped") == 1 and logs[1] == ""


@pytest.mark.parametrize("in_backward", [pytest.param(False, marks=pytest.mark.slow), True])
def test_14_a_rank_that_hangs_is_named(run, tmp_path, monkeypatch, on_training_forward, in_backward):
    """In a forward pass, or while the others wait for its gradients. No private function of PyTorch is
    needed."""
    monkeypatch.setattr(many_ranks, "STEP_TIMEOUT", timedelta(seconds=1))
    monkeypatch.setattr(store, "GRACE", 2.0)
    calls = []

    def work() -> None:
        with documented_only():
            fit(run, STEPS, "--set", "training.micro_batch_tokens=512")()  # one micro-batch for each rank

    def hang(_, hidden):
        calls.append(1)
        if os.environ["RANK"] == "1" and len(calls) == 9:
            if in_backward:
                hidden.register_hook(lambda _: time.sleep(99))
            else:
                time.sleep(99)

    on_training_forward(hang)
    with started_ranks(2, work, tmp_path) as children:
        assert wait(children[0]).exit_code == 7
    assert "error: rank 1 on " in read_logs(tmp_path)[0]
    assert " did not respond in time; " in read_logs(tmp_path)[0]
    step = losses(run)[-1][0]
    assert step > 1 and last_checkpoint(run).name == f"step-{step:08d}"  # rank 0 has saved what was complete


@pytest.mark.slow
def test_14_the_first_step_may_take_longer_than_others(run, tmp_path, monkeypatch, on_training_forward):
    """As when kernels are compiled."""
    monkeypatch.setattr(many_ranks, "STEP_TIMEOUT", timedelta(seconds=1))
    calls = []

    def start_late(*_):
        calls.append(1)
        if os.environ["RANK"] == "1" and len(calls) == 1:
            time.sleep(3)

    on_training_forward(start_late)
    assert exit_codes(run_ranks(2, fit(run, 2), tmp_path)) == [0, 0], read_logs(tmp_path)


@pytest.mark.slow
def test_all_ranks_validate_the_averaged_weights(run, tmp_path):
    changed = ["training.ema_decay=null", "training.average_checkpoints=2", "training.best_metric=nll"]
    options = [option for value in changed for option in ("--set", value)]
    assert exit_codes(run_ranks(2, fit(run, 10, *options), tmp_path)) == [0, 0], read_logs(tmp_path)
    [nll] = (line["validation"]["nll"] for line in read_metrics(run) if "validation" in line)
    config = load_config(run / "config.yaml")
    selection = make_trainer(config, device="cpu").selection
    assert selection.scores_of(load_model(run).model).nll == pytest.approx(nll, rel=1e-6)


@pytest.mark.slow
def test_30_a_validation_that_fails_on_another_rank_is_repeated_at_the_next_one(run, tmp_path, monkeypatch):
    real, calls = Validator.share, []

    def share(self, model):
        calls.append(1)
        if self.ranks.rank == 1 and len(calls) == 1:
            raise MemoryError
        return real(self, model)

    monkeypatch.setattr(Validator, "share", share)
    train = fit(run, 5, "--set", "training.validate_every=2")
    assert exit_codes(run_ranks(2, train, tmp_path)) == [0, 0], read_logs(tmp_path)
    assert "step 2: validation failed: rank 1: " in read_logs(tmp_path)[0]
    assert [line["step"] for line in read_metrics(run) if "validation" in line] == [4, 5]


@pytest.mark.slow
def test_30_a_rank_that_is_killed_during_a_validation_is_not_a_failed_validation(run, tmp_path, monkeypatch):
    real = Validator.share

    def share(self, model):
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, model)

    monkeypatch.setattr(Validator, "share", share)
    train = fit(run, 5, "--set", "training.validate_every=2")
    assert exit_codes(run_ranks(2, train, tmp_path)) == [7, -signal.SIGKILL]
    log = read_logs(tmp_path)[0]
    assert "rank 1 on " in log and "validation failed" not in log
    assert last_checkpoint(run).name == "step-00000002"


def test_33_what_rank_0_cannot_prepare_ends_the_others_with_its_message(tmp_path):
    config = make_run_config(tmp_path / "run").model_dump(mode="json", exclude_unset=True)
    missing = {"source": str(tmp_path / "a.en"), "target": str(tmp_path / "a.fr")}
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({**config, "data": {**config["data"], "train": missing}}))
    assert exit_codes(run_ranks(2, command("fit", file, "--device", "cpu"), tmp_path)) == [3, 7]
    logs = read_logs(tmp_path)
    assert logs[0].startswith("error: ") and "a.en: no such file" in logs[0]
    assert logs[1].startswith("rank 1: error: rank 0 on ") and "ended: " in logs[1] and "a.en" in logs[1]
    assert all(log.count("\n") == 1 for log in logs)


def test_33_a_rank_without_a_device_ends_the_others_with_its_message(tmp_path):
    def work() -> None:
        device = "mps" if os.environ["RANK"] == "1" else "cpu"
        command("fit", file, "--device", device)()

    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(make_run_config(tmp_path / "run", 4), exclude_unset=True))
    assert exit_codes(run_ranks(2, work, tmp_path)) == [7, 2]
    logs = read_logs(tmp_path)
    assert "error: rank 1 ended: " in logs[0] and logs[1].startswith("rank 1: error: ") and "mps" in logs[1]
    assert all(log.count("\n") == 1 for log in logs)


@pytest.mark.slow
def test_11_if_torchrun_has_restarted_any_rank_all_resume(run, tmp_path):
    assert exit_codes(run_ranks(2, fit(run, 4), tmp_path)) == [0, 0], read_logs(tmp_path)

    def work() -> None:
        os.environ["TORCHELASTIC_RESTART_COUNT"] = os.environ["RANK"]  # rank 0 is on a new machine
        fit(run, 6, "--resume", "never")()

    assert exit_codes(run_ranks(2, work, tmp_path)) == [0, 0], read_logs(tmp_path)
    assert [step for step, *_ in losses(run)] == [1, 2, 3, 4, 5, 6]


def test_33_a_difference_between_ranks_ends_them_before_the_first_step(tmp_path):
    run = tmp_path / "run"

    def work() -> None:
        more = ["--set", "training.batch_tokens=300"] if os.environ["RANK"] == "1" else []
        fit(run, 4, *more)()

    assert exit_codes(run_ranks(2, work, tmp_path)) == [7, 7]
    for log in read_logs(tmp_path):
        # A rank whose own comparison is late has the message from the other one.
        assert "rank 1: training.batch_tokens is 300, but 512 on rank 0; " in log
        assert log.count("\n") == 1
    assert not run.exists()


def test_33_ranks_that_resolve_another_precision_end_before_the_first_step(run, tmp_path):
    def work() -> None:
        if os.environ["RANK"] == "1":
            # As on an older GPU. This process ends with the test.
            trainer.resolve_precision = lambda *_: "fp16"  # type: ignore[attr-defined]
        fit(run, 4)()

    assert exit_codes(run_ranks(2, work, tmp_path)) == [7, 7]
    for log in read_logs(tmp_path):
        assert "rank 1: the precision is fp16, but fp32 on rank 0; " in log  # either rank may print it
    assert not list(run.glob("checkpoints/step-*"))


@pytest.mark.slow
def test_35_memory_that_runs_out_during_the_synchronization_lowers_the_limit_of_the_next_start(
    run, tmp_path, on_training_forward
):
    """No rank can go back, so this one ends, and leaves the limit in the run folder."""
    calls = []
    train = fit(run, 9, "--set", "training.micro_batch_tokens=512")  # one micro-batch for each rank

    def fail(_):
        raise RuntimeError("CUDA error: out of memory")

    def break_backward(_, hidden):
        calls.append(1)
        if os.environ["RANK"] == "1" and len(calls) == 9:
            hidden.register_hook(fail)

    on_training_forward(break_backward)
    assert exit_codes(run_ranks(2, train, tmp_path)) == [7, 8]
    logs = read_logs(tmp_path)
    assert "rank 1 on " in logs[0] and "ended: out of memory; " in logs[0]
    assert logs[1].splitlines()[-1].startswith("rank 1: error: out of memory; run the same command again")
    assert open_checkpoint(last_checkpoint(run)).state.max_micro_batch_positions is None
    limit = read_limit(run, 512)
    assert limit < 2 * 512 and read_limit(run, 256) == float("inf")
    calls.extend([1] * 9)
    assert exit_codes(run_ranks(2, train, tmp_path)) == [0, 0], read_logs(tmp_path)
    assert open_checkpoint(last_checkpoint(run)).state.max_micro_batch_positions == limit


@pytest.mark.slow
def test_the_initial_model_is_scored_by_all_ranks_together(whole, tmp_path):
    work = fit(tmp_path / "run", 2, "--set", f"training.init_from={whole}")
    assert exit_codes(run_ranks(2, work, tmp_path)) == [0, 0], read_logs(tmp_path)
    states = [open_checkpoint(folder).state for folder in checkpoint_folders(tmp_path / "run")]
    assert states and all(state.initial_scores for state in states)


@pytest.mark.slow
def test_an_error_that_the_other_ranks_do_not_have_ends_its_rank(run, tmp_path, monkeypatch):
    """If it were counted as a failed validation, the other ranks would wait in the next exchange."""
    real = model_without_weights

    def fail(config):
        if os.environ["RANK"] == "1":
            raise MemoryError("out of memory")
        return real(config)

    monkeypatch.setattr(average, "model_without_weights", fail)
    ranks = run_ranks(2, fit(run, 4, "--set", "training.parallel=fsdp"), tmp_path)
    assert exit_codes(ranks) == [7, 8], read_logs(tmp_path)


@pytest.mark.slow
def test_only_rank_0_computes_the_scores_of_a_validation(run, tmp_path, monkeypatch):
    """The other ranks may run on the same cores."""
    real = Validator.scores

    def scores(self, shares):
        assert os.environ["RANK"] == "0"
        return real(self, shares)

    monkeypatch.setattr(Validator, "scores", scores)
    assert exit_codes(run_ranks(2, fit(run, 4), tmp_path)) == [0, 0], read_logs(tmp_path)
    assert any("validation" in line for line in read_metrics(run))
