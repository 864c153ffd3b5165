"""Fault 30: a failing validation costs no training. The state is saved first, and later ones try again."""

import json
import os
import shutil
import signal
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import torch

from mtrain.checkpoint.checkpoint import checkpoint_folders, open_checkpoint
from mtrain.config.schema import Config
from mtrain.distributed.ranks import Ranks
from mtrain.distributed.store import LostRankError
from mtrain.errors import DivergedError, ModelError, StorageError, UsageError
from mtrain.model.build import AnyModel
from mtrain.training.model_selection import ModelSelection
from mtrain.training.validation.classifier import ClassifierScores
from mtrain.training.validation.translation import Scores
from tests.support.faults.file_operations import Operation, on_file_operation
from tests.support.faults.processes import run_in_child
from tests.support.faults.saves import Killed, no_space
from tests.support.training import (
    fit_on_cpu,
    last_checkpoint,
    losses,
    read_metrics,
    same_weights,
    weights,
    with_bleu,
)

NOT_FINITE = ModelError("the model's outputs are not finite")
EXCLUDED = UsageError("the decoding constraints exclude every translation")
TRANSLATIONS = "samples.jsonl", "best_validation.json"  # of the validations
OUT_OF_MEMORY = RuntimeError("DefaultCPUAllocator: can't allocate memory")


@pytest.fixture
def validations(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """Let validations report scores or raise errors in turn; then all have the last outcome."""

    def script(*outcomes: Scores | Exception | type[BaseException]) -> list[int]:
        seen: list[int] = []

        def validate(self: ModelSelection, model: object) -> Scores:
            outcome = outcomes[min(len(seen), len(outcomes) - 1)]
            seen.append(len(seen))
            if not isinstance(outcome, Scores):
                raise outcome
            return outcome

        monkeypatch.setattr(ModelSelection, "scores_of", validate)
        return seen

    return script


def best_of(run: Path) -> str:
    return json.loads((run / "checkpoints/index.json").read_text())["best"]


def validated_steps(run: Path) -> list[int]:
    return [line["step"] for line in read_metrics(run) if "validation" in line]


@contextmanager
def failing_to_publish(times: int) -> Iterator[None]:
    """Let the disk be full at the first attempts to publish the best weights."""
    attempts = []

    def fill_disk(operation: Operation) -> None:
        if operation.path.name == "model.safetensors" and operation.path.parent.name == ".model.tmp":
            attempts.append(operation)
            if len(attempts) <= times:
                no_space()

    with on_file_operation(fill_disk):
        yield


def is_published(run: Path, file: str = "model.safetensors") -> bool:
    best = run / "checkpoints" / best_of(run) / file
    return (run / "model/model.safetensors").read_bytes() == best.read_bytes()


@pytest.mark.parametrize(
    "error",
    [
        NOT_FINITE,
        *(pytest.param(error, marks=pytest.mark.slow) for error in (EXCLUDED, OUT_OF_MEMORY)),
        MemoryError(),
    ],
)
def test_30_a_failing_validation_is_retried_at_the_next_one(make_config, validations, caplog, error):
    validations(error, error, with_bleu(30), error, error, with_bleu(20))
    run = fit_on_cpu(make_config(training={"validate_every": 2, "checkpoint_every": 100, "max_steps": 12}))
    assert caplog.text.count("validation failed") == 4 and "step 2: validation failed" in caplog.text
    assert validated_steps(run) == [6, 12] and best_of(run) == "step-00000006"
    assert last_checkpoint(run).name == "step-00000012"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (NOT_FINITE, DivergedError),
        pytest.param(EXCLUDED, UsageError, marks=pytest.mark.slow),
        (OUT_OF_MEMORY, RuntimeError),
    ],
)
def test_30_three_failing_validations_in_a_row_end_the_run_after_saving(
    make_config, validations, error, kind
):
    validations(with_bleu(10), error)
    config = make_config(training={"validate_every": 2, "checkpoint_every": 100, "max_steps": 100})
    with pytest.raises(kind):
        fit_on_cpu(config)
    assert last_checkpoint(Path(config.run_dir)).name == "step-00000008"  # each step of validation is saved
    validations(with_bleu(20))
    run = fit_on_cpu(make_config(training={"validate_every": 2, "checkpoint_every": 100, "max_steps": 10}))
    assert validated_steps(run) == [2, 8, 10] and best_of(run) == "step-00000008"


