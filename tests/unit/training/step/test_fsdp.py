"""Runs whose ranks share the weights (FSDP). `test_ddp.py` compares their steps with one rank."""

import os
import shutil
import signal
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mtrain.checkpoint.checkpoint import checkpoint_folders, open_checkpoint
from mtrain.checkpoint.model_folder import load_model
from mtrain.config.load import load_config
from mtrain.distributed import store
from mtrain.training.fit import make_trainer
from mtrain.training.setup.micro_batch import read_limit
from mtrain.training.step.average import WeightAverage
from tests.support.faults.processes import wait, wait_until
from tests.support.faults.runs import make_run_config, result_of
from tests.support.ranks import copy_prepared, exit_codes, fit_command, read_logs, run_ranks, started_ranks
from tests.support.training import fit_on_cpu, last_checkpoint, losses, read_metrics

FSDP = ("--set", "training.parallel=fsdp")
KEEP_TWO = ("--set", "training.keep_checkpoints=2")  # of steps 5 and 7


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run of two ranks that share the weights."""
    folder = tmp_path_factory.mktemp("ranks")
    train = fit_command(folder / "whole", 7, *FSDP, *KEEP_TWO)
    assert exit_codes(run_ranks(2, train, folder)) == [0, 0], read_logs(folder)
    return folder / "whole"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    """A run of one rank and one step."""
    return fit_on_cpu(make_run_config(tmp_path_factory.mktemp("prepared") / "run", 1))


@pytest.fixture
def run(prepared, tmp_path) -> Path:
    """The folder of a new run that needs no preparation."""
    return copy_prepared(prepared, tmp_path / "run")


@pytest.mark.slow
def test_checkpoints_are_those_of_other_runs(whole, tmp_path):
    """Runs resume exactly on as many ranks, and checkpoints of one kind of run resume as the other kind."""
    ddp = copy_prepared(whole, tmp_path / "ddp")
    assert exit_codes(run_ranks(2, fit_command(ddp, 7, *KEEP_TWO), tmp_path)) == [0, 0], read_logs(tmp_path)
    for file in ("model", "average", "optimizer"):
        one, other = (load_file(last_checkpoint(run) / f"{file}.safetensors") for run in (whole, ddp))
        assert {name: tensor.shape for name, tensor in one.items()} == {n: t.shape for n, t in other.items()}
    for name, tensor in load_file(last_checkpoint(ddp) / "model.safetensors").items():
        found = load_file(last_checkpoint(whole) / "model.safetensors")[name]
        if not name.endswith("query_key_value.bias"):  # their gradient for keys is 0 but for rounding
            torch.testing.assert_close(found, tensor, rtol=1e-4, atol=1e-5)
    for before, more in ((whole, FSDP), (whole, ()), (ddp, FSDP)):
        run = resume(before, 2, tmp_path, *more)
        is_same = (before, more) == (whole, FSDP)
        assert result_of(run) == result_of(whole) or not is_same, read_logs(tmp_path)
        assert ("not bit-identically" in read_logs(tmp_path)[0]) == (not is_same)
        assert abs(losses(run)[-1][2] - losses(whole)[-1][2]) < 0.05
        shutil.rmtree(run)


@pytest.mark.slow
def test_a_checkpoint_resumes_on_one_rank(whole, tmp_path):
    run = resume(whole, 1, tmp_path, *FSDP)
    assert "not bit-identically" in read_logs(tmp_path)[0]
    assert abs(losses(run)[-1][2] - losses(whole)[-1][2]) < 0.05


def resume(before: Path, count: int, folder: Path, *more: object) -> Path:
    """Resume a copy of a run at the checkpoint before its last one, on some ranks."""
    run = Path(shutil.copytree(before, folder / "resumed", dirs_exist_ok=True))
    shutil.rmtree(last_checkpoint(run))
    train = fit_command(run, 7, *more, *KEEP_TWO)
    assert exit_codes(run_ranks(count, train, folder)) == [0] * count, read_logs(folder)
    lines = [(each / "metrics.jsonl").read_text().splitlines()[:5] for each in (before, run)]
    assert lines[0] == lines[1]  # these steps are not taken again
    return run


def test_the_gathered_average_is_validated(run, tmp_path):
    changed = ["ema_decay=null", "average_checkpoints=2", "keep_checkpoints=2", "parallel=fsdp"]
    options = [option for value in changed for option in ("--set", f"training.{value}")]
    assert exit_codes(run_ranks(2, fit_command(run, 6, *options), tmp_path)) == [0, 0], read_logs(tmp_path)
    [nll] = (line["validation"]["nll"] for line in read_metrics(run) if "validation" in line)
    own = [load_file(folder / "model.safetensors") for folder in checkpoint_folders(run)]
    for name, mean in load_file(last_checkpoint(run) / "average.safetensors").items():
        torch.testing.assert_close(mean, sum(tensors[name] for tensors in own) / 2)
    selection = make_trainer(load_config(run / "config.yaml"), device="cpu").selection
    assert selection.scores_of(load_model(run).model).nll == pytest.approx(nll, rel=1e-6)


@pytest.mark.parametrize("resumed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_memory_that_runs_out_ends_all_ranks_and_limits_the_next_start(
    run, tmp_path, on_training_forward, resumed
):
    calls, suffices = [], [0.0]  # the largest source, in padded tokens, for which memory suffices

    def fail(source, _):
        calls.append(1)
        is_too_large = len(source) > 1 and source.numel() > suffices[0]
        if os.environ["RANK"] == "1" and len(calls) >= 8 and is_too_large:
            raise MemoryError

    on_training_forward(fail)
    train = fit_command(run, 8, *FSDP, "--set", "training.micro_batch_tokens=auto")
    assert exit_codes(run_ranks(2, train, tmp_path)) == [7, 8], read_logs(tmp_path)
    logs = read_logs(tmp_path)
    assert "rank 1 on " in logs[0] and "ended: out of memory; run the same command again" in logs[0]
    assert "cannot save: the other ranks have parts of the weights" in logs[0]
    limit = read_limit(run, 512)
    assert limit < 1024
    if resumed:
        suffices[0] = limit  # which counts both sides
        assert exit_codes(run_ranks(2, train, tmp_path)) == [0, 0], read_logs(tmp_path)
        assert open_checkpoint(last_checkpoint(run)).state.max_micro_batch_positions == limit


@pytest.mark.parametrize("failures", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_memory_that_does_not_suffice_for_the_complete_weights_is_a_failed_validation(
    run, tmp_path, monkeypatch, failures
):
    """Memory does not suffice on rank 1 only. The ranks agree on it, so that none is left waiting."""
    real, empty_like, calls = WeightAverage.applied, torch.empty_like, []

    def fail(tensor):
        if tensor.numel() > 1_000:  # weights, not what the ranks tell each other
            raise MemoryError
        return empty_like(tensor)

    @contextmanager
    def applied(self, ranks):
        calls.append(1)
        with monkeypatch.context() as patch, ExitStack() as stack:
            if ranks.rank == 1 and len(calls) <= failures:
                patch.setattr(torch, "empty_like", fail)
            model = stack.enter_context(real(self, ranks))
            patch.undo()
            yield model

    monkeypatch.setattr(WeightAverage, "applied", applied)
    expected = [0, 0] if failures == 1 else [8, 7]
    train = fit_command(run, 5, *FSDP, "--set", "training.validate_every=2")
    assert exit_codes(run_ranks(2, train, tmp_path)) == expected, read_logs(tmp_path)
    log = read_logs(tmp_path)[0]
    assert "step 2: validation failed: rank 1: out of memory for a complete copy of the weights" in log
    found = [line["step"] for line in read_metrics(run) if "validation" in line]
    assert found == ([4, 5] if failures == 1 else [])
    assert last_checkpoint(run).name == "step-00000005"


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named(run, tmp_path, monkeypatch):
    monkeypatch.setattr(store, "GRACE", 2.0)
    with started_ranks(2, fit_command(run, 10**6, *FSDP), tmp_path) as children:
        metrics = run / "metrics.jsonl"
        ready = wait_until(
            children[0], lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 5, every=0.005
        )
        assert ready is None, read_logs(tmp_path)
        os.kill(children[1], signal.SIGKILL)
        assert exit_codes([wait(child) for child in children]) == [7, -signal.SIGKILL]
    assert "error: rank 1 on " in read_logs(tmp_path)[0]
