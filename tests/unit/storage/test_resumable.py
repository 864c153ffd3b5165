"""An output file that was interrupted is gone on with, and never mixed with another job's."""

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from mtrain.errors import StorageError, UsageError
from mtrain.storage import resumable as partial
from mtrain.storage.atomic import lock
from mtrain.storage.resumable import PartialFile

LINES = [f"line {number}" for number in range(10)]
JOB = {"model": "m", "decoding": {"beam_size": 5}, "lines_each": 1}


def answering(stop: int | None = None, window: int = 3, asked: list | None = None):
    """Answers in windows, as a translator does; before line `stop` is answered comes an interruption."""

    def answers(lines: Iterator[str], start: int) -> Iterator[str]:
        if asked is not None:
            asked.append(start)
        iterator, number = iter(lines), start
        while block := [line for _, line in zip(range(window), iterator, strict=False)]:
            for line in block:
                if number == stop:
                    raise KeyboardInterrupt
                yield f"{line.upper()}\n"
                number += 1

    return answers


def answer_lines(lines: Iterable[str], answers: Callable, path: Path, job: dict, go_on: bool) -> None:
    with PartialFile(path, job, go_on) as file:
        for answer in answers(file.remaining(lines), file.start):
            file.answer(answer)


def whole(lines: list[str] = LINES) -> str:
    return "".join(f"{line.upper()}\n" for line in lines)


