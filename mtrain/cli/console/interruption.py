"""How stop signals end a command. Imports little, because `mtrain.cli` needs it before anything else."""

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from threading import Timer
from types import FrameType
from typing import Any, NoReturn

from mtrain.cli.console.message_start import clear_bars, is_one_of_several, rank_prefix
from mtrain.processes.stop_signals import REPEATED, handle_stop_signals

_received: list[int] = []  # stop signals


def interrupt_on_signals() -> None:
    """Let a stop signal raise KeyboardInterrupt."""
    _received.clear()
    handle_stop_signals(_interrupt)
    sys.unraisablehook = partial(_send_again, sys.unraisablehook)


def end_interrupted() -> int:
    """Say which signal has stopped the command, unless that was said before. Returns the exit code."""
    if not is_one_of_several():
        with suppress(OSError):
            sys.stderr.write(_message())
    return _exit_code()


def exit_at_once(number: int, _: FrameType | None) -> NoReturn:
    """A handler that exits without any clean-up."""
    _received.append(number)
    with suppress(OSError):
        os.write(2, _message().encode())
    os._exit(_exit_code())


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, except during an import: there the exception can be lost or replaced by
    another one (in extension modules, in callbacks of the import system), so the process exits at once."""
    if _received and number in REPEATED:
        return
    _received.append(number)
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            exit_at_once(number, frame)
        frame = frame.f_back
    if is_one_of_several():  # torchrun kills it if the clean-up takes long
        with suppress(OSError):
            os.write(2, _message().encode())
    raise KeyboardInterrupt(_message().strip())


def _send_again(before: Callable[[Any], object], ignored: "sys.UnraisableHookArgs") -> None:
    """Send a stop signal again, soon after Python has ignored its KeyboardInterrupt, because it arrived in a
    finalizer or in a callback of a weak reference. Other exceptions are for the hook `before` this one."""
    if _received and issubclass(ignored.exc_type, KeyboardInterrupt):
        Timer(0.2, os.kill, (os.getpid(), _received.pop())).start()
    else:
        before(ignored)


def _message() -> str:
    return f"{clear_bars()}{rank_prefix()}stopped by {signal.Signals(_exit_code() - 128).name}\n"


def _exit_code() -> int:
    """128 + the last stop signal, or + SIGINT if a library raises KeyboardInterrupt by itself."""
    return 128 + (_received[-1] if _received else signal.SIGINT)
