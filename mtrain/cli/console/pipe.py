"""Stdin as a pipe from a program that may wait for the answer to each line."""

import os
import select
import stat
import sys
import time
from collections import deque
from collections.abc import Iterator

from mtrain.cli.console.terminal import decode_stdin
from mtrain.data.reading.lines import MAX_LINE

# Seconds without a new line after which the lines that were read are translated. Lines that arrive in quicker
# succession are translated together, for up to LONGEST_WAIT.
PAUSE = 0.05
LONGEST_WAIT = 1.0
_BUFFER = 2**16  # bytes


class PipedLines:
    """The lines of a pipe, and whether to translate the lines read so far before reading the next one."""

    def __init__(self, descriptor: int):
        self._descriptor = descriptor
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLIN)
        self._complete: deque[bytes] = deque()  # lines that have arrived
        self._begun = bytearray()  # the beginning of the next line, up to a little more than MAX_LINE
        self._ended = False

    def __iter__(self) -> Iterator[str]:
        """Yield the lines. Raises DataError at the first that is not valid text."""
        return decode_stdin(self._lines())

    def paused(self, waited: float) -> bool:
        """Whether all lines that have arrived were read, and no further one arrives within PAUSE seconds or
        the first of them has `waited` for LONGEST_WAIT."""
        if self._complete or self._ended:
            return False
        end = time.monotonic() + PAUSE
        while not self._complete and not self._ended and (left := end - time.monotonic()) > 0:
            if self._poll.poll(left * 1000):
                self._receive()
        return not self._ended and (not self._complete or waited >= LONGEST_WAIT)

    def _lines(self) -> Iterator[bytes]:
        while self._complete or not self._ended:
            if self._complete:
                yield self._complete.popleft()
            else:
                self._poll.poll()  # a pipe may be in non-blocking mode
                self._receive()

    def _receive(self) -> None:
        """Read what has arrived."""
        block = os.read(self._descriptor, _BUFFER)
        *ends, begun = block.split(b"\n")
        for end in ends:
            self._complete.append(b"".join([self._begun, end, b"\n"]))
            self._begun.clear()
        if len(self._begun) <= MAX_LINE:
            self._begun += begun
        if not block:
            self._ended = True
            if self._begun:
                self._complete.append(bytes(self._begun))


def answered_pipe() -> PipedLines | None:
    """Stdin if it is a pipe or socket, and stdout is not a file, which nobody waits for; otherwise None."""
    if sys.platform == "win32":  # where only sockets can be waited for
        return None
    try:
        source, target = (os.fstat(stream.fileno()).st_mode for stream in (sys.stdin, sys.stdout))
    except (OSError, ValueError, AttributeError):  # closed, or replaced by another object
        return None
    is_pipe = stat.S_ISFIFO(source) or stat.S_ISSOCK(source)
    return PipedLines(sys.stdin.fileno()) if is_pipe and not stat.S_ISREG(target) else None
