"""Progress of long work: a bar on a terminal, log messages elsewhere."""

import logging
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from tqdm import tqdm

from mtrain.duration import format_duration
from mtrain.invisible_characters import escape_control_characters

log = logging.getLogger(__name__)

LOG_EVERY = 30.0  # seconds, if there is no progress bar
DELAY = 1.0  # seconds of work before a bar is shown
_SHORTEST = 6  # columns of a bar
_INTERRUPT = 4  # columns beside it for ^C, which would start a new line
# Items from which the remaining time is estimated, or this share of them all if that is less. The first of a
# group of items arrives when the whole group is done.
KNOWN_ITEMS, KNOWN_SHARE = 10, 0.2
TICK = 0.5  # seconds between updates of a message that counts nothing

T = TypeVar("T")


def shows_bars() -> bool:
    """Whether there is a terminal that can show bars, and messages are wanted."""
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb" or not log.isEnabledFor(logging.INFO):
        return False
    with suppress(OSError):
        return os.get_terminal_size(sys.stderr.fileno()).lines > 0  # 0: unknown; tqdm would show nothing
    return True


class Bar(tqdm):  # type: ignore[type-arg]
    """A bar with what is done, the remaining time, and further details as far as they fit. It disappears when
    it is closed."""

    def __init__(self, done: str, unit: str, total: int | None, initial: int = 0, disable: bool = False):
        self.details: list[str] = []  # shown if they fit, the most important first
        super().__init__(
            desc=escape_control_characters(done),
            unit=unit,
            total=total,
            initial=initial,
            disable=disable or not shows_bars(),
            file=sys.stderr,
            leave=False,
            delay=DELAY,
            dynamic_ncols=True,
            smoothing=0,  # items arrive in groups, so only the mean speed says how long the rest takes
        )

    @property
    def format_dict(self) -> dict[str, Any]:
        """What tqdm shows."""
        values = dict(super().format_dict)
        done, seconds = values["n"], values["elapsed"]
        total = values["total"] if values["total"] and done <= values["total"] else None
        speed = (done - values["initial"]) / seconds if seconds else 0.0
        last = format_duration(seconds)
        if total and speed and _tells(done - values["initial"], total):
            last = f"{format_duration((total - done) / speed)} left"
        count = [f"{done:,}{f'/{total:,}' if total else ''} {self.unit}"] * bool(self.unit)
        columns = (values["ncols"] or 80) - _INTERRUPT
        name = f"{self.desc} " * bool(self.desc)
        width = columns - len(name) - (_SHORTEST + len("100%  ")) * bool(total)
        details = list(self.details)
        while details and len(", ".join([*count, *details, last])) > width:
            details.pop()
        bar = "{percentage:3.0f}% {bar} " if total else ""
        text = ", ".join([*count, *details, last]).replace("{", "{{").replace("}", "}}")
        return values | {"bar_format": f"{{desc}}{bar}{text}", "prefix": name, "ncols": columns}

    def display(self, msg: str | None = None, pos: int | None = None) -> Any:
        """Show the bar, unless it is too early: a log message would also show it."""
        shown_from = self.start_t + DELAY
        if msg is None and time.time() < shown_from:
            return False
        self.last_print_t = max(self.last_print_t, shown_from)  # how `close` knows that it was shown
        return super().display(msg, pos)


# tqdm's own lock is shared with forked processes, one of which may be killed while it holds the lock.
Bar.set_lock(threading.RLock())


class ProgressBar(Bar):
    """A bar with the number of items, the speed and the remaining time. Where there is no bar, a message is
    logged every so often."""

    def __init__(self, done: str, unit: str, total: int | None = None, hidden: bool = False):
        """`done` says what was done, as in "encoded 10 of 20 pairs", whose `unit` is "pairs". Without a
        `total`, the remaining time is unknown. A `hidden` one only logs."""
        super().__init__(done, unit, total, disable=hidden)
        self._done, self._unit, self._about = done, unit, ""  # tqdm keeps no unit if there is no bar
        self._start = self._logged = time.monotonic()
        self.count = self._before = self._tokens = 0

    def set_done_before(self, count: int) -> None:
        """Set how many items were done before the start. They are not part of the speed."""
        self._before = count
        if not self.disable:
            self.initial = self._before
            self.n = self._before + self.count

    def add(self, count: int = 1, tokens: int = 0, share: float | None = None) -> None:
        """Count items that are done now and, if the speed is also to be given in tokens, their tokens. If the
        total is unknown, it is estimated from the `share` of the work that is done now, in (0, 1]."""
        self.count += count
        self._tokens += tokens
        if share is not None:
            self.total, self._about = round((self._before + self.count) / share), "about "
        if not self.disable:
            self.details = self._speeds()
            self.update(count)
        elif time.monotonic() - self._logged >= LOG_EVERY:
            self._logged = time.monotonic()
            log.info("%s", self._message())

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    def speed(self) -> str:
        """The mean speed, with units."""
        return ", ".join(self._speeds())

    def _speeds(self) -> list[str]:
        counts = [(self.count, self._unit)] + [(self._tokens, "target tokens")] * bool(self._tokens)
        return [format_speed(count / max(self.seconds, 1e-9), unit) for count, unit in counts]

    def _message(self) -> str:
        done = self._before + self.count
        of_total = "" if self.total is None else f" of {self._about}{self.total:,}"
        message = f"{self._done} {done:,}{of_total} {self._unit}, {self.speed()}"
        if self.total is None or not _tells(self.count, self.total):
            return message
        left = max(0, self.total - done) * self.seconds / self.count
        return f"{message}, {format_duration(left)} left"


def _tells(count: int, total: float) -> bool:
    """Whether the time that `count` of `total` items have taken tells how long the rest takes."""
    return count >= min(KNOWN_ITEMS, KNOWN_SHARE * total) and count > 0


def format_speed(speed: float, unit: str) -> str:
    """A speed in items per second, or in seconds per item if it is slow. `unit` is a plural."""
    if 0 < speed < 1:
        return f"{1 / speed:,.1f} s per {unit.removesuffix('s')}"
    return f"{speed:,.{0 if speed >= 10 else 1}f} {unit}/s"


def with_progress(items: Iterable[T], done: str, unit: str, total: int | None = None) -> Iterator[T]:
    """Yield the items, with a bar that counts them."""
    with ProgressBar(done, unit, total) as progress:
        for item in items:
            yield item
            progress.add()


@contextmanager
def waiting_for(doing: str) -> Iterator[None]:
    """Show how long something has taken whose progress is unknown: on a terminal a line that disappears,
    elsewhere a message every so often."""
    bar, ended = Bar(f"{doing},", "", None), threading.Event()

    def tick() -> None:
        logged = start = time.monotonic()
        while not ended.wait(TICK):
            bar.update(0)
            if bar.disable and time.monotonic() - logged >= LOG_EVERY:
                logged = time.monotonic()
                log.info("%s: %s so far", doing, format_duration(logged - start))

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(timeout=2 * TICK)  # tqdm does not release its lock if an interrupt arrives while it draws
        bar.close()
