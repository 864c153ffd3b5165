"""Handling of the signals that stop a command during training."""

import signal
from types import FrameType
from typing import Self

from mtrain.processes.stop_signals import REPEATED, Handler, handle_stop_signals


class StopSignal:
    """Records a signal that stops the command, so that the loop stops after the current step. A second signal
    is handled by `second` or, by default, as before, except for signals that are sent repeatedly."""

    def __init__(self, second: Handler | None = None) -> None:
        self.received: signal.Signals | None = None
        self.second = second

    def __enter__(self) -> Self:
        # Shells start background processes with SIGINT ignored.
        self.previous = handle_stop_signals(self._record, even_ignored=(signal.SIGINT, signal.SIGTERM))
        return self

    def _record(self, number: int, _: FrameType | None) -> None:
        if self.received is None:
            self.received = signal.Signals(number)
            for other, handler in self.previous.items():
                if other not in REPEATED:
                    signal.signal(other, self.second or handler)

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)
