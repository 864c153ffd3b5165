"""Limits the size of lines."""

from collections.abc import Iterable, Iterator
from typing import IO

MAX_LINE = 2**24  # bytes of a line without its end; the rest of a longer line is not kept in memory


def shortened(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Cut each line in consecutive parts of a file, each shorter than MAX_LINE, to MAX_LINE + 1 bytes."""
    begun = 0  # bytes of the line that has begun
    for part in parts:
        end = part.find(b"\n")
        size = len(part) if end < 0 else end
        kept = min(size, max(0, MAX_LINE + 1 - begun))
        yield part if kept == size else part[:kept] + part[size:]
        begun = begun + size if end < 0 else len(part) - part.rfind(b"\n") - 1


def lines_of(stream: IO[bytes]) -> Iterator[bytes]:
    """The lines of an open file with their ends; longer lines are cut after MAX_LINE + 2 bytes."""
    while line := stream.readline(MAX_LINE + 2):  # + 2 for CR LF
        yield line
        while len(line) == MAX_LINE + 2 and not line.endswith(b"\n"):
            line = stream.readline(MAX_LINE + 2)
