"""Runs that end by the clock: on time, with the learning rate down, and resumed with the same plans."""

import itertools
import json
import logging
import math
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mtrain.checkpoint.checkpoint import checkpoint_folders, open_checkpoint
from mtrain.checkpoint.model_info import read_info
from mtrain.checkpoint.state import Plan, TrainState
from mtrain.config.sections.training import Schedule, TrainingConfig
from mtrain.distributed.ranks import Ranks
from mtrain.errors import ModelError, UsageError
from mtrain.runs.limits import limit_reached
from mtrain.runs.summary import read_progress
from mtrain.training import clock as clock_module
from mtrain.training.clock import Clock
from mtrain.training.model_selection import ModelSelection
from mtrain.training.step.learner import Learner
from mtrain.training.step.learning_rate import encoder_share, learning_rate
from tests.support.faults.file_operations import Operation, on_file_operation
from tests.support.faults.saves import no_space
from tests.support.ranks import exit_codes, fit_command, run_ranks, started_ranks
from tests.support.training import fit_on_cpu, last_checkpoint, losses, read_metrics, same_weights, with_bleu

STEPS, SECONDS = 1000, 120  # that a run is planned for
Times = Callable[[float], float]  # seconds, given the share of the time that has passed


class Simulation:
    """A run of `SECONDS` on a machine whose steps and validations take these times. `noise` is the standard
    deviation of the logarithm of the time of a step."""

    def __init__(
        self,
        folder: Path,
        step: Times,
        validation: Times,
        noise: float = 0.2,
        planned: int = STEPS,
        schedule: Schedule = "wsd",
    ):
        rng, self.state, self.rates, every = random.Random(1), TrainState(), list[float](), 100
        training = TrainingConfig(
            max_minutes=SECONDS / 60,
            planned_steps=planned,
            learning_rate=1.0,
            warmup_steps=80,
            schedule=schedule,
            validate_every=every,
        )
        clock = Clock(folder, training, self.state, Ranks(torch.device("cpu")), most=None)
        self.validating = self.validations = 0.0
        last = False
        while not last:
            self.state.step += 1
            position = planned * clock.plans[-1].scheduled_at(self.state.step)
            self.rates.append(learning_rate(position, training, planned))
            seconds = step(self.state.seconds / SECONDS) * rng.lognormvariate(-(noise**2) / 2, noise)
            self.state.seconds += seconds
            clock.add_step(seconds)
            last = limit_reached(training, self.state) is not None
            if last or (self.state.step % every == 0 and clock.allows_validation()):
                seconds = validation(self.state.seconds / SECONDS)
                self.state.seconds += seconds
                self.validating += seconds / SECONDS
                clock.add_validation(seconds)
        self.end = self.state.seconds / SECONDS
        self.plans = json.loads(clock.file.read_text()) if clock.file.exists() else []


def changing(factor: float, share: float = 0.5, validation: float = 0.6) -> tuple[Times, Times]:
    """The times of steps and validations, which are `factor` times as long after a share of the time."""
    return (
        lambda passed: 0.11 * (factor if passed > share else 1),
        lambda passed: validation * (factor if passed > share else 1),
    )


@pytest.mark.parametrize(
    ("step", "validation", "noise"),
    [
        pytest.param(*changing(1), 0.2, id="as planned"),
        pytest.param(*changing(4), 0.2, id="slower in the middle"),
        pytest.param(*changing(4, share=0.9), 0.2, id="slower near the end"),
        pytest.param(*changing(1 / 4), 0.2, id="faster in the middle"),
        pytest.param(*changing(8, share=0), 0.2, id="slower than measured"),
        pytest.param(*changing(1 / 4, share=0), 0.2, id="faster than measured", marks=pytest.mark.slow),
        pytest.param(*changing(3, share=0), 1.0, id="busy"),
        pytest.param(lambda t: 0.44 if int(17 * t) % 3 == 0 else 0.11, lambda t: 0.6, 0.2, id="bursts"),
        pytest.param(lambda t: 0.11, lambda t: 4.8, 0.2, id="long validations"),
        pytest.param(lambda t: 20.0 if 0 < t < 0.1 else 0.11, lambda t: 0.6, 0.2, id="long second step"),
    ],
)
def test_a_run_ends_in_time_with_its_rate_down_whatever_the_machine_does(tmp_path, step, validation, noise):
    run = Simulation(tmp_path, step, validation, noise)
    assert 0.95 <= run.end <= 1.05
    assert run.rates[-1] < 0.1 * max(run.rates)
    assert run.validating <= 0.105
    peak = run.rates.index(max(run.rates))
    assert run.rates[peak:] == sorted(run.rates[peak:], reverse=True)
    # Half of the steps of a usual run have a rate above half of the peak.
    assert 0.15 <= sum(rate > max(run.rates) / 2 for rate in run.rates) / len(run.rates) <= 0.85
    assert len(run.plans) <= 40


