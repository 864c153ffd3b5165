"""An interrupted output file is resumed, and never mixed with the answers of another job."""

import gzip
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pytest

from mtrain.errors import StorageError, UsageError
from mtrain.storage.resumable import ResumableOutput

LINES = [f"line {number}" for number in range(10)]
JOB = {"model": "m", "decoding": {"beam_size": 5}, "lines_each": 1}


def saving_every(seconds: float) -> Any:
    return patch("mtrain.storage.resumable.SAVE_EVERY", seconds)


def answer(
    path: Path,
    lines: list[str] | Iterator[str] = LINES,
    resume: bool = False,
    stop: int | None = None,
    job: dict = JOB,
    save_every: float = 0.0,
    compression: str | None = None,
) -> int:
    """Answer each line with its upper-case form, and raise KeyboardInterrupt before line `stop`. Returns the
    number of lines that an earlier run had answered."""
    with saving_every(save_every), ResumableOutput(path, job, resume, compression) as output:
        start, iterator = output.lines_done, iter(lines)
        output.skip(iterator)
        for line in iterator:
            if output.lines_done == stop:
                raise KeyboardInterrupt
            output.write(line, f"{line.upper()}\n")
    return start


def interrupt(path: Path, stop: int, **options) -> None:
    with pytest.raises(KeyboardInterrupt):
        answer(path, stop=stop, **options)


def whole(lines: list[str] = LINES) -> str:
    return "".join(f"{line.upper()}\n" for line in lines)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def part(tmp_path: Path) -> Path:
    return tmp_path / "out.part"


@pytest.mark.parametrize("stop", [0, 1, 5, 9])
@pytest.mark.parametrize("save_every", [0.0, 3600.0])
def test_an_interrupted_output_is_resumed(out, part, stop, save_every, caplog):
    interrupt(out, stop, save_every=save_every)
    assert not out.exists() and part.exists() == (stop > 0)
    assert (f"contains the output of {stop} lines; use --continue" in caplog.text) == (stop > 0)
    assert answer(out, resume=True) == stop
    assert out.read_text() == whole()
    assert [file.name for file in out.parent.iterdir()] == ["out"]


def test_an_output_is_interrupted_and_resumed_several_times(out):
    interrupt(out, 2)
    for stop in (3, 3, 7):
        interrupt(out, stop, resume=True)
    assert answer(out, resume=True) == 7 and out.read_text() == whole()


@pytest.mark.parametrize("compression", ["gzip", "zstd"])
def test_a_compressed_output_is_resumed_and_compressed_once_it_is_complete(out, part, compression):
    out.write_text("old")
    out.chmod(0o600)
    interrupt(out, 4, compression=compression)
    assert out.read_text() == "old" and part.read_text() == whole(LINES[:4])
    assert answer(out, resume=True, compression=compression) == 4
    assert pa.input_stream(out, compression=compression).read().decode() == whole()
    assert out.stat().st_mode & 0o777 == 0o600
    assert [file.name for file in out.parent.iterdir()] == ["out"]
    answer(out, [], compression=compression)
    assert pa.input_stream(out, compression=compression).read() == b""


def test_answers_are_saved_while_waiting_for_the_next(out, part):
    def recorded() -> int:
        return json.loads(part.with_name("out.part.json").read_text())["lines"]

    with saving_every(0.5), ResumableOutput(out, JOB, False) as output:
        output.write(LINES[0], "LINE 0\n")
        output.save_if_due()
        assert recorded() == 0
        time.sleep(0.5)
        output.save_if_due()
        assert recorded() == 1 and part.read_text() == "LINE 0\n"


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_answers_are_kept_if_they_cannot_be_compressed(out, part, monkeypatch, caplog, failure):
    def fail(*_: object) -> None:
        raise failure

    monkeypatch.setattr(shutil, "copyfileobj", fail)
    with pytest.raises((StorageError, KeyboardInterrupt)):
        answer(out, compression="gzip")
    assert "contains the output of 10 lines; use --continue" in caplog.text
    assert sorted(file.name for file in out.parent.iterdir()) == ["out.part", "out.part.json"]
    monkeypatch.undo()
    assert answer(out, resume=True, compression="gzip") == 10
    assert gzip.decompress(out.read_bytes()).decode() == whole()


