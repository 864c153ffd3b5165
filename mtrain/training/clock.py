"""Corrects the number of steps of a run with `max_minutes`, so that it ends on time and its learning rate has
decayed.

`planned_steps` of the config is a first estimate of the steps that the time allows. `Clock` corrects it: a
plan states the last step of the run, and the position in the schedule of the learning rate advances evenly to
that step. If a machine becomes slower, the rate decays over fewer steps.

Rank 0 makes plans between two steps, and writes all plans to `RUN/clock.json` before a new one takes effect.
A checkpoint might take too long to save. A resumed run repeats the plans that were written after its
checkpoint at the same steps, and makes new ones only after them.
"""

import logging
import math
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean

from pydantic import TypeAdapter

from mtrain.checkpoint.state import Plan, TrainState
from mtrain.config.sections.training import TrainingConfig
from mtrain.distributed.ranks import Ranks
from mtrain.duration import format_duration
from mtrain.errors import StorageError
from mtrain.runs.limits import DECAYED, LATEST
from mtrain.storage.atomic import write_atomically
from mtrain.storage.manifest import read_json

log = logging.getLogger(__name__)

FILE = "clock.json"  # in the run folder
AIM = 0.98  # share of the time after which the run should end, because ending late is worse
VALIDATION_SHARE = 0.1  # of the time, at most, with saving
ASSUMED_COST = 0.04  # of a validation, relative to the steps between two validations, until one is measured
SHORTEST_DECAY = 0.02  # share of the time that the remaining steps may take, even if less is left
LEAST_STEPS = 3  # that are measured before the first decision
LEAST_SHARE = 0.02  # of the time, in which steps are measured before a decision, unless few are planned
# Deviations of the end that require a new plan, as shares of the time: after a validation, and at any step.
# At any step, they must also exceed a share of the time that is left, because later plans can correct them.
SMALL, LARGE, LARGE_OF_REST = 0.005, 0.02, 0.25
WAIT = 1 / 4  # of the time that is left, for which a second plan may wait for the next validation
MEMORY = 1 / 8  # of the time that is left: the time constant of the running mean of the time of a step
LARGEST_JUMP = 4.0  # limit on the time of a step, relative to the mean, against single outliers
RECENT = 10  # steps on each side of a validation that tell how fast the machine was at that time

_PLANS = TypeAdapter(list[Plan])


