"""The exceptions of mtrain. Each class has its exit code, so that scripts can tell failures apart.

A message is one line: what is wrong; what was given; what to do.
"""

import re
from pathlib import Path


class MtrainError(Exception):
    """A failure that is reported to the user in one line, without a traceback."""

    exit_code = 1

    def __init_subclass__(cls, exit_code: int) -> None:
        cls.exit_code = exit_code


class UsageError(MtrainError, exit_code=2):
    """The command line or the config is wrong."""


class DataError(MtrainError, exit_code=3):
    """A corpus or an input file is missing, malformed or empty."""


class ModelError(MtrainError, exit_code=4):
    """A checkpoint or model folder is missing, damaged or incompatible."""


class DivergedError(MtrainError, exit_code=5):
    """Training produced NaN or infinity several steps in a row."""


class StorageError(MtrainError, exit_code=6):
    """Reading or writing failed for an external reason: disk full, no permission."""


def cannot_write(path: Path, error: Exception) -> StorageError:
    """The error to raise for a file or folder that cannot be written. `error` is the cause, raised by the
    system or a library."""
    return StorageError(f"{path}: cannot write: {getattr(error, 'strerror', None) or error}")


class DistributedError(MtrainError, exit_code=7):
    """The processes of a command ("ranks") cannot work together: one is lost, or they differ."""


class Interrupted(MtrainError, exit_code=130):
    """A signal stopped the command after it saved its state. The exit code is 128 + the signal number."""

    def __init__(self, message: str, signal_number: int):
        super().__init__(message)
        self.exit_code = 128 + signal_number

    def __reduce__(self) -> tuple[type["Interrupted"], tuple[str, int]]:
        return type(self), (str(self), self.exit_code - 128)


# Messages of PyTorch on a CPU, the C++ library, the operating system, CUDA, cuBLAS, and oneDNN. They exclude
# oneDNN's "could not create a primitive descriptor", which means that an operation is unsupported.
_OUT_OF_MEMORY = re.compile(
    "can't allocate|bad_alloc|Cannot allocate memory|out of memory|CUBLAS_STATUS_ALLOC_FAILED"
    "|could not (create|execute) a primitive(?! descriptor)|could not create a memory"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception of Python, PyTorch or another library means that memory is exhausted."""
    if isinstance(error, MtrainError):
        return False
    by_class = isinstance(error, MemoryError) or "OutOfMemory" in type(error).__name__
    return by_class or _OUT_OF_MEMORY.search(str(error)) is not None


def is_recoverable(error: Exception) -> bool:
    """Whether a command may continue after an error of a part of its work: one of mtrain's, unless another
    rank is lost, or exhausted memory."""
    if isinstance(error, MtrainError):
        return not isinstance(error, DistributedError)
    return isinstance(error, (RuntimeError, MemoryError)) and is_out_of_memory(error)
