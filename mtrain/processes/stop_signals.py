"""The signals that stop a command, sent by users, closing terminals and batch systems."""

import signal
from collections.abc import Callable, Container
from types import FrameType
from typing import Any, Self

Handler = Callable[[int, FrameType | None], Any]

# SIGHUP: the terminal or connection was closed. SIGUSR1, SIGUSR2, SIGXCPU: a batch job runs out of time.
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU")
STOP_SIGNALS = tuple(each for each in signal.Signals if each.name in _NAMES)  # Windows lacks most of them
# Signals that arrive repeatedly: shells and the kernel both send SIGHUP, and SIGXCPU is sent every second.
REPEATED = tuple(each for each in STOP_SIGNALS if each.name in ("SIGHUP", "SIGXCPU"))


def handle_stop_signals(handler: Handler, even_ignored: Container[int] = ()) -> dict[signal.Signals, Any]:
    """Let `handler` handle the stop signals. Returns the handlers that it replaces, by signal.

    A signal that is ignored, as SIGHUP is under `nohup`, stays ignored unless it is in `even_ignored`.
    """
    replaced = {}
    for number in STOP_SIGNALS:
        before = signal.getsignal(number)  # None for a handler that is not written in Python
        if before is not None and (before is not signal.SIG_IGN or number in even_ignored):
            replaced[number] = signal.signal(number, handler)
    return replaced


class StopSignal:
    """Records a signal that stops the command, so that training stops after the current step. A second signal
    is handled by `second` or, by default, as before, unless it is `repeated`: such signals are ignored."""

    def __init__(self, second: Handler | None = None, repeated: Container[int] = REPEATED) -> None:
        self.received: signal.Signals | None = None
        self.second, self.repeated = second, repeated

    def __enter__(self) -> Self:
        # Shells start background processes with SIGINT ignored.
        self.previous = handle_stop_signals(self._record, even_ignored=(signal.SIGINT, signal.SIGTERM))
        return self

    def _record(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = signal.Signals(number)
            for other, handler in self.previous.items():
                if other not in self.repeated:
                    signal.signal(other, self.second or handler)
        elif self.second and number not in self.repeated:  # its handler was about to be replaced
            self.second(number, frame)

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)
