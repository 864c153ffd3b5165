"""Learning rates against their formulas."""

import math

import pytest

from mtrain.config.sections.training import TrainingConfig
from mtrain.training.step.learning_rate import encoder_share, learning_rate


def rates(schedule, steps, warmup=10, total=100):
    config = TrainingConfig(max_steps=total, learning_rate=0.5, warmup_steps=warmup, schedule=schedule)
    return [learning_rate(step, config, total) for step in steps]


@pytest.mark.parametrize(
    ("frozen", "warmup", "shares"),
    [(0, 4, [1, 1, 1, 1, 1, 1, 1]), (2, 4, [0, 0, 0.25, 0.5, 0.75, 1, 1]), (3, 0, [0, 0, 0, 1, 1, 1, 1])],
)
def test_the_encoder_has_a_warm_up_after_it_was_frozen(frozen, warmup, shares):
    """Without it, `student_base` with seed 2 fails on Multi30k; see docs/experiments/recipes.md."""
    config = TrainingConfig(max_steps=7, warmup_steps=warmup, encoder_after=frozen)
    assert [encoder_share(step, config) for step in range(1, 8)] == shares


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
