"""Handling of SIGINT and SIGTERM during training."""

import signal
from types import FrameType
from typing import Self


class StopSignal:
    """Records SIGINT or SIGTERM, so that the loop stops after the current step. A second signal has its usual
    effect."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None

    def __enter__(self) -> Self:
        self.previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        for number in self.previous:
            signal.signal(number, self._record)
        return self

    def _record(self, number: int, _: FrameType | None) -> None:
        self.received = signal.Signals(number)
        self._restore()

    def _restore(self, *_: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    __exit__ = _restore
