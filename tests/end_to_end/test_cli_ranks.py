"""`torchrun -m mtrain translate` and `evaluate`: the same results as with one process."""

import json
import os
import pty
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mtrain.decoding.workers import Workers
from mtrain.distributed import store
from tests.support.cli import one_line
from tests.support.faults.processes import wait, wait_until
from tests.support.ranks import command, exit_codes, read_logs, run_ranks, started_ranks
from tests.support.training import PAIRS

SOURCES = [pair[0] for pair in PAIRS]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A file with short, empty and long lines."""
    file = tmp_path / "in"
    lines = [*SOURCES, "", "cat " * 100, *SOURCES[::-1], "It rains. The sun"]
    file.write_text("".join(f"{line}\n" for line in lines))
    return file


def translate(run: Path, source: Path | str, *options: object) -> list[object]:
    return ["translate", run, "-i", source, "--device", "cpu", "--quiet", *options]


def with_streams(run: Callable[[], None], stdin: bytes, stdout: Path) -> Callable[[], None]:
    """Run a command whose ranks share stdin and stdout, as those that torchrun starts do."""
    reading, writing = os.pipe()
    os.write(writing, stdin)
    os.close(writing)

    def work() -> None:
        os.dup2(reading, 0)
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stdout = stdout.open("a", encoding="utf-8")
        run()

    return work


def test_commands_that_do_not_share_their_work_refuse_torchrun(mtrain, run_dir, text, tmp_path, monkeypatch):
    """Each process would do all of it, or get a part of stdin, and the last one would replace the output."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    code, _, err = mtrain("score", run_dir, "-i", text, "--target", text, "-o", tmp_path / "out")
    assert code == 2 and "mtrain score does not share its work among processes" in one_line(err)


