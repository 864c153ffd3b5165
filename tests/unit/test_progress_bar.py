"""Progress bars, and the messages that replace them where there is no terminal."""

import os
import pty
import re
import sys
import termios
import time

import pytest

from mtrain import progress_bar
from mtrain.progress_bar import Bar, ProgressBar, format_speed, shows_bars, waiting_for, with_progress

INTERVAL = 0.11  # seconds; tqdm draws at most every 0.1 s


@pytest.fixture(autouse=True)
def log_at_once(monkeypatch, logs) -> None:
    """Bars without a terminal log a message whenever items are added."""
    monkeypatch.setattr(progress_bar, "LOG_EVERY", 0)


def test_messages_have_counts_speeds_and_the_remaining_time(caplog):
    with ProgressBar("encoded", "pairs", 20_000) as progress:
        progress.set_done_before(10_000)
        progress.add(5_000)
    speed = r"([\d,]+) pairs/s"
    found = re.fullmatch(rf"encoded 15,000 of 20,000 pairs, {speed}, [\d.]+ m?s left", caplog.messages[0])
    assert found and progress.count == 5_000 and re.fullmatch(speed, progress.speed())


def test_without_a_total_there_is_no_remaining_time(caplog):
    with ProgressBar("translated", "lines") as progress:
        progress.add(1, tokens=7)
    assert re.fullmatch(r"translated 1 lines, [\d,]+ lines/s, [\d,]+ target tokens/s", caplog.messages[0])


def test_an_unknown_total_is_estimated_from_the_share_that_is_done(caplog):
    with ProgressBar("read", "pairs") as progress:
        progress.add(500, share=0.25)
        progress.add(500, share=1.0)
    assert [message.split(" pairs,")[0] for message in caplog.messages] == [
        "read 500 of about 2,000",
        "read 1,000 of about 1,000",
    ]
    assert caplog.messages[1].endswith(", 0 s left")


def test_the_remaining_time_is_not_extrapolated_from_the_first_item(caplog):
    """The first of a batch of sentences arrives when the whole batch is translated."""
    with ProgressBar("validated", "sentences", 1_014) as progress:
        progress.add()
        progress.add(63)
    with ProgressBar("read", "files", 3) as progress:
        progress.add()
    assert ["left" in message for message in caplog.messages] == [False, True, True]


def test_slow_work_has_seconds_per_item():
    assert format_speed(12_345, "pairs") == "12,345 pairs/s"
    assert format_speed(0.5, "target tokens") == "2.0 s per target token"


def use_terminal(monkeypatch) -> None:
    """Make standard error a terminal where bars appear at once."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(progress_bar, "DELAY", 1e-9)
    monkeypatch.setenv("TERM", "xterm")


@pytest.mark.parametrize("hidden", [False, True])
def test_a_terminal_shows_a_bar_instead(caplog, monkeypatch, capsys, hidden):
    use_terminal(monkeypatch)
    with ProgressBar("translated", "lines", 4, hidden) as progress:
        progress.set_done_before(2)
        time.sleep(INTERVAL)
        progress.add(2, tokens=5)
    shown = capsys.readouterr().err
    assert bool(re.search(r"translated 100% .* 4/4 lines, .* lines/s, .*0 s left", shown)) != hidden
    assert bool(caplog.messages) == hidden


@pytest.mark.parametrize(
    ("columns", "expected"), [(150, "tokens/s, "), (110, "lines/s, "), (80, "lines, "), (30, "a long")]
)
def test_a_bar_disappears_and_leaves_out_what_does_not_fit(monkeypatch, columns, expected):
    monkeypatch.setattr(progress_bar, "DELAY", 1e-9)
    reader, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (50, columns))
    with open(terminal, "w") as stream:  # noqa: PTH123
        monkeypatch.setattr(sys, "stderr", stream)
        with ProgressBar("a long name of work", "lines", 2_000_000) as progress:
            time.sleep(INTERVAL)
            progress.add(1_000_000, tokens=30)
    written = b""
    while written.count(b"\r") < 3:  # the bar, spaces, and back
        written += os.read(reader, 4096)
    os.close(reader)
    *_, shown, last, rest = written.decode().split("\r")
    assert expected in shown and len(shown) < columns and last.strip() == rest == ""


def test_the_bar_of_training_shows_loss_bleu_and_the_time_left_in_80_columns(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    reader, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 80))
    with open(terminal, "w") as stream:  # noqa: PTH123
        monkeypatch.setattr(sys, "stderr", stream)
        bar = Bar("", "steps", 100_000, initial=12_000)
        bar.n, bar.start_t = 12_345, time.time() - 19.9
        bar.details = ["loss 2.345", "BLEU 24.00", "lr 0.0003", "12,345 target tokens/s"]
        shown = str(bar)
        bar.close()
    os.close(reader)
    expected = r" 12% \S+ +12,345/100,000 steps, loss 2\.345, BLEU 24\.00, 1 h 2\d min left"
    assert len(shown) <= 76 and re.fullmatch(expected, shown), shown


def test_there_are_no_bars_on_dumb_terminals_and_for_quiet_commands(monkeypatch, caplog):
    use_terminal(monkeypatch)
    assert shows_bars()
    caplog.set_level("WARNING", "mtrain")
    assert not shows_bars()
    caplog.set_level("INFO", "mtrain")
    monkeypatch.setenv("TERM", "dumb")
    assert not shows_bars()


def test_there_are_no_bars_on_terminals_of_unknown_size(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    reader, terminal = pty.openpty()
    with open(terminal, "w") as stream:  # noqa: PTH123
        monkeypatch.setattr(sys, "stderr", stream)
        shown = []
        for size in ((0, 0), (24, 80)):
            termios.tcsetwinsize(terminal, size)
            shown.append(shows_bars())
    os.close(reader)
    assert shown == [False, True]


def test_items_are_counted_as_they_are_used(caplog):
    assert list(with_progress("ab", "read", "letters", 2)) == ["a", "b"]
    assert [message.split(",")[0] for message in caplog.messages] == [
        "read 1 of 2 letters",
        "read 2 of 2 letters",
    ]


@pytest.mark.parametrize("on_terminal", [True, False])
def test_work_of_unknown_length_shows_the_time(caplog, capsys, monkeypatch, on_terminal):
    monkeypatch.setattr(progress_bar, "TICK", 0.01)
    if on_terminal:
        use_terminal(monkeypatch)
    shown = ""
    with waiting_for("learning"):
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and not caplog.messages and not shown:
            time.sleep(0.01)
            shown += capsys.readouterr().err
    assert bool(caplog.messages) != on_terminal
    assert "learning" in shown or not on_terminal
    assert all(re.fullmatch(r"learning: [\d.]+ m?s so far", message) for message in caplog.messages)