def test_answers_after_the_last_save_are_written_again(out, part):
    """A killed process may leave half an answer, which the note does not count."""
    interrupt(out, 7)
    with part.open("a") as stream:
        stream.write("LINE 7\nLI")
    assert answer(out, resume=True) == 7
    assert out.read_text() == whole()


def test_an_interruption_within_an_answer_leaves_only_whole_answers(out):
    class Interrupting(str):
        def encode(self, *arguments: str) -> bytes:
            raise KeyboardInterrupt

    with (
        saving_every(3600),
        pytest.raises(KeyboardInterrupt),
        ResumableOutput(out, JOB, resume=False) as output,
    ):
        output.write(LINES[0], "LINE 0\n")
        output.write(Interrupting(LINES[1]), "LINE 1\n")
    assert answer(out, resume=True) == 1 and out.read_text() == whole()


def test_a_process_killed_before_the_first_answer_is_resumed(out, part):
    with ResumableOutput(out, JOB, resume=False):
        copies = {file: file.read_bytes() for file in (part, part.with_name("out.part.json"))}
    out.unlink()
    for file, contents in copies.items():
        file.write_bytes(contents)
    with part.open("a") as stream:
        stream.write("LI")
    assert answer(out, resume=True) == 0 and out.read_text() == whole()


def test_without_an_interrupted_output_resuming_starts_from_the_beginning(out):
    assert not ResumableOutput(out, JOB, resume=True).part.exists()
    assert answer(out, resume=True) == 0 and out.read_text() == whole()
    assert answer(out, LINES[:4]) == 0 and out.read_text() == whole(LINES[:4])


@pytest.mark.parametrize(
    ("lines", "job", "message"),
    [
        (LINES, {**JOB, "model": "n"}, "with another model or other settings; remove it and leave out"),
        (["other", *LINES[1:]], JOB, "the input has changed; remove it and leave out"),
        (LINES[:2], JOB, "the input has changed"),
    ],
)
def test_another_job_or_input_is_refused(out, lines, job, message, caplog):
    interrupt(out, 6)
    caplog.clear()
    for _ in range(2):
        with pytest.raises(UsageError, match=message):
            answer(out, lines, resume=True, job=job)
    assert not caplog.text  # in particular no advice to use --continue
    assert answer(out, resume=True) == 6 and out.read_text() == whole()


