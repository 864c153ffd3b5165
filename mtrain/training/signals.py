"""Handling of the signals that stop a command during training."""

import signal
from types import FrameType
from typing import Self

from mtrain.stop_signals import REPEATED, handle_stop_signals


class StopSignal:
    """Records a signal that stops the command, so that the loop stops after the current step. A second signal
    has its usual effect, except for signals that are sent repeatedly."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None

    def __enter__(self) -> Self:
        # Shells start background processes with SIGINT ignored.
        self.previous = handle_stop_signals(self._record, even_ignored=(signal.SIGINT, signal.SIGTERM))
        return self

    def _record(self, number: int, _: FrameType | None) -> None:
        if self.received is None:
            self.received = signal.Signals(number)
            self._restore(*REPEATED)

    def _restore(self, *kept: object) -> None:
        for number, handler in self.previous.items():
            if number not in kept:
                signal.signal(number, handler)

    __exit__ = _restore
