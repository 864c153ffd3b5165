"""Learning rates against their formulas."""

import math

import pytest

from mtrain.config.sections.training import TrainingConfig
from mtrain.training.step.learning_rate import clocked_rate, learning_rate


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


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
@pytest.mark.parametrize("steps", [25, 50, 100, 200])
def test_with_norms_after_the_sublayers_the_clock_does_not_let_the_rate_rise_faster(schedule, steps):
    """100 steps are planned, 20 of them for the warm-up, and the clock allows `steps`."""
    limits = {"max_minutes": 1.0, "planned_steps": 100}
    config = TrainingConfig(**limits, learning_rate=0.5, warmup_steps=20, schedule=schedule)
    positions = [100 / steps * step for step in range(1, steps + 1)]
    usual = [learning_rate(position, config, 100) for position in positions]
    assert [clocked_rate(i, at, config, False) for i, at in enumerate(positions, start=1)] == usual
    slow = [clocked_rate(i, at, config, True) for i, at in enumerate(positions, start=1)]
    rises = [after - before for before, after in zip([0, *slow], slow, strict=False)]
    assert max(rises) <= 0.5 / 20 + 1e-9 and slow[-1] == pytest.approx(0, abs=1e-9)
    assert slow == usual or steps < 100
