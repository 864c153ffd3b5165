"""The signals that stop a command, sent by users, closing terminals and batch systems."""

import signal
from collections.abc import Callable, Container
from types import FrameType
from typing import Any

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