def test_a_restarted_command_refuses_streams(mtrain, run_dir, text, tmp_path, monkeypatch, stdin):
    """A part of the input has already been read, or a part of the output written."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    pipe, out = tmp_path / "pipe", tmp_path / "out"
    os.mkfifo(pipe)
    job = ["translate", run_dir, "--device", "cpu"]
    refused = "which cannot be read or written again; start it again with files"
    for options in (
        (),
        ("-i", text),
        ("A dog.",),
        ("-o", out),
        ("-i", pipe, "-o", out),
        ("-i", text, "-o", out, "--prefix", pipe),
        ("A dog.", "-o", out, "--prefix", pipe),
    ):
        stdin(b"A dog.\n")
        code, printed, err = mtrain(*job, *options)
        assert (code, printed) == (2, "") and not out.exists()
        assert f"{refused}: -i FILE -o FILE" in one_line(err)
    assert mtrain(*job, "-i", text, "-o", out, "--quiet")[0] == 0 and out.exists()
    given = ["evaluate", "--reference", text, "--hypotheses"]
    code, _, err = mtrain(*given, "-")
    assert code == 2 and refused in one_line(err)
    assert mtrain(*given, text)[0] == 0


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("out.gz", ["--n-best", 2, "--beam-size", 2, "--scores", "--alignments"]),
        pytest.param("out", ["--json", "--sample", "--seed", 3], marks=pytest.mark.slow),
        pytest.param("out", ["--prefix", "{prefixes}", "--json"], marks=pytest.mark.slow),
    ],
)
def test_ranks_translate_like_one_process(mtrain, run_dir, text, tmp_path, name, options, monkeypatch):
    monkeypatch.setattr("mtrain.decoding.split.FIRST_WINDOW", 5)
    prefixes = tmp_path / "prefixes"  # none for the line that is translated in parts
    lines = text.read_text().splitlines()
    prefixes.write_text("".join(f"{line * (len(line) < 100)}\n" for line in lines))
    options = [str(option).format(prefixes=prefixes) for option in options]
    one, two = tmp_path / f"one-{name}", tmp_path / f"two-{name}"
    ends = run_ranks(2, command(*translate(run_dir, text, "-o", two, *options)), tmp_path)
    assert exit_codes(ends) == [0, 0], read_logs(tmp_path)
    assert "translated in parts" in read_logs(tmp_path)[0] and read_logs(tmp_path)[1] == ""
    assert mtrain(*translate(run_dir, text, "-o", one, *options))[0] == 0
    assert two.read_bytes() == one.read_bytes()
    assert not list(tmp_path.glob("*.part*"))


def test_the_first_rank_alone_reads_stdin_and_writes_stdout(mtrain, run_dir, text, tmp_path):
    work = with_streams(command(*translate(run_dir, "-")), text.read_bytes(), tmp_path / "two")
    assert exit_codes(run_ranks(2, work, tmp_path)) == [0, 0], read_logs(tmp_path)
    code, out, _ = mtrain(*translate(run_dir, text))
    assert code == 0 and (tmp_path / "two").read_text() == out


@pytest.mark.parametrize(
    "compared", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["one model", "compared"]
)
def test_evaluate_prints_the_scores_once(mtrain, run_dir, corpus, tmp_path, compared):
    others = ["--compare", run_dir / "model", "--compare", corpus / "train.en", "--metrics", "bleu"]
    job = ["evaluate", run_dir, "--json", "--device", "cpu", "--quiet", *(others if compared else ())]
    work = with_streams(command(*job), b"", tmp_path / "scores")
    assert exit_codes(run_ranks(2, work, tmp_path)) == [0, 0], read_logs(tmp_path)
    code, out, _ = mtrain(*job)
    assert code == 0 and json.loads((tmp_path / "scores").read_text()) == json.loads(out)


def test_after_a_rank_is_killed_continue_completes_the_output(mtrain, run_dir, text, tmp_path, monkeypatch):
    monkeypatch.setattr("mtrain.storage.resumable.SAVE_EVERY", 0.0)
    monkeypatch.setattr("mtrain.decoding.split.WINDOW_CHARACTERS", 60)
    monkeypatch.setattr(store, "GRACE", 0.5)
    out, pipe, state = tmp_path / "out", tmp_path / "pipe", tmp_path / "out.part.json"
    os.mkfifo(pipe)
    with started_ranks(2, command(*translate(run_dir, pipe, "-o", out)), tmp_path) as ranks:
        with pipe.open("w") as stream:
            stream.write("".join(f"{line}\n" for line in SOURCES))
            stream.flush()
            ready = wait_until(ranks[0], lambda: lines_done(state) >= 2, every=0.005)
            assert ready is None, read_logs(tmp_path)
            os.kill(ranks[1], signal.SIGKILL)
            stream.write(text.read_text())
        assert exit_codes([wait(rank) for rank in ranks]) == [7, -signal.SIGKILL]
    kept, error = read_logs(tmp_path)[0].splitlines()[-2:]
    assert re.search("out.part contains the output of [2-8] lines; use --continue to resume", kept)
    assert error.startswith("error: rank 1 on ") and "ended without a message" in error
    whole = tmp_path / "whole"
    whole.write_text("".join(f"{line}\n" for line in SOURCES) + text.read_text())
    ends = run_ranks(2, command(*translate(run_dir, whole, "-o", out, "--continue")), tmp_path)
    assert exit_codes(ends) == [0, 0], read_logs(tmp_path)
    assert out.read_text() == mtrain(*translate(run_dir, whole))[1]


def test_sigterm_to_all_ranks_keeps_what_was_translated(run_dir, tmp_path, monkeypatch):
    monkeypatch.setattr("mtrain.storage.resumable.SAVE_EVERY", 0.0)
    monkeypatch.setattr("mtrain.decoding.split.WINDOW_CHARACTERS", 60)
    pipe, state = tmp_path / "pipe", tmp_path / "out.part.json"
    os.mkfifo(pipe)
    work = command(*translate(run_dir, pipe, "-o", tmp_path / "out"))
    with started_ranks(2, work, tmp_path) as ranks, pipe.open("w") as stream:
        stream.write("".join(f"{line}\n" for line in SOURCES))
        stream.flush()
        assert wait_until(ranks[0], lambda: lines_done(state) >= 2, every=0.005) is None, read_logs(tmp_path)
        for rank in ranks:
            os.kill(rank, signal.SIGTERM)
        assert exit_codes([wait(rank) for rank in ranks]) == [143, 143]
    message, kept = read_logs(tmp_path)[0].splitlines()
    assert message == "stopped by SIGTERM" and "use --continue to resume" in kept
    assert read_logs(tmp_path)[1] == "rank 1: stopped by SIGTERM\n"


def lines_done(state: Path) -> int:
    """The number of lines that --continue would skip."""
    return json.loads(state.read_text())["lines"] if state.exists() else 0


def test_what_goes_wrong_on_another_rank_ends_all(run_dir, text, tmp_path, monkeypatch):
    real = Workers.decode

    def decode(self, *arguments):
        if os.environ["RANK"] == "1":
            raise MemoryError
        return real(self, *arguments)

    monkeypatch.setattr(Workers, "decode", decode)
    ends = run_ranks(2, command(*translate(run_dir, text, "-o", tmp_path / "out")), tmp_path)
    assert exit_codes(ends) == [8, 7]
    first, other = read_logs(tmp_path)
    assert first.splitlines()[-1].startswith("error: out of memory; lower ")
    assert re.fullmatch(r"rank 1: error: rank 0 on \S+ ended: out of memory\n", other)


def test_ranks_need_the_same_model(run_dir, text, tmp_path):
    job = translate(run_dir, text)

    def work() -> None:
        command(*job, *["--ensemble", run_dir] * (os.environ["RANK"] == "1"))()

    assert exit_codes(run_ranks(2, work, tmp_path)) == [7, 7]
    assert read_logs(tmp_path)[0].startswith("error: rank 1: the model is ")


def test_a_prompt_needs_a_process_without_others(run_dir, tmp_path):
    primary, secondary = pty.openpty()

    def work() -> None:
        os.dup2(secondary, 0)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        command("translate", run_dir)()

    with started_ranks(2, work, tmp_path) as ranks:
        assert wait(ranks[0]).exit_code == 2
    assert read_logs(tmp_path)[0] == "error: nothing to translate; give TEXT, --input or a pipe\n"
    os.close(primary)
    os.close(secondary)
