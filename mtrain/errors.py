"""The error family: each kind of failure has one exit code, so that scripts can tell them apart.

A message is one line: what is wrong; what was given; what to do.
"""


class MtrainError(Exception):
    """A failure that mtrain explains to the user in one line, without a traceback."""

    exit_code = 1


class UsageError(MtrainError):
    """The command line or the config is wrong."""

    exit_code = 2


class DataError(MtrainError):
    """A corpus or an input file is missing, malformed or empty."""

    exit_code = 3


class ModelError(MtrainError):
    """A checkpoint or model folder is missing, damaged, or does not fit."""

    exit_code = 4


class DivergedError(MtrainError):
    """Training produced NaN or infinity several steps in a row."""

    exit_code = 5


class StorageError(MtrainError):
    """Reading or writing failed for a reason outside mtrain: disk full, no permission."""

    exit_code = 6


class Interrupted(MtrainError):
    """Stopped by a signal, after the state was saved. The exit code is the shell's 128 + signal."""

    def __init__(self, message: str, signal_number: int):
        super().__init__(message)
        self.exit_code = 128 + signal_number
