"""Progress of work on many items, such as lines: a bar on a terminal, log messages elsewhere."""

import logging
import time
from typing import Self

from tqdm import tqdm

log = logging.getLogger(__name__)

LOG_EVERY = 30.0  # seconds, if there is no progress bar


class ProgressBar:
    """A progress bar with the number of items, the speed and the remaining time. Where there is no bar, a
    message is logged every so often."""

    def __init__(self, done: str, unit: str, total: int | None = None, quiet: bool = False):
        """`done` says what was done, as in "encoded 10 of 20 pairs", whose `unit` is "pairs". Without a
        `total`, the remaining time is unknown. `quiet` disables the bar."""
        self._done, self._unit, self._total, self._about = done, unit, total, ""
        disable = quiet or None  # None: disabled unless stderr is a terminal
        # smoothing=0: items arrive in groups, so only the mean speed says how long the rest takes.
        self._bar = tqdm(
            total=total, unit=f" {unit}", desc=done, unit_scale=True, smoothing=0, disable=disable
        )
        self._start = self._logged = time.monotonic()
        self.count, self._before, self._tokens = 0, 0, 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def set_done_before(self, count: int) -> None:
        """Set how many items were done before the start. They are not part of the speed."""
        self._before = count
        if not self._bar.disable:
            self._bar.initial = self._before
            self._bar.n = self._before + self.count

    def add(self, count: int = 1, tokens: int = 0, share: float | None = None) -> None:
        """Count items that are done now and, if the speed is also to be given in tokens, their tokens. If the
        total is unknown, it is estimated from the `share` of the work that is done now, in (0, 1]."""
        self.count += count
        self._tokens += tokens
        if share is not None:
            self._total, self._about = round((self._before + self.count) / share), "about "
            self._bar.total = self._total
        if not self._bar.disable:
            if self._bar.update(count) and tokens:
                self._bar.set_postfix_str(self._speed("target tokens", self._tokens), refresh=False)
        elif time.monotonic() - self._logged >= LOG_EVERY:
            self._logged = time.monotonic()
            log.info("%s", self._message())

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    def speed(self) -> str:
        """The mean speed, with units."""
        speeds = [self._speed(self._unit, self.count)]
        return ", ".join(speeds + [self._speed("target tokens", self._tokens)] * bool(self._tokens))

    def _speed(self, unit: str, count: int) -> str:
        return f"{count / max(self.seconds, 1e-9):,.0f} {unit}/s"

    def _message(self) -> str:
        done = self._before + self.count
        of_total = "" if self._total is None else f" of {self._about}{self._total:,}"
        message = f"{self._done} {done:,}{of_total} {self._unit}, {self.speed()}"
        if self._total is None or not self.count:
            return message
        left = max(0, self._total - done) * self.seconds / max(self.count, 1) / 60
        return f"{message}, {left:,.1f} minutes left"
