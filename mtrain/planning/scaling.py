"""Predicts the speed of several devices, and how long a run takes.

Each device computes its share of a step. The gradients are summed by a ring (Patarasuk and Yuan, "Bandwidth
optimal all-reduce algorithms for clusters of workstations", 2009), in which each device sends
2 (N - 1) / N times the size of the gradients, while the backward pass of the last micro-batch runs. The time
of a step is the time of its computation, plus the part of the communication that is not hidden.
"""

from dataclasses import dataclass

from mtrain.config.fine_tuning_recipe import USEFUL_SHARE
from mtrain.config.recipe import useful_epochs
from mtrain.config.sections.training import TrainingConfig
from mtrain.planning.estimate import Epoch, StepCost, StepTime
from mtrain.planning.hardware import BANDWIDTH_UTILIZATION, Link

BACKWARD_SHARE = 2 / 3  # of the time of a micro-batch: two of the three products of each weight
BUCKET = 25 * 2**20  # bytes of gradients that DistributedDataParallel sends at once by default


@dataclass(frozen=True)
class Work:
    """What the devices of a run compute and exchange."""

    training: TrainingConfig
    epoch: Epoch
    step: StepCost
    time: StepTime  # of each device in a step
    alone: float  # seconds that a single device would take for the step
    gradient_bytes: int  # of all gradients
    last_gradient_bytes: int  # of the gradient that is known last; nothing is left to compute meanwhile


@dataclass(frozen=True)
class Run:
    """A run on devices that are connected by one kind of link."""

    link: str | None  # None for a single device
    sent_bytes: float  # by each device in a step
    communication_seconds: float  # of a step, hidden or not
    step_seconds: float
    efficiency: float  # speed per device, relative to a single device with the same batch
    target_tokens_per_second: float  # of all devices
    epoch_hours: float
    steps: int  # of the whole run
    limit: str  # that ends it
    hours: float  # of training, without validation
    cost: float | None  # of all devices; None without a price


def predict_run(work: Work, devices: int, link: Link | None, price: float | None) -> Run:
    """Predict a run on `devices` devices, each of which costs `price` an hour."""
    sent = communication = exposed = 0.0
    if link is not None and devices > 1:
        sent, communication = all_reduce(work.gradient_bytes, devices, link)
        hidden = BACKWARD_SHARE * work.time.forward_backward / work.step.micro_batches
        last = min(1.0, max(BUCKET, work.last_gradient_bytes) / work.gradient_bytes)
        exposed = max(communication - hidden, communication * last)
    seconds = sum(work.time) + exposed
    steps, limit = planned_steps(work.training, work.epoch, seconds)
    hours = steps * seconds / 3600
    return Run(
        link=None if link is None else link.name,
        sent_bytes=sent,
        communication_seconds=communication,
        step_seconds=seconds,
        efficiency=work.alone / (devices * seconds),
        target_tokens_per_second=work.step.target_tokens / seconds,
        epoch_hours=work.epoch.steps * seconds / 3600,
        steps=steps,
        limit=limit,
        hours=hours,
        cost=None if price is None else price * devices * hours,
    )


def all_reduce(size: int, devices: int, link: Link) -> tuple[float, float]:
    """Bytes that each device sends to sum `size` bytes over all devices, and the seconds that this takes."""
    messages, buckets = 2 * (devices - 1), -(-size // BUCKET)
    sent = messages / devices * size
    return sent, sent / (BANDWIDTH_UTILIZATION * link.bandwidth) + buckets * messages * link.latency


def planned_steps(training: TrainingConfig, epoch: Epoch, step_seconds: float) -> tuple[int, str]:
    """The number of steps of a run, and the limit that ends it. Early stopping is not predicted."""
    limits = []
    if training.max_steps is not None:
        limits.append((training.max_steps, f"max_steps {training.max_steps:,}"))
    if training.max_epochs is not None:
        limits.append((training.max_epochs * epoch.steps, f"max_epochs {training.max_epochs:,}"))
    if training.max_minutes is not None:
        steps = max(1, round(training.max_minutes * 60 / step_seconds))
        limits.append((steps, f"max_minutes {training.max_minutes:g}"))
    if not limits:
        epochs = useful_epochs(epoch.pairs) * (USEFUL_SHARE if training.init_from else 1)
        limits.append((max(1, round(epochs * epoch.steps)), f"none is given; {epochs:.0f} epochs assumed"))
    return min(limits)
