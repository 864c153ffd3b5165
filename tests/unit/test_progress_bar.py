"""Progress bars, and the messages that replace them where there is no terminal."""

import re
import sys

import pytest

from mtrain import progress_bar
from mtrain.progress_bar import ProgressBar


@pytest.fixture(autouse=True)
def log_at_once(monkeypatch, logs) -> None:
    """Bars without a terminal log a message whenever items are added."""
    monkeypatch.setattr(progress_bar, "LOG_EVERY", 0)


def test_messages_have_counts_speeds_and_the_remaining_time(caplog):
    with ProgressBar("encoded", "pairs", 20_000) as progress:
        progress.set_done_before(10_000)
        progress.add(5_000)
    speed = r"([\d,]+) pairs/s"
    found = re.fullmatch(rf"encoded 15,000 of 20,000 pairs, {speed}, 0.0 minutes left", caplog.messages[0])
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
    assert caplog.messages[1].endswith(", 0.0 minutes left")


@pytest.mark.parametrize("quiet", [False, True])
def test_a_terminal_shows_a_bar_instead(caplog, monkeypatch, capsys, quiet):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with ProgressBar("translated", "lines", 4, quiet) as progress:
        progress.set_done_before(2)
        progress.add(2, tokens=5)
    shown = capsys.readouterr().err
    assert ("translated: 100%" in shown and "4.00/4.00" in shown) != quiet
    assert bool(caplog.messages) == quiet