def test_30_the_last_validation_is_repeated_at_once(make_config, validations, caplog):
    seen = validations(NOT_FINITE, NOT_FINITE, with_bleu(30))
    run = fit_on_cpu(make_config(training={"validate_every": 100, "max_steps": 4}))
    assert len(seen) == 3 and best_of(run) == "step-00000004" and (run / "model/model.safetensors").exists()


def test_30_a_run_whose_last_validation_failed_validates_when_it_is_run_again(make_config, validations):
    config = make_config(training={"max_steps": 4})
    validations(NOT_FINITE)
    with pytest.raises(DivergedError, match="3 validations in a row failed"):
        fit_on_cpu(config)
    seen = validations(with_bleu(30))
    run = fit_on_cpu(config)
    assert len(seen) == 1 and best_of(run) == "step-00000004" and (run / "model").exists()
    fit_on_cpu(config)
    assert len(seen) == 1  # the run is finished


def test_30_a_bug_in_validation_is_not_retried(make_config, validations):
    validations(KeyError("bug"))
    with pytest.raises(KeyError):
        fit_on_cpu(make_config())


@pytest.mark.parametrize("failures", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_30_a_full_disk_while_publishing_ends_training_only_if_it_stays_full(make_config, failures, caplog):
    config = make_config(training={"validate_every": 2, "checkpoint_every": 2, "max_steps": 8})
    with failing_to_publish(failures):
        if failures == 3:
            with pytest.raises(StorageError, match="model: cannot write: No space left"):
                fit_on_cpu(config)
            assert last_checkpoint(Path(config.run_dir)).name == "step-00000006"
            return
        run = fit_on_cpu(config)
    assert caplog.text.count("publishing failed") == 2 and "validation failed" not in caplog.text
    assert is_published(run)


def test_30_a_resumed_run_trains_on_if_the_best_weights_cannot_be_published(make_config, caplog):
    recipe = {"validate_every": 2, "checkpoint_every": 2}
    run = fit_on_cpu(make_config(training={**recipe, "max_steps": 4}))
    shutil.rmtree(run / "model")
    with failing_to_publish(1):
        fit_on_cpu(make_config(training={**recipe, "max_steps": 8}))
    assert caplog.text.count("step 4: publishing failed") == 1 and (run / "model").is_dir()


def test_30_a_finished_run_fails_if_its_best_weights_cannot_be_published(make_config):
    """Otherwise, `fit` would end with success, and there would be no model."""
    config = make_config(training={"max_steps": 4})
    shutil.rmtree(fit_on_cpu(config) / "model")
    with failing_to_publish(99), pytest.raises(StorageError, match="cannot write: No space left"):
        fit_on_cpu(config)


PATIENT = {"validate_every": 2, "checkpoint_every": 100, "max_steps": 100, "patience": 1}


@pytest.mark.parametrize("failures", [2, 3])
def test_30_a_run_that_its_patience_ends_publishes_what_could_not_be_published_before(
    make_config, validations, failures
):
    validations(with_bleu(30), with_bleu(20))
    config = make_config(training=PATIENT)
    with failing_to_publish(failures):
        if failures == 3:
            with pytest.raises(StorageError, match="model: cannot write: No space left"):
                fit_on_cpu(config)
        run = fit_on_cpu(config)
    assert (best_of(run), last_checkpoint(run).name) == ("step-00000002", "step-00000004")
    assert is_published(run)


def test_30_a_repeated_validation_that_exhausts_the_patience_publishes_what_could_not_be_before(
    make_config, validations
):
    validations(with_bleu(30), Killed, with_bleu(20))
    config = make_config(training=PATIENT)
    with failing_to_publish(2):
        with pytest.raises(Killed):
            fit_on_cpu(config)
        run = fit_on_cpu(config)
    assert validated_steps(run) == [2, 4] and best_of(run) == "step-00000002" and is_published(run)


def test_30_a_repeated_validation_that_fails_when_the_time_ends_is_repeated_again(make_config, monkeypatch):
    """With the same average of checkpoints."""
    seen, hours, clock = [], [], time.perf_counter

    def validate(self: ModelSelection, model: object) -> Scores:
        seen.append(weights(model))
        if len(seen) == 2:
            raise Killed
        hours.extend([1] * (len(seen) > 2))
        return with_bleu(30 + len(seen))

    def fail_once(operation: Operation) -> None:
        if operation.path.match(".index.json.*.tmp") and operation.name == "open" and len(seen) == 3:
            no_space()

    monkeypatch.setattr(ModelSelection, "scores_of", validate)
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + 3600 * len(hours))
    recipe = {"average_checkpoints": 2, "max_steps": 100, "max_minutes": 30.0}
    config = make_config(training=recipe)
    with pytest.raises(Killed):
        fit_on_cpu(config)
    with on_file_operation(fail_once):
        run = fit_on_cpu(config)
    assert validated_steps(run) == [4, 8] and best_of(run) == "step-00000008"
    assert is_published(run, "average.safetensors")
    assert len(seen) == 4 and all(torch.equal(seen[2][name], seen[3][name]) for name in seen[3])


