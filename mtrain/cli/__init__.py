"""The command line. `main` is its entry point; the commands are assembled in `mtrain.cli.app`.

This file imports only light modules, so that Ctrl-C is handled before PyTorch and other large packages load.
"""

import atexit
import gc
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from mtrain.cli.console.interruption import end_interrupted, exit_at_once, interrupt_on_signals
from mtrain.processes.cores import openmp_settings
from mtrain.processes.stop_signals import handle_stop_signals


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command that `arguments` (by default, `sys.argv[1:]`) ask for, and exit with its code."""
    interrupt_on_signals()
    try:
        os.environ.update(openmp_settings(os.environ))  # before PyTorch is loaded
        from mtrain.cli.app import run

        code = run(sys.argv[1:] if arguments is None else arguments)
    except KeyboardInterrupt:
        code = end_interrupted()
    handle_stop_signals(exit_at_once)
    # At its end, the interpreter looks for cycles among all objects of large packages, which takes up to half
    # a second. It leaves out frozen objects.
    atexit.register(gc.freeze)
    sys.exit(code)
