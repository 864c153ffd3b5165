"""Temporary files, whose errors name their folder."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import SpooledTemporaryFile, gettempdir
from typing import Any

import numpy as np
import numpy.typing as npt

from mtrain.errors import StorageError

IN_MEMORY = 2**24  # bytes; more are stored on disk


class TemporaryStream:
    """Bytes that are first written, then read any number of times. They take up to 16 MiB of memory; more
    bytes go to a file without a name, whose space is freed when this object is garbage-collected.

    Its methods raise StorageError if the file cannot be written or read.
    """

    def __init__(self, folder: Path | None = None):
        """The file is created in `folder`; by default, in the system's folder for temporary files."""
        self._folder = folder
        with self._errors():
            self._file = SpooledTemporaryFile(IN_MEMORY, dir=None if folder is None else str(folder))  # noqa: SIM115

    def write(self, contents: bytes) -> None:
        """Append some bytes."""
        with self._errors():
            self._file.write(contents)

    def lines(self) -> Iterator[bytes]:
        """The lines written so far, with their ends."""
        with self._errors():
            self._file.seek(0)
            # `yield from` the file would close it if the caller stops early.
            yield from iter(self._file.readline, b"")

    def as_array(self, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """What was written so far as a writable array, mapped into memory from a file. The stream is closed:
        it must not be used afterwards."""
        with self._errors(), self._file as file:
            file.rollover()
            file.flush()
            is_empty = not file.seek(0, 2)  # an empty file cannot be mapped
            return np.empty(0, dtype) if is_empty else np.memmap(file, dtype, "r+")

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            folder = gettempdir() if self._folder is None else self._folder
            reason = error.strerror or error
            raise StorageError(f"{folder}: cannot write temporary files: {reason}") from error