class Clock:
    """Keeps `state.plan` up to date. All ranks have one and adopt the same plans; rank 0 makes them."""

    def __init__(
        self, run_dir: Path, training: TrainingConfig, state: TrainState, ranks: Ranks, most: int | None
    ):
        """`most` is the number of steps that the other limits allow."""
        assert training.max_minutes is not None and training.planned_steps is not None
        self.file, self.training = run_dir / FILE, training
        self.state, self.ranks = state, ranks
        self.budget = 60 * training.max_minutes  # seconds
        self.most = math.inf if most is None else most
        self.limits = training.max_minutes, most
        self.planned_steps = training.planned_steps  # in which the schedules of the config are expressed
        measured = state.step and state.seconds / state.step
        self._seconds_per_step = measured or self.budget / self.planned_steps  # until it is measured
        written: list[Plan] = []
        with suppress(OSError, ValueError):  # none, if the file is missing or damaged
            written = _PLANS.validate_python(read_json(self.file))
        plan = self._adapted(state.plan, written)
        # A new plan invalidates the plans that were written for later steps.
        self._is_new = state.step > 0 and plan not in (state.plan, *written)
        later = [each for each in written if each.step > state.step and each.limits == plan.limits]
        # The last plan is in effect; it is also `state.plan`.
        self.plans = self._from_first([*(each for each in written if each.step < plan.step), plan])
        state.plan = self.plans[-1]
        self.later = self._from_first([] if self._is_new else later)  # to be repeated
        self._failed = False  # whether the last plan could not be written
        self._validation: float | None = None  # seconds of the last one, with saving
        self._last: deque[float] = deque(maxlen=RECENT)  # seconds of the last steps
        self._around: list[float] = []  # seconds of the steps just before and just after the last validation
        # Seconds of validations and saves. Before this process, assumed to be their largest share.
        self.spent = VALIDATION_SHARE * state.seconds
        self.is_due = state.step == 0  # whether small deviations count
        self._start = state.step  # of this process
        self._steps = self._seconds = 0.0  # sums over the last steps, of which older ones weigh less

    def begin(self) -> None:
        """Write the plan for limits that have changed, before training continues. Raises StorageError on all
        ranks."""
        with self.ranks.agreed():
            if self._is_new and self.ranks.is_first:
                self._write(self.plans)

    def _adapted(self, plan: Plan | None, written: Sequence[Plan]) -> Plan:
        """The plan of a checkpoint, or the first plan if there is none or the limits have changed. In a new
        plan, the steps that were taken have the share that they would have at the same speed, but the
        warm-up, also of an encoder that was frozen, is not repeated. If an earlier process has `written` a
        plan for these limits at this step, that plan is used again: a repeated validation may have changed
        the speed."""
        if plan and plan.limits == self.limits:
            return plan
        step, training = self.state.step, self.training
        for each in written:
            if step and (each.step, each.limits) == (step, self.limits):
                return each
        total = max(step, round(min(self.budget / self._seconds_per_step, self.most)), 1)
        warm = ((training.encoder_after or 0) + (training.warmup_steps or 0)) / self.planned_steps
        reached = plan.scheduled_at(step) if plan else step / self.planned_steps
        validation_steps = plan.validation_steps if plan else None
        return Plan(step, max(step / total, min(reached, warm)), total, 0, self.limits, validation_steps)

    def add_step(self, seconds: float) -> bool:
        """Count a step that took some `seconds`. Repeats the plan that was written after it or, on rank 0,
        makes a new one if that is necessary. Returns whether rank 0 has made one, which the other ranks have
        to `adopt`."""
        state, current = self.state, self.plans[-1]
        left = max(0.0, AIM * self.budget - state.seconds)
        self._measure(seconds, left)
        if self.later and self.later[0].step <= state.step:
            state.plan = self.later.pop(0)
            self.plans.append(state.plan)
            return False
        # After a long pause, or a very slow validation, the rate still has to decay.
        is_late = state.seconds >= LATEST * self.budget and current.scheduled_at(state.step) < DECAYED
        is_known = self._seconds >= LEAST_SHARE * self.budget or 2 * state.step >= current.total_steps
        is_known = is_known and state.step > self._start + LEAST_STEPS
        if not self.ranks.is_first or state.step >= current.total_steps:
            return False
        if not is_late and (self.later or not is_known or (not self.is_due and self._can_wait(left))):
            return False
        plan = self._make_plan(left)
        deviation = abs(plan.total_steps - current.total_steps) * self._seconds_per_step
        least = SMALL * self.budget if self.is_due else max(LARGE * self.budget, LARGE_OF_REST * left)
        changes_validation = self.is_due and plan.next_validation != current.next_validation
        is_new = deviation > least or changes_validation or bool(self.later)
        if is_new and not self._try_to_write([*self.plans, plan], is_late) and not is_late:
            return False  # it is tried again after the next step
        self.is_due = False
        if is_new:
            speed = format_duration(self._seconds_per_step)
            log.info("max_minutes: %d steps in all are planned now (%s per step)", plan.total_steps, speed)
            self.plans.append(plan)
            state.plan = plan
        return is_new

    def _can_wait(self, left: float) -> bool:
        """Whether this process has already made a plan in this interval of `validate_every` steps, which is
        not the last one and ends within the share `WAIT` of the time that is left."""
        every, step, plan = self.training.validate_every, self.state.step, self.plans[-1]
        number = (step - 1) // every
        is_planned = plan.step > self._start and (plan.step - 1) // every == number
        is_last = (number + 1.5) * every > plan.total_steps  # see `allows_validation`
        seconds = ((number + 1) * every - step) * self._seconds_per_step
        return is_planned and not is_last and seconds <= WAIT * left

    def adopt(self) -> None:
        """Let all ranks have the new plan of rank 0."""
        self.later = []
        self.plans = self._from_first(self.plans)
        self.state.plan = self.plans[-1]

    def _from_first(self, plans: list[Plan]) -> list[Plan]:
        """The plans that rank 0 gives, on all ranks."""
        return _PLANS.validate_python(self.ranks.broadcast(_PLANS.dump_python(plans, mode="json")))

    def allows_validation(self) -> bool:
        """Whether the model may be validated after the last step: not long after the last validation if these
        take much of the time, and not shortly before the last one."""
        step, plan = self.state.step, self.plans[-1]
        return plan.next_validation <= step <= plan.total_steps - self.training.validate_every / 2

    def add_validation(self, seconds: float) -> None:
        """Count a validation that, with saving, took some `seconds`."""
        self.is_due = True
        self.spent += seconds
        self._validation, self._around = seconds, list(self._last)

    def _measure(self, seconds: float, left: float) -> None:
        seconds = min(max(seconds, 1e-9), LARGEST_JUMP * self._seconds_per_step)
        kept = math.exp(-seconds / max(MEMORY * left, 1e-9))
        self._steps, self._seconds = kept * self._steps + 1, kept * self._seconds + seconds
        self._seconds_per_step = self._seconds / self._steps
        self._last.append(seconds)
        if len(self._around) < 2 * RECENT:
            self._around.append(seconds)

    def _make_plan(self, left: float) -> Plan:
        """A plan for the seconds that are left for training, validation and saving."""
        current, step = self.plans[-1], self.state.step
        each, every = self._seconds_per_step, self.training.validate_every
        # How many steps took as long as the last validation. The next one is assumed to take as many: a
        # slower machine also validates more slowly.
        measured = current.validation_steps  # by an earlier process
        if self._validation is not None:
            measured = self._validation / fmean(self._around or [each])
        validation = each * (ASSUMED_COST * every if measured is None else measured)
        # The number of validations, including the last one.
        possible = math.ceil((current.total_steps - step) / every)
        allowance = VALIDATION_SHARE * self.budget - self.spent
        affordable = max(1, min(possible, int(allowance / max(validation, 1e-9))))
        shortest = min(SHORTEST_DECAY * self.budget / each, current.total_steps - step)
        remaining = max((left - affordable * validation) / each, shortest, 1)
        total = round(min(step + remaining, self.most))
        next_validation = current.next_validation
        if next_validation == current.total_steps:
            next_validation = total  # the last one
        if self.is_due:
            next_validation = 0 if affordable == possible else step + math.ceil((total - step) / affordable)
        return Plan(step, current.scheduled_at(step), total, next_validation, self.limits, measured)

    def _try_to_write(self, plans: list[Plan], is_late: bool) -> bool:
        """Write all plans, if possible. Returns whether it was. If not, a new plan must not take effect,
        unless the run is late and would not end."""
        try:
            self._write(plans)
        except StorageError as error:
            if not self._failed:
                consequence = "a resumed run may decay otherwise" if is_late else "the plan stays the same"
                log.warning("%s; %s until the file can be written", error, consequence)
            self._failed = True
            return False
        self._failed = False
        return True

    def _write(self, plans: list[Plan]) -> None:
        write_atomically(self.file, _PLANS.dump_json(plans, indent=1).decode() + "\n")
