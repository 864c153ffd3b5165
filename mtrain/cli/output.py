"""Where answers to lines go: stdout, a device, or a file that can be resumed."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from mtrain.cli import terminal
from mtrain.errors import UsageError
from mtrain.storage.resumable import PartialFile

log = logging.getLogger(__name__)

FLUSH_EVERY = 0.2  # seconds: who reads a pipe sees answers soon


def answer_lines(
    lines: Iterable[str],
    answers: Callable[[Iterable[str], int], Iterator[str]],
    path: Path | None,
    job: dict[str, Any],
    go_on: bool,
) -> None:
    """Write `answers(lines, 0)`, an answer to each line, to stdout, a device, or a file that an interrupted
    job like this one may have begun; then the answers to the rest of the lines, and the number of the first.

    Raises UsageError if there is nothing to go on with, but a file that does not answer each line.
    """
    if path is not None and terminal.is_stdout(path):
        path = None
    if path is None or (path.exists() and not path.is_file()):
        with terminal.output(path) as out:
            flushed = time.monotonic()
            for answer in answers(lines, 0):
                out.write(answer)
                if time.monotonic() - flushed > FLUSH_EVERY:
                    out.flush()
                    flushed = time.monotonic()
        return
    file = PartialFile(path.resolve(), job, go_on)
    if go_on and file.noted is None and path.exists():
        with path.open("rb") as written:
            answered = sum(1 for _ in written)
        if answered != job["lines_each"] * sum(1 for _ in lines):
            raise UsageError(f"{path}: nothing to go on with; leave out --continue to replace this file")
        log.warning("%s is complete; that it answers these lines by this model was not checked", path)
        return
    with file:
        for answer in answers(file.remaining(lines), file.start):
            file.answer(answer)
