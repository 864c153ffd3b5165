"""Measures the speed of training, for `mtrain plan` and for the steps that fit in `training.max_minutes`."""

import gc
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch

from mtrain.config.sections.model import ModelConfig
from mtrain.config.sections.training import TrainingConfig
from mtrain.data.epochs.loader import StepInput
from mtrain.device import release_cached_memory, should_compile
from mtrain.kernels.reproducible import reproducible
from mtrain.kernels.undocumented import undocumented
from mtrain.model.build import build_model
from mtrain.progress_bar import waiting_for
from mtrain.training.step.learner import Learner
from mtrain.training.step.make_learner import make_learner
from mtrain.training.step.optimizer import freeze

UNTIMED_STEPS = 2  # at least, which allocate memory
TIMED_STEPS, TIMED_SECONDS = 6, 4.0  # at least both
MAX_SECONDS = 20.0  # then fewer steps suffice
MAX_SECONDS_OF_COMPILATION = 300.0  # then steps are timed even if they compile


class Timing(NamedTuple):
    """The mean speed of the timed steps, and how long one takes."""

    speed: float  # target tokens/s
    seconds: float  # of a step


def measure_speed(
    architecture: ModelConfig,
    training: TrainingConfig,
    device: torch.device,
    steps_of: Callable[[Learner], Iterable[StepInput]],
    alone: bool = True,
    minutes: float | None = None,
) -> float:
    """The target tokens/s of training a model on `device`, from some of the steps that `steps_of` returns for
    its learner. Unless this process trains `alone`, a step has the batches of this rank and the tokens of all
    ranks. The other ranks are assumed to be as fast; the time to exchange gradients is not included.

    Steps are timed with R-Drop if `training` uses it. With `minutes`, the result is the mean speed of a run
    of that time, which begins with the `r_drop_after` steps without R-Drop.

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
        if should_compile(device, training.compile):
            torch.compiler.reset()  # the number of compiled variants of a function is limited
        gc.collect()  # a compiled model refers to itself
        release_cached_memory(device)


def _time_run(learner: Learner, steps: Iterator[StepInput], minutes: float | None) -> float:
    later, steps_without_r_drop = _time_steps(learner, steps), learner.training.r_drop_after
    if minutes is None or not learner.r_drop or not steps_without_r_drop:
        return later.speed
    learner.r_drop = 0.0
    return mean_speed(minutes * 60, steps_without_r_drop, _time_steps(learner, steps), later)


def mean_speed(seconds: float, count: int, first: Timing, later: Timing) -> float:
    """The mean of target tokens/s over some `seconds`, if the first `count` steps have another speed than the
    later ones."""
    before = min(count * first.seconds, seconds)
    return (before * first.speed + (seconds - before) * later.speed) / seconds


def _time_steps(learner: Learner, steps: Iterator[StepInput]) -> Timing:
    tokens = count = 0
    began = timing_began = time.perf_counter()
    compilations = _count_compilations(learner)
    for number, step in enumerate(steps, start=1):
        metrics = learner.step(step.batches, step.tokens, rate=1e-5)
        before, compilations = compilations, _count_compilations(learner)
        compiled = compilations > before and time.perf_counter() - began < MAX_SECONDS_OF_COMPILATION
        if number <= UNTIMED_STEPS or compiled:
            metrics.values.tolist()  # waits for the device
            tokens = count = 0
            timing_began = time.perf_counter()
            continue
        tokens, count = tokens + step.tokens, count + 1
        if count >= TIMED_STEPS or time.perf_counter() - began >= MAX_SECONDS:
            metrics.values.tolist()
            if time.perf_counter() - timing_began >= TIMED_SECONDS:
                break
    seconds = time.perf_counter() - timing_began
    return Timing(tokens / seconds, seconds / count)


def _count_compilations(learner: Learner) -> int:
    """How often torch.compile has compiled a function in this process, if PyTorch says so, or how many graphs
    the learner has captured."""
    if not learner.compiles:
        return learner.captures  # to ask PyTorch takes seconds: it imports the compiler
    counters = undocumented("_dynamo.utils.counters")
    return 0 if counters is None else int(counters["frames"]["total"])