@pytest.mark.parametrize(
    "extra",
    [
        {"average_checkpoints": 4},
        *(pytest.param(extra, marks=pytest.mark.slow) for extra in ({}, {"ema_decay": 0.9})),
    ],
)
def test_30_killed_during_validation_a_resumed_run_repeats_it(make_config, monkeypatch, extra):
    """With the same scores, the same best checkpoint and the same patience as an uninterrupted run."""
    recipe = {"validate_every": 4, "checkpoint_every": 2, "max_steps": 14, "best_metric": "nll", **extra}

    def config(name: str) -> Config:
        return make_config(name, model={"dropout": 0.3}, training={**recipe, "patience": 2})

    whole = fit_on_cpu(config("whole"))
    real, calls, last = ModelSelection.scores_of, [], 0

    def killed(self, model):
        calls.append(1)
        scores = real(self, model)
        if len(calls) == last:
            raise Killed
        return scores

    monkeypatch.setattr(ModelSelection, "scores_of", killed)
    for last in (1, 3):
        calls.clear()
        parts = config(f"parts{last}")
        with pytest.raises(Killed):
            fit_on_cpu(parts)
        saved = open_checkpoint(last_checkpoint(Path(parts.run_dir))).state
        assert saved.step == 4 * last and saved.validation_due
        assert_same_validations(whole, fit_on_cpu(parts))


@pytest.mark.slow
def test_30_killed_while_a_validation_is_recorded_a_resumed_run_completes_the_records(
    make_config, monkeypatch
):
    """At each file that is opened between scoring and publishing."""
    real, scored = ModelSelection.scores_of, []

    def score(self: ModelSelection, model: AnyModel) -> Scores | ClassifierScores | None:
        scored.append(real(self, model))
        return scored[-1]

    def work(config: Config, number: int) -> None:
        opened = []

        def kill(operation: Operation) -> None:
            in_run = operation.path.parent.name in (Path(config.run_dir).name, "checkpoints")
            if scored and in_run and operation.name == "open":
                opened.append(operation)
                if len(opened) == number:
                    os.kill(os.getpid(), signal.SIGKILL)

        with on_file_operation(kill):
            fit_on_cpu(config)

    monkeypatch.setattr(ModelSelection, "scores_of", score)
    for number in count(1):
        config = make_config(f"run{number}", training={"max_steps": 4})
        if run_in_child(partial(work, config, number)) == 0:
            break
        run = fit_on_cpu(config)
        scored.clear()
        recorded = [json.loads((run / name).read_text())["step"] for name in TRANSLATIONS]
        assert validated_steps(run) == [4] and recorded == [4, 4]
        assert best_of(run) == "step-00000004" and is_published(run)
    assert number > 4  # there are four files


