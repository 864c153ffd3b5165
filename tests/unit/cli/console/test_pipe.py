"""When `mtrain translate` answers the lines of a pipe."""

import os
import threading
from collections.abc import Iterator

import pytest

from mtrain.cli.console import pipe
from mtrain.cli.console.pipe import PipedLines
from mtrain.errors import DataError


@pytest.fixture
def ends() -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    yield reading, writing
    os.close(reading)


def write_later(writing: int, text: bytes) -> threading.Timer:
    timer = threading.Timer(0.02, os.write, (writing, text))
    timer.start()
    return timer


def test_lines_are_those_of_the_pipe(ends):
    reading, writing = ends
    os.write(writing, b"\xef\xbb\xbfone\r\n\n" + b"two " * 100)
    os.write(writing, b"\nno line feed")
    os.close(writing)
    lines = PipedLines(reading)
    found = [(line, lines.paused(0.0)) for line in lines]
    assert found == [(line, False) for line in ("one", "", "two " * 100, "no line feed")]


def test_a_pause_is_noticed_even_if_another_line_has_begun(ends):
    reading, writing = ends
    lines = PipedLines(reading)
    text = iter(lines)
    os.write(writing, b"one\ntwo\nth")
    assert next(text) == "one" and not lines.paused(0.0)
    assert next(text) == "two" and lines.paused(0.0)
    os.write(writing, b"ree\n")
    assert next(text) == "three" and lines.paused(0.0)
    os.close(writing)
    assert next(text, None) is None


def test_a_line_that_arrives_soon_is_waited_for_but_not_for_ever(ends, monkeypatch):
    reading, writing = ends
    monkeypatch.setattr(pipe, "PAUSE", 60.0)
    lines = PipedLines(reading)
    text = iter(lines)
    os.write(writing, b"one\n")
    assert next(text) == "one"
    write_later(writing, b"two\n")
    assert not lines.paused(0.0) and next(text) == "two"
    write_later(writing, b"three\n").join()
    assert lines.paused(pipe.LONGEST_WAIT) and next(text) == "three"
    os.close(writing)


def test_a_pipe_in_non_blocking_mode_is_waited_for(ends):
    reading, writing = ends
    os.set_blocking(reading, False)
    write_later(writing, b"one\n")
    assert next(iter(PipedLines(reading))) == "one"
    os.close(writing)


def test_a_line_that_is_not_text_is_an_error_after_those_before_it(ends):
    reading, writing = ends
    os.write(writing, b"one\n\xff\n")
    os.close(writing)
    text = iter(PipedLines(reading))
    assert next(text) == "one"
    with pytest.raises(DataError, match=r"<stdin>:2: not valid UTF-8 \(byte 1 of the line\)"):
        next(text)
