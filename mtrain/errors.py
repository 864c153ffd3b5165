"""The error family: each kind of failure has one exit code, so that scripts can tell them apart.

A message is one line: what is wrong; what was given; what to do.
"""


class MtrainError(Exception):
    """A failure that mtrain explains to the user in one line, without a traceback."""

    exit_code = 1

    def __init_subclass__(cls, exit_code: int) -> None:
        cls.exit_code = exit_code


class UsageError(MtrainError, exit_code=2):
    """The command line or the config is wrong."""


class DataError(MtrainError, exit_code=3):
    """A corpus or an input file is missing, malformed or empty."""


class ModelError(MtrainError, exit_code=4):
    """A checkpoint or model folder is missing, damaged, or does not fit."""


class DivergedError(MtrainError, exit_code=5):
    """Training produced NaN or infinity several steps in a row."""


class StorageError(MtrainError, exit_code=6):
    """Reading or writing failed for a reason outside mtrain: disk full, no permission."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of Python's or PyTorch's says that memory is used up."""
    kind = type(error).__name__
    # Words of PyTorch's for a CPU, of CUDA's, of cuBLAS's.
    said = ("can't allocate", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return kind == "MemoryError" or "OutOfMemory" in kind or any(words in str(error) for words in said)


class Interrupted(MtrainError, exit_code=130):
    """Stopped by a signal, after the state was saved. The exit code is the shell's 128 + signal."""

    def __init__(self, message: str, signal_number: int):
        super().__init__(message)
        self.exit_code = 128 + signal_number