def assert_same_validations(whole: Path, parts: Path) -> None:
    """Two runs have the same scores, losses, weights, best checkpoint and published model."""
    scores = [
        [(line["step"], line["validation"]) for line in read_metrics(run) if "validation" in line]
        for run in (whole, parts)
    ]
    assert scores[0] == scores[1] and losses(whole) == losses(parts) and same_weights(whole, parts)
    assert best_of(whole) == best_of(parts)
    states = [open_checkpoint(last_checkpoint(run)).state for run in (whole, parts)]
    for key in ("best_step", "best_scores", "validations_without_improvement", "step"):
        assert getattr(states[0], key) == getattr(states[1], key)
    published = [(run / "model/model.safetensors").read_bytes() for run in (whole, parts)]
    assert published[0] == published[1]


def test_30_an_older_checkpoint_is_validated_again_and_logged_once(make_config):
    recipe = {"validate_every": 2, "checkpoint_every": 2, "max_steps": 6, "keep_checkpoints": 9}
    run = fit_on_cpu(make_config(training={**recipe, "patience": None}))
    before = losses(run), validated_steps(run), best_of(run)
    fourth = checkpoint_folders(run)[1]
    fit_on_cpu(make_config(training={**recipe, "patience": None}), resume=str(fourth))
    assert (losses(run), validated_steps(run), best_of(run)) == before


def test_30_a_damaged_index_costs_one_more_validation(make_config, validations):
    seen = validations(with_bleu(10))
    run = fit_on_cpu(make_config(training={"max_steps": 4}))
    for contents in ("", "{", '{"validated": {"step": 4}}', '{"validated": {"step": 4, "best_step": "x"}}'):
        count = len(seen)
        (run / "checkpoints/index.json").write_text(contents)
        fit_on_cpu(make_config(training={"max_steps": 4}))
        assert len(seen) == count + 1 and best_of(run) == "step-00000004"


def test_30_a_validation_is_recorded_before_rank_0_waits_for_another_rank(make_config, monkeypatch):
    """If that rank is lost, the resumed run has the validation."""
    real, scored = Ranks.broadcast, []

    def validate(self: ModelSelection, model: object) -> Scores:
        scored.append(1)
        return with_bleu(30)

    def lose_a_rank(self: Ranks, value: object, preparing: bool = False) -> object:
        if len(scored) == 1:
            scored.append(1)
            raise LostRankError("rank 1 ended")
        return real(self, value, preparing)

    monkeypatch.setattr(ModelSelection, "scores_of", validate)
    monkeypatch.setattr(Ranks, "broadcast", lose_a_rank)
    config = make_config(training={"max_steps": 8})
    with pytest.raises(LostRankError):
        fit_on_cpu(config)
    assert validated_steps(fit_on_cpu(config)) == [4, 8]


def test_30_a_validation_that_runs_out_of_memory_keeps_no_tensor(make_config, monkeypatch):
    """The error would keep its frames alive, and so what they hold, while cached memory is released."""
    tensors, kept = [], []

    def validate(self: ModelSelection, model: object) -> Scores:
        tensor = torch.ones(10)
        tensors.append(weakref.ref(tensor))
        if len(tensors) == 1:
            raise MemoryError
        return with_bleu(30)

    def release(_: torch.device) -> None:
        kept.append(tensors[0]())

    monkeypatch.setattr(ModelSelection, "scores_of", validate)
    monkeypatch.setattr("mtrain.training.model_selection.release_cached_memory", release)
    assert validated_steps(fit_on_cpu(make_config(training={"max_steps": 8}))) == [8]
    assert kept == [None]