@pytest.mark.parametrize(
    ("step", "validation"),
    [changing(2), changing(1 / 4), (lambda t: 0.22 if int(7 * t) % 2 == 0 else 0.11, lambda t: 0.6)],
)
def test_there_is_one_plan_between_two_validations_if_it_can_wait_for_them(tmp_path, step, validation):
    run = Simulation(tmp_path, step, validation)
    intervals = Counter((plan["step"] - 1) // 100 for plan in run.plans)
    assert 0.95 <= run.end <= 1.05 and max(intervals.values()) == 1


@pytest.mark.parametrize("validation", [2.5, 3.0])
def test_a_slower_machine_has_time_for_its_last_validation(tmp_path, validation):
    """The last validation takes longer than those before it, and cannot be left out."""
    run = Simulation(tmp_path, *changing(4, validation=validation))
    assert 0.95 <= run.end <= 1.05 and run.rates[-1] < 0.1 * max(run.rates)


@pytest.mark.parametrize("share", [0.09, 0.28, 0.48])
def test_a_validation_just_after_the_machine_became_slower_does_not_look_long(tmp_path, share):
    """Its time is compared with the time of the steps around it, not with the mean of many steps."""
    run = Simulation(tmp_path, *changing(4, share, validation=1.5), noise=0.05)
    assert 0.95 <= run.end <= 1.05 and run.rates[-1] < 0.1 * max(run.rates)


def test_if_a_machine_keeps_its_speed_the_rates_are_those_that_were_planned(tmp_path):
    run = Simulation(tmp_path, lambda t: 0.1152, lambda t: 0.36, noise=0.0, schedule="cosine")
    training = TrainingConfig(max_steps=STEPS, learning_rate=1.0, warmup_steps=80, schedule="cosine")
    assert len(run.rates) == pytest.approx(STEPS, rel=0.01)
    planned = [learning_rate(step, training, STEPS) for step in range(1, STEPS + 1)]
    assert all(abs(one - other) < 0.02 for one, other in zip(run.rates, planned, strict=False))


@pytest.mark.parametrize("share", [0.02, 0.2, 0.7])
@pytest.mark.parametrize("schedule", ["wsd", "cosine"])
def test_after_a_pause_beyond_the_limit_the_rate_still_decays(tmp_path, share, schedule):
    """Such as Ctrl-Z, or a validation that takes longer than the limit allows."""
    pauses = iter([2.0 * SECONDS])

    def step(passed: float) -> float:
        return next(pauses, 0.11) if passed > share else 0.11

    run = Simulation(tmp_path, step, lambda t: 0.6, noise=0.0, schedule=schedule)
    training = TrainingConfig(max_minutes=SECONDS / 60, planned_steps=STEPS)
    assert limit_reached(training, run.state) == "max_minutes (2)"
    assert run.rates[-1] < 0.1 * max(run.rates)
    assert run.end == pytest.approx(2 + share + 0.02, abs=0.02)


def test_a_late_run_ends_if_its_rate_has_decayed():
    training = TrainingConfig(max_minutes=1.0, planned_steps=100, schedule="wsd")
    plan = Plan(0, 0.0, 100, 0, (1.0, None))
    late = [TrainState(step=step, seconds=63.1, plan=plan) for step in (94, 95)]
    assert [limit_reached(training, state) for state in late] == [None, "max_minutes (1)"]
    free = training.model_copy(update={"schedule": "inverse_sqrt"})  # whose rate does not follow the plan
    assert limit_reached(free, late[0]) == "max_minutes (1)"


def test_a_resumed_run_that_is_late_first_repeats_the_plan_that_was_written(tmp_path):
    training = TrainingConfig(max_minutes=1.0, planned_steps=100, schedule="wsd")
    plan, written, later = (
        Plan(n, n / 100, total, 0, (1.0, None)) for n, total in ((0, 100), (11, 14), (40, 90))
    )
    (tmp_path / "clock.json").write_text(json.dumps([vars(each) for each in (plan, written, later)]))
    clock = Clock(tmp_path, training, TrainState(step=10, seconds=70.0, plan=plan), single(), most=None)
    assert advance(clock, 0.5) == [False] and clock.state.plan == written
    assert advance(clock, 0.5) == [True] and clock.plans[-1].total_steps <= 14 and clock.later == [later]
    clock.adopt()
    assert clock.later == []


def test_a_late_run_decays_although_its_plan_cannot_be_written(tmp_path):
    training = TrainingConfig(max_minutes=1.0, planned_steps=100, schedule="wsd")
    state = TrainState(step=10, seconds=70.0, plan=Plan(0, 0.0, 100, 0, (1.0, None)))
    clock = Clock(tmp_path, training, state, single(), most=None)
    with on_file_operation(lambda operation: no_space() if operation.path.match("*.tmp") else None):
        assert advance(clock, 0.6) == [True] and clock.plans[-1].total_steps < 20


def test_by_the_clock_the_last_epoch_is_complete_if_there_is_time():
    """The number of steps in all epochs is an estimate."""
    training = TrainingConfig(max_minutes=9.0, planned_steps=100, max_epochs=2)
    state = TrainState(step=60, seconds=6.0, plan=Plan(50, 0.9, 60, 0, (9.0, 60)))
    assert limit_reached(training, state) is None
    state.position = state.position._replace(epoch=2)
    assert limit_reached(training, state) == "max_epochs (2)"


def test_a_resumed_run_knows_how_long_validations_take(tmp_path):
    training = TrainingConfig(max_minutes=1.0, planned_steps=100, schedule="cosine", validate_every=50)
    clock = Clock(tmp_path, training, TrainState(), single(), most=None)
    advance(clock, 0.5, steps=50)
    clock.state.seconds += 4.0
    clock.add_validation(4.0)
    assert any(advance(clock, 0.5, steps=2))
    resumed = Clock(tmp_path, training, replace(clock.state), single(), most=None)
    total = clock.plans[-1].total_steps
    advance(resumed, 0.5, steps=total - clock.state.step)
    assert resumed.plans[-1].total_steps == total and resumed.state.seconds < 56


def test_a_step_that_takes_long_once_does_not_shorten_the_run(tmp_path):
    stalls = iter([5.0])
    run = Simulation(tmp_path, lambda t: next(stalls, 0.11) if t > 0.4 else 0.11, lambda t: 0.6, noise=0.0)
    assert run.state.step == pytest.approx((0.99 * SECONDS - 6 - 5) / 0.11, rel=0.02)


def test_a_plan_that_cannot_be_written_does_not_take_effect(tmp_path, caplog):
    def full(operation: Operation) -> None:
        if operation.path.match(".clock.json.*.tmp") and operation.name == "open":
            no_space()

    training = TrainingConfig(max_minutes=1.0, planned_steps=100, schedule="cosine")
    clock = Clock(tmp_path, training, TrainState(), Ranks(torch.device("cpu")), most=None)
    with on_file_operation(full):
        for clock.state.step in range(1, 20):
            clock.state.seconds += 3
            assert not clock.add_step(3.0)
    assert clock.plans[-1].total_steps == 100 and caplog.text.count("the plan stays the same") == 1
    clock.add_validation(1.0)
    clock.state.step, clock.state.seconds = 20, 59
    assert clock.add_step(3.0) and clock.plans[-1].total_steps < 30


def test_a_run_is_planned_anew_if_its_limits_change_and_not_if_its_file_of_plans_is_damaged(tmp_path):
    training = TrainingConfig(max_minutes=1.0, planned_steps=100, schedule="cosine", max_epochs=1)
    state, ranks = TrainState(), Ranks(torch.device("cpu"))
    Clock(tmp_path, training, state, ranks, most=10)
    state.step, state.seconds = 10, 5.0  # the end of the first epoch
    (tmp_path / "clock.json").write_text('[{"step": 3}, {')
    assert Clock(tmp_path, training, state, ranks, most=10).plans[-1].total_steps == 10
    assert Clock(tmp_path, training, state, ranks, most=20).plans[-1].total_steps == 20


def test_a_plan_for_other_limits_is_made_once(tmp_path):
    training, ranks = TrainingConfig(max_minutes=2.0, planned_steps=100, schedule="cosine"), single()
    old = Plan(0, 0.0, 100, 0, (1.0, None))
    clock = Clock(tmp_path, training, TrainState(step=10, seconds=6.0, plan=old), ranks, most=None)
    assert not clock.file.exists()  # until it trains, it may turn out that it has already finished
    clock.begin()
    first = clock.plans[-1]
    assert first.total_steps == 200
    # The process is killed. Meanwhile, the last validation was repeated, which has taken time.
    state = TrainState(step=10, seconds=12.0, plan=old)
    assert Clock(tmp_path, training, state, ranks, most=None).plans[-1] == state.plan == first


def test_plans_for_other_limits_do_not_come_back(tmp_path):
    one, two = (TrainingConfig(max_minutes=m, planned_steps=100, schedule="cosine") for m in (1.0, 2.0))
    old, later = Plan(0, 0.0, 100, 0, (1.0, None)), Plan(15, 0.15, 90, 0, (1.0, None))
    (tmp_path / "clock.json").write_text(json.dumps([vars(old), vars(later)]))
    state = TrainState(step=10, seconds=6.0, plan=old)
    assert Clock(tmp_path, one, state, single(), most=None).later == [later]
    other = Clock(tmp_path, two, state, single(), most=None)
    other.begin()
    state = TrainState(step=12, seconds=7.0, plan=other.plans[-1])
    assert Clock(tmp_path, one, state, single(), most=None).later == []


def advance(clock: Clock, seconds: float, steps: int = 1) -> list[bool]:
    """Take steps of some seconds each. Returns after which of them there was a new plan."""
    found = []
    for _ in range(steps):
        clock.state.step += 1
        clock.state.seconds += seconds
        found.append(clock.add_step(seconds))
    return found


def test_a_decision_that_could_not_be_written_is_made_later(tmp_path):
    training = TrainingConfig(max_minutes=1.0, planned_steps=100, schedule="cosine", validate_every=5)
    clock = Clock(tmp_path, training, TrainState(), single(), most=None)
    advance(clock, 0.58, steps=10)
    clock.add_validation(3.0)  # half of the time for all validations, so the next one must wait
    clock.state.seconds += 3.0
    with on_file_operation(lambda operation: no_space() if operation.path.match("*.tmp") else None):
        assert advance(clock, 0.58) == [False]
    assert advance(clock, 0.58) == [True] and clock.plans[-1].next_validation > 20


def test_a_validation_at_the_end_stays_there_if_the_run_becomes_longer(tmp_path):
    training = TrainingConfig(max_minutes=1.0, planned_steps=100, schedule="cosine", validate_every=5)
    plan = Plan(10, 0.2, 50, 50, (1.0, None))  # there is no time for another one
    clock = Clock(tmp_path, training, TrainState(step=10, seconds=10, plan=plan), single(), most=None)
    assert any(advance(clock, 0.1, steps=39))
    assert clock.plans[-1].next_validation == clock.plans[-1].total_steps > 50


def test_a_planned_validation_is_kept_if_the_run_becomes_shorter_and_then_longer(tmp_path):
    training = TrainingConfig(max_minutes=1.0, planned_steps=100, schedule="cosine", validate_every=5)
    plan = Plan(10, 0.1, 100, 70, (1.0, None))
    clock = Clock(tmp_path, training, TrainState(step=10, seconds=6, plan=plan), single(), most=None)
    advance(clock, 2.0, steps=8)
    assert clock.plans[-1].total_steps < 70
    advance(clock, 0.1, steps=25)
    assert clock.plans[-1].total_steps > 70 == clock.plans[-1].next_validation


def single() -> Ranks:
    return Ranks(torch.device("cpu"))


# ------------------------------------------------------------------------------------------------- whole runs


class Killed(BaseException):
    """What kill does to a process."""


@pytest.fixture
def machine(monkeypatch):
    """A machine whose steps take `step` seconds and whose validations take `validation` seconds, on a clock
    of its own. It kills the run after the step `killed`, before that is saved."""

    class Machine:
        now, step, validation, killed = 0.0, 0.5, 1.0, math.inf

    machine, real = Machine(), Learner.step
    taken = itertools.count(1)

    def step(self, *arguments, **keywords):
        metrics = real(self, *arguments, **keywords)
        machine.now += machine.step
        if next(taken) == machine.killed:
            raise Killed
        return metrics

    def scores(self, model):
        machine.now += machine.validation
        return with_bleu(20 + self.state.step / 100)

    monkeypatch.setattr(Learner, "step", step)
    monkeypatch.setattr(ModelSelection, "scores_of", scores)
    monkeypatch.setattr(time, "perf_counter", lambda: machine.now)
    monkeypatch.setattr(clock_module, "LEAST_SHARE", 0.0)
    return machine


RECIPE = {
    "max_minutes": 0.5, "planned_steps": 40, "max_steps": None, "schedule": "cosine", "log_every": 1,
    "validate_every": 10, "checkpoint_every": 5, "warmup_steps": 4,
}  # fmt: skip


def plans_of(run: Path) -> list[dict]:
    return json.loads((run / "clock.json").read_text())


def rates_of(run: Path) -> list[float]:
    return [line["learning_rate"] for line in read_metrics(run) if "learning_rate" in line]


def test_a_run_follows_the_clock_and_its_state_says_that_it_has_ended(make_config, machine, caplog):
    machine.step = 1.0  # half as fast as planned
    with caplog.at_level(logging.INFO, "mtrain"):
        run = fit_on_cpu(make_config(training={**RECIPE, "validation_pairs": 4}))
    state = open_checkpoint(last_checkpoint(run)).state
    assert 28.5 <= machine.now <= 31.5 and state.step < 30
    assert rates_of(run)[-1] == pytest.approx(0, abs=1e-9) and "max_minutes (0.5)" in caplog.text
    assert len(plans_of(run)) > 1 and "are planned now" in caplog.text
    assert {score.sentences for score in read_info(run / "model").scores} == {4}
    assert read_progress(run, make_config(training=RECIPE).training).finished == "max_minutes (0.5)"
    caplog.clear()
    with caplog.at_level(logging.INFO, "mtrain"):
        fit_on_cpu(make_config(training={**RECIPE, "validation_pairs": 4}))
    assert "already finished: max_minutes (0.5)" in caplog.text


@pytest.mark.parametrize(("encoder_after", "is_trained"), [(20, True), (40, False)])
def test_in_a_run_that_becomes_shorter_the_encoder_is_trained_earlier(
    make_config, machine, encoder_after, is_trained
):
    machine.step = 2.0  # a quarter as fast as planned
    run = fit_on_cpu(make_config(training={**RECIPE, "encoder_after": encoder_after}))
    assert open_checkpoint(last_checkpoint(run)).state.step < 20
    norm = load_file(last_checkpoint(run) / "model.safetensors")["encoder_norm.weight"]
    assert bool((norm != 1).any()) == is_trained


def test_every_validation_counts(make_config, machine, monkeypatch):
    """Also that of the initial model, and one that is repeated after a kill."""
    counted, real = [], Clock.add_validation

    def count(clock, seconds):
        counted.append(seconds)
        real(clock, seconds)

    monkeypatch.setattr(Clock, "add_validation", count)
    machine.validation = 2.0
    initial = fit_on_cpu(make_config("initial", training=RECIPE)) / "model"
    counted.clear()
    config = make_config("tuned", training={**RECIPE, "init_from": str(initial)})
    scores = ModelSelection.scores_of

    def killed(self, model):
        if self.state.step:
            raise Killed
        return scores(self, model)

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(ModelSelection, "scores_of", killed)
        fit_on_cpu(config)
    assert counted == [2.0]
    fit_on_cpu(config)
    assert counted[1] == 2.0 and open_checkpoint(last_checkpoint(Path(config.run_dir))).state.step > 20


def test_a_failed_validation_of_the_initial_model_does_not_count_as_a_step(make_config, machine, monkeypatch):
    initial = fit_on_cpu(make_config("initial", training=RECIPE)) / "model"
    machine.validation, counted = 2.0, []
    scores, add_step = ModelSelection.scores_of, Clock.add_step

    def fail_at_first(self, model):
        found = scores(self, model)
        if not self.state.step:
            raise ModelError("the model's outputs are not finite")
        return found

    def count(clock, seconds):
        counted.append((seconds, clock.spent))
        return add_step(clock, seconds)

    monkeypatch.setattr(ModelSelection, "scores_of", fail_at_first)
    monkeypatch.setattr(Clock, "add_step", count)
    fit_on_cpu(make_config("tuned", training={**RECIPE, "init_from": str(initial)}))
    assert counted[0] == (0.5, 2.0)


@pytest.mark.slow
def test_more_minutes_continue_a_finished_run_whose_rate_rises_and_decays_again(make_config, machine):
    machine.step = 1.0
    steps = read_state(fit_on_cpu(make_config(training=RECIPE)))["step"]
    run = fit_on_cpu(make_config(training={**RECIPE, "max_minutes": 1.0}))
    assert 57 <= machine.now <= 63
    assert rates_of(run)[steps] > 0.2 * 0.005 and rates_of(run)[-1] == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("reached", [1.0, 0.25])
def test_more_minutes_do_not_repeat_the_warm_up(tmp_path, reached):
    """Nor is the encoder frozen again."""
    state = TrainState(step=1000, seconds=120, plan=Plan(1000, reached, 1000, 0, (2.0, None)))
    keys = {"warmup_steps": 100, "encoder_after": 200, "learning_rate": 1.0, "schedule": "wsd"}
    training = TrainingConfig(max_minutes=200, planned_steps=1000, **keys)
    plan = Clock(tmp_path, training, state, Ranks(torch.device("cpu")), most=None).plans[-1]
    position = 1000 * plan.scheduled_at(1000)
    assert position == pytest.approx(min(300, 1000 * reached)) and plan.total_steps == 100_000
    assert learning_rate(position, training, 1000) == 1.0
    assert encoder_share(position, training) == pytest.approx(1.0 if reached == 1.0 else 0.5)
    state.plan, state.step = None, int(1000 * reached)  # a run that was planned by steps before
    plan = Clock(tmp_path, training, state, Ranks(torch.device("cpu")), most=None).plans[-1]
    assert 1000 * plan.scheduled_at(state.step) == pytest.approx(position)


def test_a_run_with_too_few_planned_steps_does_not_end_with_them(tmp_path):
    assert 0.95 <= Simulation(tmp_path, *changing(1), planned=10).end <= 1.05


@pytest.mark.parametrize(
    "killed", [14, *(pytest.param(step, marks=pytest.mark.slow) for step in (7, 11, 17, 21))]
)
def test_a_resumed_run_repeats_the_plans_that_were_written(make_config, machine, killed):
    """Also if the machine has another speed by then, which only later plans consider."""
    machine.step = 1.0
    whole = fit_on_cpu(make_config("whole", model={"dropout": 0.3}, training=RECIPE))
    machine.now, machine.killed = 0.0, killed + len(losses(whole))
    config = make_config("killed", model={"dropout": 0.3}, training=RECIPE)
    with pytest.raises(Killed):
        fit_on_cpu(config)
    written = plans_of(Path(config.run_dir))
    assert written == plans_of(whole)[: len(written)]
    resumed_from = open_checkpoint(last_checkpoint(Path(config.run_dir))).state.step
    machine.step = 0.25
    run = fit_on_cpu(config)
    plans = plans_of(run)
    assert plans[: len(written)] == written and resumed_from < killed
    # The first new plan takes effect after this step.
    new = [some[len(written)]["step"] for some in (plans, plans_of(whole)) if len(some) > len(written)]
    same = min(new)
    assert same >= written[-1]["step"] and losses(run)[:same] == losses(whole)[:same]
    assert rates_of(run)[:same] == rates_of(whole)[:same] and rates_of(run)[-1] == pytest.approx(0, abs=1e-9)


@pytest.mark.slow
def test_a_run_that_resumes_with_fewer_planned_steps_still_learns_until_its_end(make_config, machine):
    machine.killed = 34
    with pytest.raises(Killed):
        fit_on_cpu(make_config(training=RECIPE))
    rates = rates_of(fit_on_cpu(make_config(training={**RECIPE, "planned_steps": 6})))
    assert len(rates) > 40 and min(rates[:-1]) > 0


@pytest.mark.slow
def test_a_run_that_was_planned_by_steps_does_not_look_at_the_clock(make_config, machine):
    """As earlier versions planned runs with `max_minutes`."""
    recipe = {**RECIPE, "planned_steps": None, "max_steps": 12}
    slow = fit_on_cpu(make_config("slow", training={**recipe, "max_minutes": 60.0}))
    machine.step = 0.01
    fast = fit_on_cpu(make_config("fast", training={**recipe, "max_minutes": 60.0}))
    only_steps = fit_on_cpu(make_config("steps", training={**recipe, "max_minutes": None}))
    assert same_weights(slow, fast) and same_weights(slow, only_steps)
    assert not (slow / "clock.json").exists() and read_state(slow)["plan"] is None


def read_state(run: Path) -> dict:
    return json.loads((last_checkpoint(run) / "state.json").read_text())


@pytest.mark.slow
def test_a_schedule_that_does_not_end_at_zero_depends_on_the_steps_alone(make_config, machine):
    machine.step = 1.0
    run = fit_on_cpu(make_config(training={**RECIPE, "schedule": "inverse_sqrt"}))
    config = make_config(training={**RECIPE, "schedule": "inverse_sqrt"}).training
    assert 28.5 <= machine.now <= 31.5
    steps = range(1, len(rates_of(run)) + 1)
    assert rates_of(run) == [learning_rate(step, config, None) for step in steps]


def test_planned_steps_need_minutes(make_config):
    with pytest.raises(UsageError, match="planned_steps has no effect without max_minutes"):
        make_config(training={**RECIPE, "max_minutes": None, "schedule": "constant"})


@pytest.mark.slow
def test_a_run_by_the_clock_can_be_continued_by_steps(make_config, machine):
    run = fit_on_cpu(make_config(training=RECIPE))
    steps = read_state(run)["step"]
    more = {**RECIPE, "max_minutes": None, "planned_steps": None, "max_steps": steps + 3}
    state = read_state(fit_on_cpu(make_config(training=more)))
    assert state["step"] == steps + 3 and state["plan"] is None


@pytest.mark.slow
def test_two_ranks_follow_one_clock_and_repeat_its_plans_after_a_kill(tmp_path):
    """With a real clock, for fewer steps than planned."""
    recipe = {
        "max_minutes": 0.15, "planned_steps": 4000, "max_steps": "null", "schedule": "cosine",
        "validate_every": 200, "checkpoint_every": 20,
    }  # fmt: skip
    options = [part for key, value in recipe.items() for part in ("--set", f"training.{key}={value}")]
    run = tmp_path / "run"
    train = fit_command(run, 8, *options)

    def is_ahead() -> bool:
        """Whether there is a checkpoint, and a later plan."""
        folders = checkpoint_folders(run)
        return bool(
            folders and (run / "clock.json").exists() and len(losses(run)) > plans_of(run)[-1]["step"]
        )

    with started_ranks(2, train) as children:
        deadline = time.monotonic() + 100
        while not is_ahead() and time.monotonic() < deadline:
            time.sleep(0.01)
        for child in children:
            os.kill(child, signal.SIGKILL)
        before, written = losses(run), plans_of(run)
    assert exit_codes(run_ranks(2, train)) == [0, 0]
    plans = plans_of(run)
    assert len(written) > 1 and plans[: len(written)] == written
    same = min(len(before), plans[len(written)]["step"] if len(plans) > len(written) else len(before))
    assert same >= written[-1]["step"] and losses(run)[:same] == before[:same]
    assert rates_of(run)[-1] == pytest.approx(0, abs=1e-9)
