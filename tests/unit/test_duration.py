"""Durations as people read them."""

import pytest

from mtrain.duration import format_duration


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.0031, "3 ms"),
        (0.42, "0.42 s"),
        (4.24, "4.2 s"),
        (9.97, "10 s"),
        (59.4, "59 s"),
        (59.7, "1 min"),
        (252, "4 min 12 s"),
        (3599.8, "1 h"),
        (4980.0, "1 h 23 min"),
        (7199, "2 h"),
        (273_600, "3 d 4 h"),
    ],
)
def test_durations_have_the_units_that_matter(seconds, text):
    assert format_duration(seconds) == text
