"""Stopping when asked to, but between steps."""

import signal
from types import FrameType
from typing import Self


class StopSignal:
    """Notes SIGINT or SIGTERM, for the loop to act on when its step is done; a second one acts at once."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None

    def __enter__(self) -> Self:
        self.before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        for number in self.before:
            signal.signal(number, self._note)
        return self

    def _note(self, number: int, _: FrameType | None) -> None:
        self.received = signal.Signals(number)
        self._restore()

    def _restore(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    __exit__ = _restore
