"""Learning rates against their formulas."""

import math

import pytest

from mtrain.config.sections.training import TrainingConfig
from mtrain.training.step.learning_rate import learning_rate


def rates(schedule, steps, warmup=10, total=100):
    config = TrainingConfig(max_steps=total, learning_rate=0.5, warmup_steps=warmup, schedule=schedule)
    return [learning_rate(step, config, total) for step in steps]


@pytest.mark.parametrize("schedule", ["inverse_sqrt", "cosine", "linear", "wsd", "constant"])
def test_warm_up_is_linear_and_meets_the_peak(schedule):
    assert rates(schedule, range(1, 11)) == pytest.approx([0.05 * step for step in range(1, 11)])


@pytest.mark.parametrize(
    ("schedule", "formula"),
    [
        ("inverse_sqrt", lambda step: 0.5 * math.sqrt(10) / math.sqrt(step)),
        ("cosine", lambda step: 0.25 * (1 + math.cos(math.pi * (step - 10) / 90))),
        ("linear", lambda step: 0.5 * (100 - step) / 90),
        ("wsd", lambda step: 0.5 if step <= 55 else 0.5 * (1 - math.sqrt((step - 55) / 45))),
        ("constant", lambda step: 0.5),
    ],
)
def test_decay_follows_the_formula(schedule, formula):
    assert rates(schedule, range(10, 101)) == pytest.approx([formula(step) for step in range(10, 101)])


@pytest.mark.parametrize("schedule", ["inverse_sqrt", "cosine", "linear", "wsd", "constant"])
def test_without_warm_up_the_rate_starts_near_the_peak_and_never_increases(schedule):
    values = rates(schedule, range(1, 201), warmup=0)  # also past the planned end
    assert values[0] == pytest.approx(0.5, rel=0.02) and all(0 <= value <= 0.5 for value in values)
    assert values == sorted(values, reverse=True)
