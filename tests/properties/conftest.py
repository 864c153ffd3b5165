"""The number of examples for each property."""

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import SearchStrategy

MANY = 100


@pytest.fixture(params=[1, pytest.param(MANY, marks=pytest.mark.slow)], ids=["few", "many"])
def tried(request: pytest.FixtureRequest) -> Callable[..., Callable[[Callable[..., None]], None]]:
    """`@tried(20, x=strategy)` runs a function at once on 20 examples, or on `MANY` times as many."""

    def on(few: int, **strategies: SearchStrategy) -> Callable[[Callable[..., None]], None]:
        limits = settings(
            max_examples=few * request.param,
            derandomize=request.param == 1,
            suppress_health_check=list(HealthCheck),  # their speed depends on the machine
        )
        return lambda check: limits(given(**strategies)(check))()

    return on
