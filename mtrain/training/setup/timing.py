"""Measures the speed of training, for `mtrain plan` and for the steps that fit in `training.max_minutes`."""

import gc
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import fmean, stdev
from typing import NamedTuple

import torch

from mtrain.config.sections.model import ModelConfig
from mtrain.config.sections.training import TrainingConfig
from mtrain.data.epochs.loader import StepInput
from mtrain.device import release_cached_memory
from mtrain.kernels.reproducible import reproducible
from mtrain.model.build import build_model
from mtrain.processes.cores import ThreadSeconds, cpu_limit, thread_seconds
from mtrain.progress_bar import waiting_for
from mtrain.training.step.learner import Learner
from mtrain.training.step.make_learner import make_learner
from mtrain.training.step.optimizer import freeze

log = logging.getLogger(__name__)

UNTIMED_STEPS = 2  # at least, which allocate memory
TIMED_STEPS, TIMED_SECONDS = 6, 4.0  # at least both
INTERVAL_SECONDS = 0.5  # that an interval of fewer steps takes at least
STEADY = 0.03  # relative standard error of the speed, with which timing may end
MAX_SECONDS, MAX_SHARE = 20.0, 1 / 30  # also of `minutes`; then fewer steps and a larger error suffice
MAX_SECONDS_OF_CAPTURES = 300.0  # then steps are timed even if they capture graphs
NOTABLE = 1.05  # a slowdown that is logged


class Speed(NamedTuple):
    """How fast this machine trains a model."""

    now: float  # target tokens/s
    slowdown: float = 1.0  # by other processes: the speed without them, relative to `now`


class Timing(NamedTuple):
    """The mean speed of the timed steps, and how long one takes."""

    speed: Speed
    seconds: float  # of a step


def measure_speed(
    architecture: ModelConfig,
    training: TrainingConfig,
    device: torch.device,
    steps_of: Callable[[Learner], Iterable[StepInput]],
    alone: bool = True,
    minutes: float | None = None,
) -> Speed:
    """The speed of training a model on `device`, from some of the steps that `steps_of` returns for
    its learner. Unless this process trains `alone`, a step has the batches of this rank and the tokens of all
    ranks. The other ranks are assumed to be as fast; the time to exchange gradients is not included.

    Steps are timed until the mean is steady, for at most `MAX_SECONDS` and a `MAX_SHARE` of `minutes`.
    Each measurement is logged. Steps are timed with R-Drop if `training` uses it. With `minutes`, the result
    is the mean speed of a run of that time, which begins with the `r_drop_after` steps without R-Drop.

    Trains a temporary model. PyTorch's random generators change.
    """
    model = build_model(architecture).to(device).train()
    freeze(model, training.freeze)
    on_gpu = device.type == "cuda"
    learner = make_learner(model, training) if alone or on_gpu else Learner(model, training)
    try:
        with waiting_for("measuring the speed"), reproducible(device):
            return _time_run(learner, iter(steps_of(learner)), minutes)
    finally:
        del learner, model
        gc.collect()  # a learner that cannot capture graphs refers to itself
        release_cached_memory(device)


def _time_run(learner: Learner, steps: Iterator[StepInput], minutes: float | None) -> Speed:
    limit = MAX_SECONDS if minutes is None else min(MAX_SECONDS, MAX_SHARE * minutes * 60)
    later, steps_without_r_drop = _time_steps(learner, steps, limit), learner.training.r_drop_after
    if minutes is None or not learner.r_drop or not steps_without_r_drop:
        return later.speed
    learner.r_drop = 0.0
    first = _time_steps(learner, steps, limit)
    return mean_speed(minutes * 60, steps_without_r_drop, first, later)


def mean_speed(seconds: float, count: int, first: Timing, later: Timing) -> Speed:
    """The mean speed over some `seconds`, if the first `count` steps have another speed than the later ones.
    The slowdown is the one of the later steps."""
    before = min(count * first.seconds, seconds)
    tokens = before * first.speed.now + (seconds - before) * later.speed.now
    return later.speed._replace(now=tokens / seconds)


def _time_steps(learner: Learner, steps: Iterator[StepInput], limit: float) -> Timing:
    """Time steps in intervals until their speeds show that the mean is steady, or for `limit` seconds."""
    intervals: list[tuple[int, float]] = []  # target tokens, seconds
    tokens = count = 0
    began = interval_began = time.perf_counter()
    used = thread_seconds()
    for number, step in enumerate(steps, start=1):
        captures = learner.captures
        metrics = learner.step(step.batches, step.tokens, rate=1e-5)
        now = time.perf_counter()
        captured = learner.captures > captures and now - began < MAX_SECONDS_OF_CAPTURES
        is_timed = number > UNTIMED_STEPS and not captured
        tokens, count = tokens + step.tokens, count + 1
        if is_timed and count % TIMED_STEPS and now - interval_began < INTERVAL_SECONDS:
            continue
        metrics.values.tolist()  # waits for the device
        now = time.perf_counter()
        if is_timed:
            intervals.append((tokens, now - interval_began))
        else:
            intervals.clear()
            count, used = 0, thread_seconds()
        tokens, interval_began = 0, now
        if intervals and _suffices(intervals, count, is_late=now - began >= limit):
            break
    seconds = sum(seconds for _, seconds in intervals)
    slowdown = _slowdown(used, seconds) if learner.device.type == "cpu" else 1.0
    speed = Speed(sum(tokens for tokens, _ in intervals) / seconds, slowdown)
    _log_speed(speed, _relative_error(intervals), seconds, learner.model.config.is_classifier)
    return Timing(speed, seconds / count)


def _log_speed(speed: Speed, error: float, seconds: float, classifies: bool) -> None:
    """Log a speed that was measured for some seconds, with its relative standard error."""
    unit = "pairs/s" if classifies else "target tokens/s"
    spread = f"standard error {error:.1%}" if math.isfinite(error) else "a single step"
    free = speed.now * speed.slowdown
    others = f"; {free:,.0f} without other processes" if speed.slowdown > NOTABLE else ""
    log.info("speed: %s %s (%s, measured for %.0f s)%s", f"{speed.now:,.0f}", unit, spread, seconds, others)


def _suffices(intervals: Sequence[tuple[int, float]], count: int, is_late: bool) -> bool:
    """Whether `count` steps in these intervals suffice to know the speed."""
    steady = count >= TIMED_STEPS and _relative_error(intervals) <= STEADY
    return (is_late or steady) and sum(seconds for _, seconds in intervals) >= TIMED_SECONDS


def _relative_error(intervals: Sequence[tuple[int, float]]) -> float:
    """The standard error of the mean of the speeds in some intervals, relative to this mean."""
    if len(intervals) == 1:
        return math.inf
    speeds = [tokens / seconds for tokens, seconds in intervals]
    return stdev(speeds) / math.sqrt(len(speeds)) / fmean(speeds)


def _slowdown(before: ThreadSeconds, seconds: float) -> float:
    """How many times as fast this process would have been without other processes, in the last `seconds`.
    `before` are the times of its threads at the beginning. Without other processes, threads do not wait for
    cores, but cannot use more cores than the process may use."""
    now = thread_seconds()
    ran, waited = now.ran - before.ran, now.waited - before.waited
    return max(1.0, min(1 + waited / ran, seconds * cpu_limit() / ran)) if ran > 0 else 1.0
