"""Predictions for several devices, by numbers that can be checked by hand."""

import pytest

from mtrain.config.sections.training import TrainingConfig
from mtrain.planning.estimate import Epoch, StepCost, StepTime
from mtrain.planning.hardware import BANDWIDTH_UTILIZATION, Link
from mtrain.planning.scaling import BUCKET, Run, Work, all_reduce, planned_steps, predict_run

EPOCH = Epoch("text", pairs=30_000, source_tokens=0, target_tokens=0, padding=0.0, steps=100)
STEP = StepCost(target_tokens=4000.0, flops=0.0, micro_batches=2.0, micro_batch_tokens=4096)
TIME = StepTime(forward_backward=0.9, update=0.1)
LINK = Link("a wire", bandwidth=1e9 / BANDWIDTH_UTILIZATION, latency=0.0)
GB = 10**9


def run(devices: int, size: int, last: int = 0, time: StepTime = TIME, link: Link | None = LINK) -> Run:
    alone = devices * time.forward_backward + time.update
    work = Work(TrainingConfig(max_steps=3600), EPOCH, STEP, time, alone, size, last)
    return predict_run(work, devices, link, price=2)


def test_a_single_device_does_not_communicate():
    alone = run(1, GB)
    assert (alone.sent_bytes, alone.communication_seconds, alone.efficiency) == (0, 0, 1)
    assert alone.step_seconds == 1 and alone.target_tokens_per_second == 4000
    assert alone.hours == 1 and alone.cost == 2 and alone.epoch_hours == 100 / 3600


def test_a_ring_sends_nearly_twice_the_gradients():
    sent, seconds = all_reduce(GB, 4, LINK)
    assert sent == 1.5 * GB and seconds == pytest.approx(1.5)
    slow = LINK._replace(latency=0.001)
    assert all_reduce(BUCKET + 1, 4, slow)[1] - all_reduce(BUCKET + 1, 4, LINK)[1] == pytest.approx(0.012)


def test_the_backward_pass_of_the_last_micro_batch_hides_communication():
    """The backward pass takes two thirds of the 0.45 s of one of two micro-batches."""
    hidden = run(2, GB // 10)  # 0.1 s
    assert hidden.step_seconds == pytest.approx(1 + 0.1 * BUCKET / (GB // 10))  # but for the last bucket
    longer = run(2, GB)
    assert longer.step_seconds == pytest.approx(1 + 1 - 0.3)
    last = run(2, GB // 10, last=GB // 20)
    assert last.step_seconds == pytest.approx(1 + 0.05)


def test_efficiency_counts_the_update_that_every_device_repeats():
    free = run(4, 1, link=LINK._replace(bandwidth=1e30))
    assert free.step_seconds == pytest.approx(1)
    assert free.efficiency == pytest.approx((4 * 0.9 + 0.1) / 4)
    assert free.cost == pytest.approx(4 * 2)


@pytest.mark.parametrize(
    ("limits", "steps", "limit"),
    [
        ({"max_steps": 50}, 50, "max_steps 50"),
        ({"max_epochs": 3}, 300, "max_epochs 3"),
        ({"max_minutes": 2.0}, 240, "max_minutes 2"),
        ({"max_steps": 500, "max_epochs": 3, "max_minutes": 2.0}, 240, "max_minutes 2"),
        ({"max_minutes": 0.001}, 1, "max_minutes 0.001"),
        ({}, 6000, "none is given; 60 epochs assumed"),
        ({"init_from": "runs/first"}, 1500, "none is given; 15 epochs assumed"),
    ],
)
def test_the_first_limit_ends_the_run(limits, steps, limit):
    assert planned_steps(TrainingConfig(**limits), EPOCH, step_seconds=0.5) == (steps, limit)
