"""Work in the background is spread over training, unless training would wait for it."""

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from types import SimpleNamespace

import pytest

from mtrain.data.rewriting.rewrite import Throttle

BLOCKS, STEPS = 20, 100


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


CLOCK = Clock()


@pytest.fixture(autouse=True)
def replaced_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CLOCK, "now", 0.0)
    monkeypatch.setattr("mtrain.data.rewriting.rewrite.time", SimpleNamespace(monotonic=CLOCK))


def take(throttle: Throttle, clock: Clock, steps: int, seconds: float = 1.0) -> None:
    for _ in range(steps):
        clock.now += seconds
        throttle.step()


def throttled(block_seconds: float = 0.5) -> tuple[Throttle, Clock]:
    """Two steps of a second are taken, and a block is done."""
    clock = CLOCK
    throttle = Throttle(STEPS)
    take(throttle, clock, 2)
    now = clock.now
    with throttle.measured():
        clock.now += block_seconds
    clock.now = now
    return throttle, clock


def startable(throttle: Throttle) -> int:
    return next((block for block in range(BLOCKS) if throttle.must_wait(block, BLOCKS, 1)), BLOCKS)


def test_work_is_done_twice_as_fast_as_training():
    throttle, clock = throttled()
    assert startable(throttle) == 1
    take(throttle, clock, 23)
    assert startable(throttle) == 11
    take(throttle, clock, 25)
    assert startable(throttle) == BLOCKS


@pytest.mark.parametrize(("seconds", "waits"), [(1.0, True), (2.0, False)])
def test_work_waits_only_if_there_is_plenty_of_time(seconds: float, waits: bool):
    """98 steps of a second remain, and 15 blocks."""
    throttle, _ = throttled(seconds * 1.5)
    assert throttle.must_wait(5, BLOCKS, 1) == waits
    assert throttle.must_wait(5, BLOCKS, 2)


def test_work_that_training_waits_for_does_not_wait():
    throttle, _ = throttled()
    throttle.hurry()
    assert startable(throttle) == startable(Throttle()) == BLOCKS


def test_work_continues_while_training_pauses():
    throttle, clock = throttled()
    clock.now += 20
    assert startable(throttle) == BLOCKS
    throttle.step()
    assert startable(throttle) < BLOCKS


def test_nothing_waits_until_the_speeds_are_known():
    clock = CLOCK
    throttle = Throttle(STEPS)
    assert startable(throttle) == BLOCKS
    take(throttle, clock, 2)
    assert startable(throttle) == BLOCKS
    with throttle.measured():
        pass
    assert startable(throttle) == 1


def test_pauses_do_not_count_as_training():
    """98 or 97 steps of a second are left: three times as long as 16 blocks of two seconds."""
    throttle, clock = throttled(2.0)
    assert startable(throttle) == 4
    clock.now += 500
    throttle.step()
    assert startable(throttle) == 4


def test_long_steps_are_not_pauses():
    clock = CLOCK
    throttle = Throttle(STEPS)
    take(throttle, clock, 5, seconds=8.0)
    with throttle.measured():
        clock.now += 1
    clock.now += 19  # less than three steps
    assert startable(throttle) < BLOCKS
    clock.now += 5
    assert startable(throttle) == BLOCKS


@pytest.mark.parametrize("end", [Throttle.hurry, Throttle.cancel])
def test_a_block_that_waits_starts_or_is_cancelled_at_once(end: Callable[[Throttle], None]):
    throttle, _ = throttled()
    started: list[int] = []
    waits = threading.Event()
    real = throttle.must_wait

    def must_wait(*arguments: int) -> bool:
        result = real(*arguments)
        if result:
            waits.set()
        return result

    throttle.must_wait = must_wait

    def work() -> None:
        try:
            started.extend(throttle.spread(BLOCKS, 1))
        except CancelledError:
            started.append(-1)

    thread = threading.Thread(target=work)
    thread.start()
    assert waits.wait(30) and thread.is_alive()
    end(throttle)
    thread.join(5)
    assert not thread.is_alive()
    assert started == ([*range(BLOCKS)] if end is Throttle.hurry else [0, -1])
