"""Lines of bounded size, and lines that do not count."""

from collections.abc import Iterable, Iterator
from typing import IO

MAX_LINE = 2**24  # bytes of a line without its end; of a longer one, no more are kept in memory
BLANK = b" \r\n"  # what blank lines consist of


def is_too_long(line: bytes) -> bool:
    """Whether a line without its end, or each line of a block of this size, may be longer than MAX_LINE."""
    return len(line) > MAX_LINE


def shortened(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Consecutive parts of lines, without what exceeds MAX_LINE + 1 bytes of a line. A part is shorter."""
    begun = 0  # bytes of the line that has begun
    for part in parts:
        end = part.find(b"\n")
        size = len(part) if end < 0 else end
        kept = min(size, max(0, MAX_LINE + 1 - begun))
        yield part if kept == size else part[:kept] + part[size:]
        begun = begun + size if end < 0 else len(part) - part.rfind(b"\n") - 1


def lines_of(stream: IO[bytes]) -> Iterator[bytes]:
    """The lines of an open file with their ends, without the rest of lines that are longer than MAX_LINE."""
    while line := stream.readline(MAX_LINE + 2):  # CR LF, if it has the maximum length
        yield line
        while len(line) == MAX_LINE + 2 and not line.endswith(b"\n"):
            line = stream.readline(MAX_LINE + 2)


def without_blank_end(lines: Iterable[str]) -> Iterator[str]:
    """The lines of a TSV file without blank ones at its end, which are no records."""
    blank: list[str] = []
    for line in lines:
        blank.append(line)
        if line.strip(" \r"):
            yield from blank
            blank = []
