"""Work in the background is spread over training, unless training would wait for it."""

import threading
from collections.abc import Callable

import pytest

from mtrain.data.rewriting.throttle import CancelledError, Pace

BLOCKS, STEPS = 20, 100


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def take(pace: Pace, clock: Clock, steps: int, seconds: float = 1.0) -> None:
    for _ in range(steps):
        clock.now += seconds
        pace.step()


def paced(block_seconds: float = 0.5) -> tuple[Pace, Clock]:
    """Two steps of a second are taken, and a block is done."""
    clock = Clock()
    pace = Pace(STEPS, clock=clock)
    take(pace, clock, 2)
    now = clock.now
    with pace.measured():
        clock.now += block_seconds
    clock.now = now
    return pace, clock


def startable(pace: Pace) -> int:
    return next((block for block in range(BLOCKS) if pace.must_wait(block, BLOCKS, 1)), BLOCKS)


def test_work_is_done_twice_as_fast_as_training():
    pace, clock = paced()
    assert startable(pace) == 1
    take(pace, clock, 23)
    assert startable(pace) == 11
    take(pace, clock, 25)
    assert startable(pace) == BLOCKS


@pytest.mark.parametrize(("seconds", "waits"), [(1.0, True), (2.0, False)])
def test_work_waits_only_if_there_is_plenty_of_time(seconds: float, waits: bool):
    """98 steps of a second remain, and 15 blocks."""
    pace, _ = paced(seconds * 1.5)
    assert pace.must_wait(5, BLOCKS, 1) == waits
    assert pace.must_wait(5, BLOCKS, 2)


def test_work_that_training_waits_for_does_not_wait():
    pace, _ = paced()
    pace.hurry()
    assert startable(pace) == startable(Pace()) == BLOCKS


def test_work_continues_while_training_pauses():
    pace, clock = paced()
    clock.now += 20
    assert startable(pace) == BLOCKS
    pace.step()
    assert startable(pace) < BLOCKS


def test_nothing_waits_until_the_speeds_are_known():
    clock = Clock()
    pace = Pace(STEPS, clock=clock)
    assert startable(pace) == BLOCKS
    take(pace, clock, 2)
    assert startable(pace) == BLOCKS
    with pace.measured():
        pass
    assert startable(pace) == 1


def test_pauses_do_not_count_as_training():
    """98 or 97 steps of a second are left: three times as long as 16 blocks of two seconds."""
    pace, clock = paced(2.0)
    assert startable(pace) == 4
    clock.now += 500
    pace.step()
    assert startable(pace) == 4


def test_long_steps_are_not_pauses():
    clock = Clock()
    pace = Pace(STEPS, clock=clock)
    take(pace, clock, 5, seconds=8.0)
    with pace.measured():
        clock.now += 1
    clock.now += 19  # less than three steps
    assert startable(pace) < BLOCKS
    clock.now += 5
    assert startable(pace) == BLOCKS


@pytest.mark.parametrize("end", [Pace.hurry, Pace.cancel])
def test_a_block_that_waits_starts_or_is_cancelled_at_once(end: Callable[[Pace], None]):
    pace, _ = paced()
    started: list[int] = []
    waits = threading.Event()
    real = pace.must_wait

    def must_wait(*arguments: int) -> bool:
        result = real(*arguments)
        if result:
            waits.set()
        return result

    pace.must_wait = must_wait  # type: ignore[method-assign]

    def work() -> None:
        try:
            for block in pace.spread(BLOCKS, 1):
                started.append(block)
        except CancelledError:
            started.append(-1)

    thread = threading.Thread(target=work)
    thread.start()
    assert waits.wait(30) and thread.is_alive()
    end(pace)
    thread.join(5)
    assert not thread.is_alive()
    assert started == ([*range(BLOCKS)] if end is Pace.hurry else [0, -1])