def test_an_interruption_while_answered_lines_are_skipped_loses_nothing(out):
    interrupt(out, 6)

    def interrupted() -> Iterator[str]:
        yield LINES[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        answer(out, interrupted(), resume=True)
    assert answer(out, resume=True) == 6 and out.read_text() == whole()


def test_a_complete_output_survives_a_failing_rename(out, part, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError(13, "Permission denied")

    out.write_text("old")
    out.chmod(0o600)
    monkeypatch.setattr(Path, "chmod", fail)
    with pytest.raises(StorageError, match="out: cannot write: Permission denied"):
        answer(out)
    assert out.read_text() == "old" and part.read_text() == whole()
    monkeypatch.undo()
    assert answer(out, resume=True) == 10 and out.read_text() == whole()


def test_equal_permissions_are_not_set_which_some_file_systems_refuse(out, monkeypatch):
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    out.write_text("old")
    monkeypatch.setattr(Path, "chmod", refuse)
    answer(out)
    assert out.read_text() == whole()


EDITED = '{"lines": "two", "bytes": -1, "sha256": "", "job": {}}'


@pytest.mark.parametrize(
    "damage", ["truncated", "garbage", "[]", EDITED, pytest.param("[" * 10**5, id="deep")]
)
@pytest.mark.parametrize("resume", [True, False])
def test_damaged_files_are_refused(out, part, damage, resume):
    interrupt(out, 6)
    if damage == "truncated":
        part.write_text("LINE")
    else:
        part.with_name("out.part.json").write_text(damage)
    with pytest.raises(UsageError, match=r"out\.part: is damaged or was not written by mtrain; move it"):
        answer(out, resume=resume)


@pytest.mark.parametrize("name", ["out.part", "out.part.json"])
@pytest.mark.parametrize("contents", ["precious", '{"mine": 1}'])
def test_files_that_mtrain_did_not_write_are_not_touched(out, name, contents):
    (out.parent / name).write_text(contents)
    with pytest.raises(UsageError, match=f"{name}: .* move it elsewhere"):
        answer(out)
    assert (out.parent / name).read_text() == contents and len(list(out.parent.iterdir())) == 1


@pytest.mark.parametrize("interrupted", [True, False])
def test_two_processes_do_not_write_the_same_output(out, interrupted):
    if interrupted:
        interrupt(out, 3)
    with ResumableOutput(out, JOB, resume=interrupted) as output:
        for resume in (True, False):
            with pytest.raises(UsageError, match="another process is writing this file; wait"):
                answer(out, resume=resume)
        iterator = iter(LINES)
        output.skip(iterator)
        for line in iterator:
            output.write(line, f"{line.upper()}\n")
    assert out.read_text() == whole()
    assert answer(out, LINES[:2]) == 0 and out.read_text() == whole(LINES[:2])


def test_an_output_is_locked_until_it_is_renamed(out, monkeypatch):
    real, refused = Path.replace, []

    def replace(self: Path, target: Path) -> Path:
        if self.name == "out.part":
            with pytest.raises(UsageError, match="another process"):
                answer(out)
            refused.append(self)
        return real(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    answer(out)
    assert refused and out.read_text() == whole()


def test_a_note_left_by_a_finished_job_is_replaced(out, part):
    interrupt(out, 5)
    part.unlink()
    assert answer(out) == 0 and out.read_text() == whole()


def test_the_output_of_an_interrupted_job_is_never_replaced(out, part):
    interrupt(out, 7)
    with pytest.raises(UsageError, match=r"has the output for 7 lines.*add --continue to resume, or remove"):
        answer(out)
    part.unlink()
    assert answer(out) == 0 and out.read_text() == whole()


def test_a_replaced_file_keeps_its_permissions(out):
    out.write_text("old")
    out.chmod(0o600)
    answer(out)
    assert out.stat().st_mode & 0o777 == 0o600 and out.read_text() == whole()


def test_a_full_disk_is_a_storage_error_that_leaves_no_files(out, monkeypatch):
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="cannot write: No space left"):
        answer(out)
    assert not list(out.parent.iterdir())


def test_a_note_tells_that_mtrain_creates_the_part(out, part, monkeypatch):
    """Else the next run would refuse to touch it if this one were killed right after that."""
    real, notes = Path.open, []

    def opened(path, *arguments, **options):
        if path == part:
            notes.append(json.loads(part.with_name("out.part.json").read_text())["bytes"])
        return real(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", opened)
    answer(out)
    assert notes[0] == 0 and out.read_text() == whole()


def test_a_missing_folder_is_a_storage_error(out):
    with pytest.raises(StorageError, match="cannot write: No such file or directory"):
        answer(out.parent / "missing" / "out")


def test_an_output_interrupted_in_an_earlier_version_is_resumed(out, part):
    digest = hashlib.sha256(b"line 0\nline 1\n").hexdigest()
    part.write_text("LINE 0\nLINE 1\nLI")
    note = {"lines": 2, "bytes": 14, "sha256": digest, "job": JOB}
    part.with_name("out.part.json").write_text(json.dumps(note))
    assert answer(out, resume=True) == 2 and out.read_text() == whole()
