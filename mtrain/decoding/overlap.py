"""Overlapping the work of the host with the work of a GPU: while the GPU decodes a window of lines, the host
reads and splits the next windows, and joins and writes the previous one.

Another thread decodes. The caller's thread does the rest, so that iterables of lines need not be thread-safe,
and an interrupt arrives where it waits.
"""

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import NamedTuple

import torch

from mtrain.decoding.decode import DecodingTask
from mtrain.decoding.join import count_lines
from mtrain.decoding.split import Part
from mtrain.decoding.translation import Translation
from mtrain.decoding.workers import Decoded
from mtrain.device import make_current

AHEAD = 2  # windows that are read ahead of the one that is decoded

Found = list[list[Translation]]  # the translations of each part
Results = Generator[tuple["Window", DecodingTask, Found], None, None]


class Window(NamedTuple):
    """Texts that are translated together, in batches across their lines."""

    texts: list[str]
    prefixes: list[str]  # of their translations, if any
    first: int  # index of the first line in the whole input
    lines: int  # texts may have several


class Pauses:
    """Whether the source of the lines waits, as the function `paused` of `Translator.stream` says."""

    def __init__(self, paused: Callable[[float], bool]):
        self._paused = paused
        self._last = False

    def __call__(self, waited: float = 0.0) -> bool:
        self._last = self._paused(waited)
        return self._last

    def are_waiting(self) -> bool:
        """Whether the source waits after a window, which may have ended because it does."""
        return self._last or self()


def overlaps(device: torch.device, lines: Iterable[str], most: int) -> bool:
    """Whether to overlap windows of at most `most` lines: on a CUDA device, if there may be several."""
    return device.type == "cuda" and not (isinstance(lines, list) and len(lines) <= most)


def numbered(windows: Iterable[tuple[list[str], list[str]]], first: int) -> Iterator[Window]:
    """The windows of `split.windows`, the first of which begins with the line `first` of the whole input."""
    for texts, prefixes in windows:
        lines = sum(map(count_lines, texts))
        yield Window(texts, prefixes, first, lines)
        first += lines


def overlapped(
    windows: Iterator[Window],
    split: Callable[[Window], DecodingTask],
    decode: Callable[[DecodingTask, Decoded], Found],
    decoded: Decoded,
    pauses: Pauses,
    device: torch.device,
) -> Results:
    """Yield each window with its task and the translations of its parts, in order. `decode` (see
    `Workers.decode`) is called by a thread of its own, `split` and `decoded` by the caller's thread.

    If the source of the lines waits after a window, no further window is read before all results are yielded:
    it may wait for them. An error of `windows` or `split` is raised after the results before it; if it is an
    interrupt, only finished ones are yielded. When the iterator is closed, no further batch is decoded, and
    the thread has ended.
    """
    reports: SimpleQueue[tuple[Part, list[Translation]] | None] = SimpleQueue()  # None: end of a window
    stopped = threading.Event()
    pending: deque[tuple[Window, DecodingTask, Future[Found]]] = deque()

    def report(part: Part, found: list[Translation]) -> None:
        if stopped.is_set():
            raise CancelledError
        reports.put((part, found))

    def oldest() -> tuple[Window, DecodingTask, Found]:
        window, task, decoding = pending.popleft()
        while (reported := reports.get()) is not None:
            decoded(*reported)
        return window, task, decoding.result()

    decoder = ThreadPoolExecutor(1, "decoding", make_current, (device,))
    try:
        while True:
            try:
                window = next(windows)
                task = split(window)
            except StopIteration:
                break
            except BaseException as error:
                while pending and (isinstance(error, Exception) or pending[0][2].done()):
                    yield oldest()
                raise
            decoding = decoder.submit(decode, task, report)
            decoding.add_done_callback(lambda _: reports.put(None))  # even if its thread could not start
            pending.append((window, task, decoding))
            most = 0 if pauses.are_waiting() else AHEAD
            while len(pending) > most:
                yield oldest()
        while pending:
            yield oldest()
    finally:
        stopped.set()
        decoder.shutdown(cancel_futures=True)