@pytest.mark.parametrize("stop", [0, 1, 3, 5, 9])
def test_an_interrupted_file_is_gone_on_with(tmp_path: Path, stop: int, caplog) -> None:
    out, asked = tmp_path / "out", []
    with pytest.raises(KeyboardInterrupt):
        answer_lines(iter(LINES), answering(stop), out, JOB, go_on=False)
    assert not out.exists()
    assert (tmp_path / "out.part").exists() == (stop >= 3)
    assert ("--continue goes on from there" in caplog.text) == (stop >= 3)
    answer_lines(iter(LINES), answering(asked=asked), out, JOB, go_on=True)
    assert out.read_text() == whole() and asked == [stop // 3 * 3]
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


def test_a_kill_between_two_notes_loses_nothing(tmp_path: Path) -> None:
    """What was written after the last note is cut off and answered again."""
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        answer_lines(iter(LINES), answering(7), out, JOB, go_on=False)
    with (tmp_path / "out.part").open("a") as stream:
        stream.write("LINE 6\nLI")
    answer_lines(iter(LINES), answering(), out, JOB, go_on=True)
    assert out.read_text() == whole()


def test_a_file_is_begun_if_there_is_nothing_to_resume_and_replaced_without_resuming(tmp_path: Path) -> None:
    out, asked = tmp_path / "out", []
    answer_lines(iter(LINES), answering(asked=asked), out, JOB, go_on=True)
    assert asked == [0] and out.read_text() == whole()
    answer_lines(iter(LINES[:4]), answering(asked=asked), out, JOB, go_on=False)
    assert asked == [0, 0] and out.read_text() == whole(LINES[:4])


@pytest.mark.parametrize(
    ("lines", "job", "message"),
    [
        (LINES, {**JOB, "model": "n"}, "with another model or other settings"),
        (["other", *LINES[1:]], JOB, "its input was another"),
        (LINES[:2], JOB, "its input was another"),
    ],
)
def test_another_job_is_refused(tmp_path: Path, lines: list[str], job: dict, message: str, caplog) -> None:
    with pytest.raises(KeyboardInterrupt):
        answer_lines(iter(LINES), answering(7), tmp_path / "out", JOB, go_on=False)
    caplog.clear()
    for _ in range(2):
        with pytest.raises(UsageError, match=message):
            answer_lines(iter(lines), answering(), tmp_path / "out", job, go_on=True)
    assert not caplog.text  # least of all that --continue goes on from there
    asked: list[int] = []
    answer_lines(iter(LINES), answering(asked=asked), tmp_path / "out", JOB, go_on=True)
    assert asked == [6] and (tmp_path / "out").read_text() == whole()  # nothing was lost


def test_an_interruption_while_lines_are_skipped_loses_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        answer_lines(iter(LINES), answering(7), tmp_path / "out", JOB, go_on=False)

    def interrupted() -> Iterator[str]:
        yield LINES[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        answer_lines(interrupted(), answering(), tmp_path / "out", JOB, go_on=True)
    asked: list[int] = []
    answer_lines(iter(LINES), answering(asked=asked), tmp_path / "out", JOB, go_on=True)
    assert asked == [6] and (tmp_path / "out").read_text() == whole()


def test_a_kill_before_the_first_answers_is_gone_on_with(tmp_path: Path) -> None:
    file = PartialFile(tmp_path / "out", JOB, go_on=False)
    file.__enter__()
    file.stream.write(b"LI")
    file.stream.close()  # and no more: the process is gone
    answer_lines(iter(LINES), answering(), tmp_path / "out", JOB, go_on=True)
    assert (tmp_path / "out").read_text() == whole()


def test_a_finished_part_survives_a_rename_that_fails(tmp_path: Path, monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(13, "Permission denied")

    monkeypatch.setattr(Path, "chmod", fail)
    (tmp_path / "out").write_text("old")
    with pytest.raises(StorageError, match="Permission denied"):
        answer_lines(iter(LINES), answering(), tmp_path / "out", JOB, go_on=False)
    assert (tmp_path / "out").read_text() == "old" and (tmp_path / "out.part").read_text() == whole()
    monkeypatch.undo()
    answer_lines(iter(LINES), answering(), tmp_path / "out", JOB, go_on=True)
    assert (tmp_path / "out").read_text() == whole()


@pytest.mark.parametrize("damage", ["truncated", "garbage", "[]"])
def test_damage_is_refused(tmp_path: Path, damage: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        answer_lines(iter(LINES), answering(7), tmp_path / "out", JOB, go_on=False)
    if damage == "truncated":
        (tmp_path / "out.part").write_text("LINE")
    else:
        (tmp_path / "out.part.json").write_text(damage)
    for go_on in (True, False):
        with pytest.raises(UsageError, match=r"out\.part: is in the way; it is damaged or not mtrain's"):
            PartialFile(tmp_path / "out", JOB, go_on)


@pytest.mark.parametrize("name", ["out.part", "out.part.json"])
@pytest.mark.parametrize("contents", ["precious", '{"mine": 1}'])
def test_a_file_of_somebody_else_is_not_touched(tmp_path: Path, name: str, contents: str) -> None:
    (tmp_path / name).write_text(contents)
    with pytest.raises(UsageError, match="move it elsewhere"):
        answer_lines(iter(LINES), answering(), tmp_path / "out", JOB, go_on=False)
    assert (tmp_path / name).read_text() == contents and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("interrupted", [True, False])
def test_two_processes_do_not_write_one_file(tmp_path: Path, interrupted: bool) -> None:
    if interrupted:
        with pytest.raises(KeyboardInterrupt):
            answer_lines(iter(LINES), answering(5), tmp_path / "out", JOB, go_on=False)
    with PartialFile(tmp_path / "out", JOB, go_on=interrupted) as file:
        for go_on in (True, False):
            with pytest.raises(UsageError, match="another process writes it"):
                answer_lines(iter(LINES), answering(), tmp_path / "out", JOB, go_on)
        for line in file.remaining(LINES):
            file.answer(f"{line.upper()}\n")
    assert (tmp_path / "out").read_text() == whole()
    answer_lines(iter(LINES[:2]), answering(), tmp_path / "out", JOB, go_on=False)
    assert (tmp_path / "out").read_text() == whole(LINES[:2])


def test_two_processes_that_begin_at_the_same_time(tmp_path: Path) -> None:
    first, second = (PartialFile(tmp_path / "out", JOB, go_on=False) for _ in range(2))
    with first, pytest.raises(UsageError, match="another process writes it"), second:
        pass


def test_a_file_that_came_to_its_end_meanwhile_is_not_emptied(tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(KeyboardInterrupt):
        answer_lines(iter(LINES), answering(5), tmp_path / "out", JOB, go_on=False)
    (tmp_path / "out.part").write_text("all of it\n")

    def late(stream):  # who had it gives it its name before it can be locked
        (tmp_path / "out.part").rename(tmp_path / "out")
        return lock(stream)

    monkeypatch.setattr(partial, "lock", late)
    with pytest.raises(UsageError, match="another process writes it"):
        answer_lines(iter(LINES), answering(), tmp_path / "out", JOB, go_on=False)
    assert (tmp_path / "out").read_text() == "all of it\n"


def test_a_file_is_locked_until_it_has_its_name(tmp_path: Path, monkeypatch) -> None:
    real, refused = Path.replace, []

    def replace(self, target):
        if self.name == "out.part":
            with pytest.raises(UsageError, match="another process writes it"):
                PartialFile(tmp_path / "out", JOB, go_on=False)
            refused.append(1)
        return real(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    answer_lines(iter(LINES), answering(), tmp_path / "out", JOB, go_on=False)
    assert refused and (tmp_path / "out").read_text() == whole()


def test_a_note_that_outlived_its_job_is_no_hindrance(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        answer_lines(iter(LINES), answering(5), tmp_path / "out", JOB, go_on=False)
    (tmp_path / "out.part").unlink()
    answer_lines(iter(LINES), answering(), tmp_path / "out", JOB, go_on=False)
    assert (tmp_path / "out").read_text() == whole()
    (tmp_path / "out.part.json").write_text("{}")
    with pytest.raises(UsageError, match=r"out\.part\.json: is in the way"):
        answer_lines(iter(LINES), answering(), tmp_path / "out", JOB, go_on=False)


def test_starting_again_says_what_it_replaces(tmp_path: Path, caplog) -> None:
    with pytest.raises(KeyboardInterrupt):
        answer_lines(iter(LINES), answering(7), tmp_path / "out", JOB, go_on=False)
    answer_lines(iter(LINES), answering(), tmp_path / "out", JOB, go_on=False)
    assert "is replaced; --continue would have gone on with it" in caplog.text
    assert (tmp_path / "out").read_text() == whole()


def test_a_replaced_file_keeps_its_mode_and_a_full_disk_is_a_storage_error(
    tmp_path: Path, monkeypatch
) -> None:
    out = tmp_path / "out"
    out.write_text("old")
    out.chmod(0o600)
    answer_lines(iter(LINES), answering(), out, JOB, go_on=False)
    assert out.stat().st_mode & 0o777 == 0o600
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(StorageError, match="full: cannot write: No space left"):
        answer_lines(iter(LINES), answering(), tmp_path / "full", JOB, go_on=False)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out"]
