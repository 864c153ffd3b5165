"""The command line. `main` is its entry point; the commands are assembled in `mtrain.cli.app`.

This file imports only light modules, so that Ctrl-C is handled before PyTorch and other large packages load.
"""

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import NoReturn

from mtrain.cli.console.message_start import clear_bars, is_one_of_several, rank_prefix
from mtrain.stop_signals import REPEATED, handle_stop_signals

_received: list[int] = []  # stop signals


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command that `arguments` (by default, `sys.argv[1:]`) ask for, and exit with its code."""
    _received.clear()
    handle_stop_signals(_interrupt)
    try:
        from mtrain.cli.app import run

        code = run(sys.argv[1:] if arguments is None else arguments)
    except KeyboardInterrupt:
        if not is_one_of_several():
            with suppress(OSError):
                sys.stderr.write(_message())
        code = _exit_code()
    handle_stop_signals(_exit_at_once)
    sys.exit(code)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, except during an import: there the exception can be lost or replaced by
    another one (in extension modules, in callbacks of the import system), so the process exits at once."""
    if _received and number in REPEATED:
        return
    _received.append(number)
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            _exit_at_once(number, frame)
        frame = frame.f_back
    if is_one_of_several():  # torchrun kills it if the clean-up takes long
        with suppress(OSError):
            os.write(2, _message().encode())
    raise KeyboardInterrupt(_message().strip())


def _exit_at_once(number: int, _: FrameType | None) -> NoReturn:
    """Exit without any clean-up."""
    _received.append(number)
    with suppress(OSError):
        os.write(2, _message().encode())
    os._exit(_exit_code())


def _message() -> str:
    return f"{clear_bars()}{rank_prefix()}stopped by {signal.Signals(_exit_code() - 128).name}\n"


def _exit_code() -> int:
    """128 + the last stop signal, or + SIGINT if a library raises KeyboardInterrupt by itself."""
    return 128 + (_received[-1] if _received else signal.SIGINT)
