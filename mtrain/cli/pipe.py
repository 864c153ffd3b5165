"""Stdin as a pipe from a program that may wait for the answer to each line."""

import io
import os
import stat
import sys
from collections.abc import Iterator
from select import select
from typing import Any

from mtrain.cli.terminal import decode_stdin

# Seconds without a new line after which those that have arrived are translated. A program that writes lines
# faster than they are translated never pauses for so long, and its lines form large windows.
PAUSE = 0.05
_BUFFER = 2**16  # bytes


class _CountingReader(io.RawIOBase):
    """An unbuffered stream that counts the bytes that were read from it."""

    def __init__(self, file: io.FileIO):
        self._file, self.count = file, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._file.readinto(buffer) or 0
        self.count += count
        return count


class PipedLines:
    """The lines of a pipe, and whether its writer pauses."""

    def __init__(self, descriptor: int):
        self._descriptor = descriptor
        self._raw = _CountingReader(io.FileIO(descriptor, closefd=False))
        self._stream = io.BufferedReader(self._raw, _BUFFER)
        self._taken = 0  # bytes of the lines that were yielded

    def _lines(self) -> Iterator[bytes]:
        for line in self._stream:
            self._taken += len(line)
            yield line

    def __iter__(self) -> Iterator[str]:
        """Yield the lines. Raises DataError at the first that is not valid text."""
        return decode_stdin(self._lines())

    def paused(self) -> bool:
        """Whether no further line arrives for a moment. The rest of a line that has begun is waited for."""
        return self._raw.count == self._taken and not select([self._descriptor], [], [], PAUSE)[0]


def answered_pipe() -> PipedLines | None:
    """Stdin, if it is a pipe or socket whose writer may read what this program answers: unless stdout is a
    file, which nobody waits for."""
    if sys.platform == "win32":  # which cannot wait for pipes
        return None
    try:
        source, target = (os.fstat(stream.fileno()).st_mode for stream in (sys.stdin, sys.stdout))
    except (OSError, ValueError, AttributeError):  # closed, or replaced by another object
        return None
    is_pipe = stat.S_ISFIFO(source) or stat.S_ISSOCK(source)
    return PipedLines(sys.stdin.fileno()) if is_pipe and not stat.S_ISREG(target) else None
