"""Windows that overlap, as on a GPU: order, bounds, errors, and the end of the thread."""

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import count
from typing import Any

import pytest
import torch

from mtrain import Translator
from mtrain.config.sections.decoding import DecodingConfig
from mtrain.decoding.decode import DecodingTask
from mtrain.decoding.overlap import Pauses, Results, Window, numbered, overlapped
from mtrain.decoding.split import Part
from mtrain.decoding.translation import Translation
from mtrain.decoding.workers import Decoded
from mtrain.errors import DataError
from tests.support.translation import words_of

CPU = torch.device("cpu")


def split(window: Window) -> DecodingTask:
    parts = [Part(i, [3], [], (window.first + i, 0)) for i in range(window.lines)]
    return DecodingTask(DecodingConfig(), parts, "de")


def decode(task: DecodingTask, decoded: Decoded) -> list[list[Translation]]:
    found = [[Translation(str(part.key[0]), 0.0, 0.0, 1, True)] for part in task.parts]
    for part, translations in zip(task.parts, found, strict=True):
        decoded(part, translations)
    return found


def of_three(lines: Iterable[str]) -> Iterator[tuple[list[str], list[str]]]:
    """Windows of three lines."""
    texts = []
    for line in lines:
        texts.append(line)
        if len(texts) == 3:
            yield texts, []
            texts = []


def overlapping(
    lines: Iterable[str],
    decode: Callable[[DecodingTask, Decoded], list[list[Translation]]] = decode,
    decoded: Decoded = lambda _, found: None,
    paused: Callable[[float], bool] = lambda waited: False,
    split: Callable[[Window], DecodingTask] = split,
) -> Results:
    windows = numbered(of_three(lines), 0)
    return overlapped(windows, split, decode, decoded, Pauses(paused), CPU)


def texts_of(results: Iterable[tuple[Window, DecodingTask, list[list[Translation]]]]) -> Iterator[int]:
    for _, _, found in results:
        yield from (int(best.text) for [best] in found)


def running() -> set[str]:
    """The names of the threads that decode."""
    names = {thread.name for thread in threading.enumerate()}
    return {name for name in names if name.startswith("decoding")}


def test_results_come_in_order_and_reading_is_at_most_two_windows_ahead() -> None:
    read = most = 0
    seen: list[int] = []
    threads = set()

    def lines() -> Iterator[str]:
        nonlocal read
        for _ in range(60):
            read += 1
            yield "a line"

    def decode_slowly(task: DecodingTask, decoded: Decoded) -> list[list[Translation]]:
        nonlocal most
        first = task.parts[0].key[0]
        most = max(most, read - first)
        return decode(task, decoded)

    def decoded(part: Part, _: list[Translation]) -> None:
        seen.append(part.key[0])
        threads.add(threading.current_thread())

    assert list(texts_of(overlapping(lines(), decode_slowly, decoded))) == list(range(60)) == seen
    assert threads == {threading.current_thread()}
    assert most <= 9  # three lines that are decoded, and two windows of three


@pytest.mark.parametrize("where", ["read", "split", "decode"])
def test_an_error_comes_after_the_results_before_it(where: str) -> None:
    def fail() -> None:
        raise DataError("x:8: not valid UTF-8")

    def lines() -> Iterator[str]:
        for number in range(12):
            if number == 7 and where == "read":
                fail()
            yield "a line"

    def split_or_fail(window: Window) -> DecodingTask:
        if window.first == 6 and where == "split":
            fail()
        return split(window)

    def decode_or_fail(task: DecodingTask, decoded: Decoded) -> list[list[Translation]]:
        if task.parts[0].key[0] == 6 and where == "decode":
            fail()
        return decode(task, decoded)

    found: list[int] = []
    with pytest.raises(DataError, match="x:8"):
        for number in texts_of(overlapping(lines(), decode_or_fail, split=split_or_fail)):
            found.append(number)  # noqa: PERF402 - those before the error
    assert found == list(range(6)) and not running()


def test_lines_are_not_read_while_their_source_waits_for_results() -> None:
    answered = 0

    def lines() -> Iterator[str]:
        for number in range(12):
            assert answered >= number - number % 3
            yield "a line"

    for _ in texts_of(overlapping(lines(), paused=lambda waited: True)):
        answered += 1
    assert answered == 12


def test_after_an_interrupt_while_reading_finished_results_are_given(monkeypatch) -> None:
    futures: list[Future[Any]] = []
    submit = ThreadPoolExecutor.submit

    def submit_and_tell(*arguments: Any) -> Future[Any]:
        futures.append(submit(*arguments))
        return futures[-1]

    def lines() -> Iterator[str]:
        yield from ["a line"] * 3
        wait(futures)
        raise KeyboardInterrupt

    monkeypatch.setattr(ThreadPoolExecutor, "submit", submit_and_tell)
    found = texts_of(overlapping(lines()))
    assert [next(found), next(found), next(found)] == [0, 1, 2]
    with pytest.raises(KeyboardInterrupt):
        next(found)


def test_closing_ends_the_thread_before_the_next_batch() -> None:
    batches = count()
    closing = threading.Event()

    def decode_batches(task: DecodingTask, decoded: Decoded) -> list[list[Translation]]:
        for _ in range(1000):
            next(batches)
            found = decode(task, decoded)
            if task.parts[0].key[0] > 0:
                closing.wait(10)
        return found

    results = overlapping(["a line"] * 30, decode_batches)
    next(results)
    assert running() == {"decoding_0"}
    threading.Timer(0.05, closing.set).start()
    results.close()
    assert next(batches) <= 1000 + 2 and not running()


@pytest.mark.parametrize("settings", [{"beam_size": 2}, {"samples": 2, "temperature": 0.5}], ids=str)
def test_overlapping_windows_give_the_same_translations(
    translator: Translator, settings, monkeypatch
) -> None:
    monkeypatch.setattr("mtrain.decoding.split.FIRST_WINDOW", 5)
    lines = [*words_of(40, seed=3), "", "two\nlines"]
    quick = translator.with_settings(max_length_ratio=0.5, max_length_offset=6, **settings)
    results = []
    for overlaps in (False, True):
        monkeypatch.setattr("mtrain.decoding.translate.overlaps", lambda *_, now=overlaps: now)
        counted = [0, 0]

        def progress(lines: int, tokens: int, counted: list[int] = counted) -> None:
            counted[0] += lines
            counted[1] += tokens

        found = list(quick.stream(iter(lines), 2, alignments=True, first=7, progress=progress))
        results.append((found, counted))
    assert results[0] == results[1] and results[0][1][0] == 43
