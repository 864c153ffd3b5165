"""`mtrain translate` and `mtrain score` as a user runs them."""

import gzip
import json
import math
import os
import pty
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from select import select

import pyarrow as pa
import pytest

from mtrain import Translator
from mtrain.cli.translate import translation_output
from mtrain.storage.manifest import write_manifest
from tests.support.cli import CLOSED, changed, one_line, run_forked, start_forked
from tests.support.training import PAIRS
from tests.support.translation import interrupt_third_window

SOURCES, TARGETS = ([pair[side] for pair in PAIRS] for side in (0, 1))
EXPECTED = "".join(f"{target}\n" for target in TARGETS)


def test_translate_arguments_files_and_pipes(mtrain, run_dir, corpus, stdin, tmp_path):
    on_cpu = ["--device", "cpu"]
    assert mtrain("translate", run_dir, *SOURCES[:2], *on_cpu)[:2] == (
        0,
        "".join(f"{t}\n" for t in TARGETS[:2]),
    )
    assert mtrain("translate", run_dir, "-i", corpus / "train.en", *on_cpu)[:2] == (0, EXPECTED)
    stdin((corpus / "train.en").read_bytes())
    assert mtrain("translate", run_dir, *on_cpu)[:2] == (0, EXPECTED)
    stdin(b"\xef\xbb\xbf" + SOURCES[0].encode() + b"\r\n\n   \n" + SOURCES[1].encode())
    assert mtrain("translate", run_dir, "-i", "-", *on_cpu)[:2] == (0, f"{TARGETS[0]}\n\n\n{TARGETS[1]}\n")
    (tmp_path / "out").write_text("old")
    code, out, _ = mtrain("translate", run_dir, "-i", corpus / "train.en", "-o", tmp_path / "out", *on_cpu)
    assert (code, out) == (0, "") and (tmp_path / "out").read_text() == EXPECTED


def test_text_is_divided_into_lines_as_files_are(mtrain, run_dir, stdin):
    job = ["translate", run_dir, "--device", "cpu", "--quiet"]
    typed = "It rains.\r\n\nThe sun shines.\n"
    expected = ["Es regnet.", "", "Die Sonne scheint.", "Es regnet.", ""]
    assert mtrain(*job, typed, "It rains.", "")[1].splitlines() == expected
    assert mtrain(*job, "--", "It rains.")[1] == "Es regnet.\n"
    assert len(mtrain(*job, typed, "--json", "--n-best", "2")[1].splitlines()) == 3
    stdin(b"It rains.\nThe sun shines.\n")
    assert mtrain(*job, "-")[1].splitlines() == ["Es regnet.", "Die Sonne scheint."]


@pytest.mark.parametrize(("options", "suggested"), [([], True), (["--scores"], False), (["--json"], False)])
def test_only_plain_translations_can_be_evaluated_next(
    mtrain, run_dir, corpus, tmp_path, monkeypatch, options, suggested
):
    monkeypatch.setattr(translation_output, "REPORT_AFTER", 0.0)
    files = "-i", corpus / "train.en", "-o", tmp_path / "out"
    code, _, err = mtrain("translate", run_dir, *files, *options, "--device", "cpu")
    assert code == 0 and ("next: mtrain evaluate --hypotheses" in err) == suggested


def test_search_options_take_effect(mtrain, run_dir):
    code, out, _ = mtrain(
        "translate", run_dir, "It rains.", "", "--n-best", 3, "--beam-size", 4, "--device", "cpu"
    )
    lines = out.split("\n")[:-1]
    assert code == 0 and len(lines) == 6 and lines[0] == "Es regnet." and lines[3:] == ["", "", ""]
    assert len(set(lines[:3])) == 3
    same = ["--length-penalty", "0.5", "--batch-tokens", "1", "--set", "decoding.stop=exact"]
    assert mtrain("translate", run_dir, *SOURCES, *same, "--device", "cpu")[1].split("\n")[:-1] == TARGETS


def test_the_size_of_batches_and_the_number_of_workers_may_be_automatic(mtrain, run_dir):
    job = ["translate", run_dir, *SOURCES, "--device", "cpu"]
    automatic = ["--batch-tokens", "auto", "--workers", "auto"]
    assert mtrain(*job, *automatic)[1].split("\n")[:-1] == TARGETS
    code, _, err = mtrain(*job, "--workers", "many")
    assert code == 2 and "'--workers': many: expected a number from 1 to 64, or auto" in one_line(err)
    code, _, err = mtrain(*job, "--batch-tokens", "0")
    assert code == 2 and "'--batch-tokens': 0: expected a number from 1 to" in one_line(err)


def test_scores_alignments_and_json(mtrain, run_dir):
    arguments = ["translate", run_dir, "It rains.", "", "--device", "cpu"]
    code, out, _ = mtrain(*arguments, "--scores", "--alignments")
    first, empty = (line.split("\t") for line in out.split("\n")[:-1])
    assert code == 0 and first[0] == "Es regnet." and float(first[1]) < 0 and empty == ["", "0.000000", ""]
    assert [pair.split("-")[1] for pair in first[2].split()] == ["0", "1"]
    code, out, _ = mtrain(*arguments, "--json", "--n-best", 2, "--alignments")
    first, empty = map(json.loads, out.split("\n")[:-1])
    assert code == 0 and first["text"] == "Es regnet." and first["finished"] and first["log_prob"] < 0
    assert len(first["n_best"]) == 2 and len(first["alignment"]) == 2 and empty["text"] == ""
    assert first["n_best"][0].keys() == first.keys() - {"n_best"} == empty.keys() - {"n_best"}


def test_prefixes_ensembles_and_samples(mtrain, run_dir, tmp_path):
    (tmp_path / "begins").write_text("Der Hund\n\n")
    both, on_cpu = ["It rains.", "The sun shines."], ["--device", "cpu"]
    code, out, _ = mtrain("translate", run_dir, *both, "--prefix", tmp_path / "begins", *on_cpu)
    assert code == 0 and out.startswith("Der Hund") and out.endswith("\nDie Sonne scheint.\n")
    lines = ["It rains.", "It rains. The sun shines."]
    (tmp_path / "sides").write_text("\nDer Hund\n")
    in_parts = ["--prefix", tmp_path / "sides", "--set", "decoding.split=sentences", *on_cpu]
    code, out, err = mtrain("translate", run_dir, *lines, *in_parts)
    found = "sides:2: has a prefix but is translated in 2 parts; give the parts as lines of their own"
    assert code == 3 and found in one_line(err)
    code, out, _ = mtrain("translate", run_dir, *both, "--ensemble", run_dir / "model", *on_cpu)
    assert (code, out) == (0, "Es regnet.\nDie Sonne scheint.\n")
    options = ["--sample", "--temperature", 3, "--top-k", 50, "--top-p", 0.9, "--n-best", 4, *on_cpu]
    sampled = [mtrain("translate", run_dir, *both, *options, "--seed", seed)[1] for seed in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2] and len(set(sampled[0].split("\n"))) > 5
    greedy = ["--sample", "--top-k", 1, "--set", "decoding.samples=3", "--set", "decoding.mbr=chrf"]
    assert mtrain("translate", run_dir, *both, *greedy, *on_cpu)[1] == "Es regnet.\nDie Sonne scheint.\n"


def test_continue_resumes_an_interrupted_output(mtrain, run_dir, corpus, tmp_path, monkeypatch):
    windows = interrupt_third_window(monkeypatch)
    job = ["translate", run_dir, "-i", corpus / "train.en", "-o", tmp_path / "out", "--device", "cpu"]
    code, _, err = mtrain(*job)
    assert code == 130 and "out.part contains the output of 5 lines; use --continue to resume" in err
    described = json.loads((tmp_path / "out.part.json").read_text())["job"]
    assert described.keys() == {"model", "decoding", "prefix", "form", "lines_each"}  # and no languages
    code, _, err = mtrain(*job, "--beam-size", 2, "--continue")
    assert code == 2 and "another model or other settings" in one_line(err)
    code, _, err = mtrain(*job, "--continue")
    assert code == 0 and "resuming after 5 lines" in err
    assert (tmp_path / "out").read_text() == EXPECTED
    code, _, err = mtrain(*job, "--continue")
    assert code == 0 and "warning: " in err and "out is already complete" in err and len(windows) == 4


def test_an_unreadable_stdin_is_a_data_error(run_dir):
    with Path(os.devnull).open("w") as write_only:
        code, _, err = run_forked("translate", run_dir, "--device", "cpu", stdin=write_only.fileno())
    assert code == 3 and "<stdin>: cannot read: Bad file descriptor" in one_line(err)


@pytest.mark.parametrize(
    "connect", [os.pipe, lambda: [one.detach() for one in socket.socketpair()]], ids=["pipe", "socket"]
)
def test_a_program_can_read_an_answer_before_it_writes_the_next_line(run_dir, connect):
    (stdin, to_child), (from_child, stdout) = connect(), os.pipe()
    child = start_forked("translate", run_dir, "--device", "cpu", "--quiet", streams=[stdin, stdout, 2])
    os.close(stdin)
    os.close(stdout)
    with os.fdopen(to_child, "wb", buffering=0) as writer, os.fdopen(from_child, "rb") as answers:
        for source, target in zip(SOURCES[:3], TARGETS[:3], strict=True):
            writer.write(source.encode() + b"\n")
            assert select([answers], [], [], 60)[0], "no answer"
            assert answers.readline().decode() == f"{target}\n"
        writer.write(f"{SOURCES[3]}\n{SOURCES[4][:3]}".encode())  # the second line is not complete
        assert select([answers], [], [], 60)[0], "no answer"
        assert answers.readline().decode() == f"{TARGETS[3]}\n"
        writer.write(SOURCES[4][3:].encode())
        writer.close()
        assert select([answers], [], [], 60)[0], "no answer"
        assert answers.read().decode() == f"{TARGETS[4]}\n"
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_lines_of_a_pipe_before_one_that_is_not_text_are_translated(run_dir):
    reading, writing = os.pipe()
    os.write(writing, f"{SOURCES[0]}\n".encode() + b"\xff\n")
    os.close(writing)
    code, out, err = run_forked("translate", run_dir, "--device", "cpu", stdin=reading)
    os.close(reading)
    assert (code, out) == (3, f"{TARGETS[0]}\n")
    assert one_line(err) == "error: <stdin>:2: not valid UTF-8 (byte 1 of the line)\n"


def test_an_output_is_resumed_only_with_the_same_source_language(
    mtrain, run_dir, corpus, tmp_path, monkeypatch
):
    interrupt_third_window(monkeypatch)
    job = ["translate", run_dir, "-i", corpus / "train.en", "-o", tmp_path / "out", "--device", "cpu"]
    french = ["--from", "fr", "--set", "decoding.split=sentences"]
    assert mtrain(*job, *french)[0] == 130
    described = json.loads((tmp_path / "out.part.json").read_text())["job"]
    assert described["direction"] == ["fr", "de"]
    code, _, err = mtrain(*job, *french[2:], "--continue")
    assert code == 2 and "another model or other settings" in one_line(err)
    assert mtrain(*job, *french, "--continue")[0] == 0
    assert (tmp_path / "out").read_text() == EXPECTED


def test_continue_needs_an_output_that_was_interrupted(mtrain, run_dir, corpus, tmp_path):
    job = ["translate", run_dir, "-i", corpus / "train.en", "-o", tmp_path / "out", "--device", "cpu"]
    for contents in ("", "something else\n"):
        (tmp_path / "out").write_text(contents)
        code, _, err = mtrain(*job, "--continue")
        assert code == 2 and "there is nothing to resume" in one_line(err)
        assert (tmp_path / "out").read_text() == contents
    (tmp_path / "out").unlink()  # as after an interruption before the first answer
    assert mtrain(*job, "--continue")[0] == 0 and (tmp_path / "out").read_text() == EXPECTED


def decompressed(file: Path) -> str:
    if file.suffix == ".gz":
        return gzip.decompress(file.read_bytes()).decode()
    return pa.input_stream(file, compression="zstd").read().decode()


@pytest.mark.parametrize("name", ["out.gz", pytest.param("out.zst", marks=pytest.mark.slow)])
def test_output_is_compressed_by_its_suffix_and_replaced_when_complete(
    mtrain, run_dir, corpus, tmp_path, name
):
    out = tmp_path / name
    out.write_text("old")
    out.chmod(0o600)
    job = ["translate", run_dir, "-o", out, "--device", "cpu", "--quiet"]
    code, _, err = mtrain(
        *job, "-i", corpus / "train.en", "--prefix", corpus / "train.en", "--set", "decoding.seed=x"
    )
    assert code == 2 and one_line(err) and out.read_text() == "old"
    (tmp_path / "bad.en").write_bytes(b"It rains.\n\xff\n")
    code, _, err = mtrain(*job, "-i", tmp_path / "bad.en")
    assert code == 3 and "bad.en:2: not valid UTF-8" in one_line(err) and out.read_text() == "old"
    assert mtrain(*job, "-i", corpus / "train.en") == (0, "", "")
    assert decompressed(out) == EXPECTED and out.stat().st_mode & 0o777 == 0o600
    assert mtrain("translate", run_dir, "-i", out, "--device", "cpu")[0] == 0  # and can be read again
    assert sorted(file.name for file in tmp_path.iterdir()) == ["bad.en", name]


def test_a_killed_translation_is_resumed_to_the_same_output(mtrain, run_dir, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr("mtrain.storage.resumable.SAVE_EVERY", 0.0)
    monkeypatch.setattr("mtrain.decoding.split.WINDOW_CHARACTERS", 60)
    os.mkfifo(tmp_path / "in")
    job, out = ["translate", run_dir, "--device", "cpu", "-o", tmp_path / "out.gz", "-i"], tmp_path / "out.gz"
    with Path(os.devnull).open("r+") as null:
        child = start_forked(*job, tmp_path / "in", streams=[null.fileno()] * 3)
    with (tmp_path / "in").open("w") as pipe:
        pipe.write("".join(f"{line}\n" for line in SOURCES[:5]))
        pipe.flush()
        state = tmp_path / "out.gz.part.json"
        while not state.exists() or json.loads(state.read_text())["lines"] < 2:
            time.sleep(0.01)
        stopped = False
        while not stopped or [*tmp_path.glob(".*.tmp")]:  # a killed process could not remove such a file
            os.kill(child, signal.SIGCONT)
            time.sleep(0.01)
            os.kill(child, signal.SIGSTOP)
            stopped = os.waitpid(child, os.WUNTRACED)[0] == child
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    code, _, err = mtrain(*job, corpus / "train.en", "--continue")
    assert code == 0 and re.search("resuming after [2-5] lines", err) and decompressed(out) == EXPECTED
    code, _, err = mtrain(*job, corpus / "train.en", "--continue")
    assert code == 0 and "out.gz is already complete" in err
    assert {file.name for file in tmp_path.iterdir()} == {"in", "out.gz"}


def test_bad_lines_of_a_file_are_found_first_and_those_of_a_pipe_keep_what_was_translated(
    mtrain, run_dir, stdin, tmp_path, monkeypatch
):
    monkeypatch.setattr("mtrain.decoding.split.WINDOW_CHARACTERS", 5)
    text = f"{SOURCES[0]}\n{SOURCES[1]}\n".encode()
    (tmp_path / "in").write_bytes(text + b"\xff\n")
    job = ["translate", run_dir, "-o", tmp_path / "out", "--device", "cpu"]
    code, _, err = mtrain(*job, "-i", tmp_path / "in")
    assert code == 3 and "in:3: not valid UTF-8" in one_line(err) and len(list(tmp_path.iterdir())) == 1
    stdin(text + b"\xff\n")
    code, _, err = mtrain(*job)
    kept, error = err.splitlines()
    assert code == 3 and "out.part contains the output of 2 lines; use --continue to resume" in kept
    assert error == "error: <stdin>:3: not valid UTF-8 (byte 1 of the line)"
    stdin(text + f"{SOURCES[2]}\n".encode())
    assert mtrain(*job, "--continue")[0] == 0
    assert (tmp_path / "out").read_text() == "".join(f"{target}\n" for target in TARGETS[:3])


def test_the_speed_is_reported_at_the_end(mtrain, run_dir, corpus, monkeypatch):
    monkeypatch.setattr("mtrain.cli.translate.translation_output.REPORT_AFTER", 0)
    job = ["translate", run_dir, "-i", corpus / "train.en", "--device", "cpu", "--workers", 2]
    code, out, err = mtrain(*job)
    speeds = r"[\d,.]+ lines/s, [\d,]+ target tokens/s"
    assert (code, out) == (0, EXPECTED) and re.fullmatch(
        rf"translated 8 lines in [\d.]+ m?s: {speeds}\n", err
    )
    assert mtrain(*job, "--quiet") == (0, EXPECTED, "")


def test_prefixes_are_counted_first(mtrain, run_dir, corpus, tmp_path):
    (tmp_path / "short").write_text("Die\n")
    job = ["translate", run_dir, "--prefix", tmp_path / "short", "--device", "cpu"]
    for given, count in (["-i", corpus / "train.en"], 8), (SOURCES[:2], 2):
        code, out, err = mtrain(*job, *given)
        assert (code, out) == (
            2,
            "",
        ) and f"short: has 1 lines but the input has {count}; give one prefix" in one_line(err)


def test_stdin_is_read_although_a_file_is_called_hyphen(mtrain, run_dir, tmp_path, stdin, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "-").write_text("one\ntwo\n")
    (tmp_path / "prefix").write_text("Es\n")
    stdin(b"It rains.\n")
    job = ["translate", run_dir, "-i", "-", "--prefix", "prefix", "--device", "cpu", "--quiet"]
    assert mtrain(*job) == (0, "Es regnet.\n", "")


def test_an_input_is_never_overwritten(mtrain, run_dir, tmp_path):
    file = tmp_path / "in.en"
    file.write_text("It rains.\n")
    (tmp_path / "link").symlink_to(file)
    other = [tmp_path / "other.en", "--prefix", tmp_path / "link"]
    other[0].write_text("It rains.\n")
    for job in ([file, "-o", tmp_path / "link"], [*other, "-o", file]):
        code, _, err = mtrain("translate", run_dir, "-i", *job, "--device", "cpu")
        assert code == 2 and "this file is also an input" in one_line(err)
    with file.open() as stdin:
        code, _, err = run_forked("translate", run_dir, "-o", file, stdin=stdin.fileno())
    assert code == 2 and "this file is also an input" in one_line(err)
    assert file.read_text() == "It rains.\n"


def test_dev_stdout_is_stdout(run_dir, tmp_path):
    out = tmp_path / "out"
    out.write_text("before\n")
    with out.open("a") as stdout:
        job = ["translate", run_dir, "It rains.", "-o", "/dev/stdout", "--device", "cpu"]
        assert run_forked(*job, stdout=stdout.fileno())[0] == 0
        stdout.write("after\n")
    assert out.read_text() == "before\nEs regnet.\nafter\n"


def test_pipes_are_read_like_files(mtrain, run_dir, tmp_path):
    def pipe(name: str, contents: str) -> Path:
        os.mkfifo(tmp_path / name)
        write = threading.Thread(target=lambda: (tmp_path / name).write_text(contents), daemon=True)
        write.start()
        return tmp_path / name

    job = ["translate", run_dir, "--device", "cpu", "-i", pipe("in", "It rains.\nThe sun shines.\n")]
    job += ["--prefix", pipe("prefix", "Es\nDie\n"), "-o", tmp_path / "out"]
    code, _, err = mtrain(*job, "--continue")
    assert code == 2 and "--continue requires a --prefix that can be read again" in one_line(err)
    page = ["--prefix", tmp_path / "prefix", "--attention", tmp_path / "page.html"]
    code, _, err = mtrain("translate", run_dir, "It rains.", "The sun shines.", *page)
    assert code == 2 and "--attention requires a --prefix that can be read again" in one_line(err)
    assert mtrain(*job)[0] == 0
    assert (tmp_path / "out").read_text() == "Es regnet.\nDie Sonne scheint.\n"


def test_score_prints_log_probabilities_of_given_translations(mtrain, run_dir, corpus, tmp_path):
    job = ["score", run_dir, "-i", corpus / "train.en", "--device", "cpu", "--batch-tokens", 50]
    code, out, _ = mtrain(*job, "--target", corpus / "train.de")
    rows = [line.split("\t") for line in out.split("\n")[:-1]]
    assert code == 0 and len(rows) == 8
    for log_prob, tokens, steps in rows:
        assert float(log_prob) == pytest.approx(sum(map(float, steps.split())), abs=1e-2)
        assert int(tokens) == len(steps.split())
    code, out, _ = mtrain(*job, "--target", corpus / "train.en", "--json", "--ensemble", run_dir)
    wrong = [json.loads(line) for line in out.split("\n")[:-1]]
    assert code == 0 and all(w["tokens"][-1] == "</s>" for w in wrong)
    assert all(w["log_prob"] < float(row[0]) for w, row in zip(wrong, rows, strict=True))
    (tmp_path / "short").write_text("Eine Katze\n")
    job[1] = tmp_path / "missing"  # the lines are counted before the model is loaded
    code, _, err = mtrain(*job, "--target", tmp_path / "short", "--quiet")
    assert code == 3 and "has 8 lines but" in one_line(err)


def test_score_adds_a_column_to_tsv(mtrain, run_dir, corpus, tmp_path):
    sources, targets = ((corpus / f"train.{side}").read_text().splitlines() for side in ("en", "de"))
    targets[1], sources[2] = "Katze", "cat " * 500
    lines = [
        f"{source}\t{target}\t{i}" for i, (source, target) in enumerate(zip(sources, targets, strict=True))
    ]
    for name, texts in (("in.tsv", lines), ("en", sources), ("de", targets)):
        (tmp_path / name).write_text("\r\n".join([*texts, ""]))

    def score(*arguments):
        code, out, _ = mtrain("score", run_dir, "--device", "cpu", *arguments)
        assert code == 0
        return [line.split("\t") for line in out.split("\n")[:-1]]

    def entropies(source, target):
        pairs = score("-i", tmp_path / source, "--target", tmp_path / target)
        return [-float(row[0]) / int(row[1]) if int(row[1]) else math.nan for row in pairs]

    forward, backward = entropies("en", "de"), entropies("de", "en")
    rows = score("--tsv", tmp_path / "in.tsv")
    assert ["\t".join(row[:3]) for row in rows] == lines
    assert [float(row[3]) for row in rows] == pytest.approx(
        [-value for value in forward], abs=1e-4, nan_ok=True
    )
    assert rows[2][3] == "nan" and 2 * float(rows[0][3]) > float(rows[1][3])
    expected = [math.exp(-abs(a - b) - (a + b) / 2) for a, b in zip(forward, backward, strict=True)]
    other = shutil.copytree(run_dir / "model", tmp_path / "de-en")
    config = (other / "config.yaml").read_text()
    languages = "source_lang: en\ntarget_lang: de\n", "source_lang: de\ntarget_lang: en\n"
    assert languages[0] in config
    (other / "config.yaml").write_text(config.replace(*languages))
    (other / "manifest.json").unlink()
    write_manifest(other)
    command = "--tsv", tmp_path / "in.tsv", "--reverse", other, "-o", tmp_path / "scored.tsv.gz"
    assert score(*command) == []
    reverse = "score", run_dir, "--tsv", tmp_path / "in.tsv", "--reverse", run_dir, "--device", "cpu"
    code, _, err = mtrain(*reverse, "--quiet")
    assert code == 2 and "translates into de, not en; it has no language tags" in one_line(err)
    text = gzip.decompress((tmp_path / "scored.tsv.gz").read_bytes()).decode()
    rows = [line.split("\t") for line in text.splitlines()]
    assert [float(row[3]) for row in rows] == pytest.approx(expected, abs=1e-4, nan_ok=True)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--tsv", "t.tsv", "-i", "t.tsv"], 2, "give both -i and --target, or --tsv alone"),
        (["-i", "t.tsv", "--target", "t.tsv", "--reverse", "runs/x"], 2, "--reverse needs --tsv"),
        (["-i", "t.tsv", "--target", "t.tsv", "--quotes"], 2, "--quotes needs --tsv"),
        (["--tsv", "t.tsv", "--json"], 2, "--json and --tsv exclude each other"),
        (["--tsv", "t.tsv", "-o", "t.tsv"], 2, "this file is also an input"),
        (["--tsv", "nowhere.tsv"], 3, "nowhere.tsv: no such file"),
        (["--tsv", "t.tsv"], 3, "t.tsv:2: 1 column(s); at least 2 expected"),
    ],
)
def test_score_needs_two_columns(mtrain, run_dir, tmp_path, monkeypatch, arguments, code, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.tsv").write_text("a\tb\nc\n")
    found, _, err = mtrain("score", run_dir, "--device", "cpu", *arguments, "--quiet")
    assert found == code and message in one_line(err)
    assert (tmp_path / "t.tsv").read_text() == "a\tb\nc\n"


def test_long_lines_are_translated_in_parts_and_stay_one_line(mtrain, run_dir, stdin):
    stdin(b"cat " * 500 + b"\nIt rains.\n")
    code, out, err = mtrain("translate", run_dir, "--device", "cpu")
    assert code == 0 and out.count("\n") == 2 and out.endswith("Es regnet.\n")
    assert "warning: 1 line(s) exceed the limit of 64 tokens and were translated in parts" in err


def test_paragraphs_are_split_into_sentences_if_configured(mtrain, run_dir, tmp_path):
    (tmp_path / "in").write_text("It rains. The sun shines.\n\nA cat sleeps.\n")
    options = ["--device", "cpu", "-i", tmp_path / "in"]
    code, out, err = mtrain("translate", run_dir, *options, "--set", "decoding.split=sentences")
    assert (code, out) == (0, "Es regnet. Die Sonne scheint.\n\nEine Katze schläft.\n")
    assert "in parts" not in err and "may be wrong" not in err
    code, _, err = mtrain("translate", run_dir, *options, "--set", "decoding.split=words")
    assert code == 2 and "decoding.split" in one_line(err) and "sentences" in err


def test_translations_that_may_be_wrong_are_counted_in_one_line(mtrain, run_dir, tmp_path):
    (tmp_path / "in").write_text("\nIt rains.\nTwo women are talking.\nIt rains.\n")
    cut = ["--set", "decoding.max_length_ratio=0", "--set", "decoding.max_length_offset=11"]
    options = ["--device", "cpu", "-i", tmp_path / "in", "-o", tmp_path / "out", "--json", *cut]
    code, _, err = mtrain("translate", run_dir, *options)
    finished = [json.loads(line)["finished"] for line in (tmp_path / "out").read_text().splitlines()]
    assert code == 0 and finished == [True, True, False, True]
    warnings = [line for line in err.splitlines() if "may be wrong" in line]
    assert warnings == [
        "warning: 1 of 4 translations may be wrong: 1 looping or cut at the maximum length (line 3)"
    ]
    code, _, err = mtrain("translate", run_dir, "It rains.", "--device", "cpu")
    assert code == 0 and "may be wrong" not in err


def test_broken_characters_of_any_sample_are_counted(mtrain, run_dir):
    """At a high temperature, most of the eight samples of a line have some."""
    sampling = ["--sample", "--n-best", "8", "--temperature", "20", "--seed", "1"]
    code, out, err = mtrain("translate", run_dir, "It rains.", "--device", "cpu", *sampling)
    assert code == 0 and "\ufffd" in out
    assert "warning: 1 of 1 translations may be wrong: 1 with bytes that are not valid UTF-8 (line 1)" in err


def test_the_prompt_translates_typed_lines(run_dir):
    main_end, terminal = pty.openpty()
    os.write(main_end, b"It rains\xff.\nIt rains.\n\x04")
    code, out, err = run_forked("translate", run_dir, "--device", "cpu", stdin=terminal)
    os.close(main_end)
    os.close(terminal)
    assert code == 0 and out == "Es regnet.\n" and "Type a sentence" in err
    assert "error: It rains\\udcff.: not valid UTF-8" in err


def test_the_prompt_has_no_output_file(mtrain, stdin, monkeypatch, tmp_path):
    stdin(b"")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    code, _, err = mtrain(
        "translate", tmp_path / "no-model", "-o", tmp_path / "out"
    )  # before the model is loaded
    assert code == 2 and "nothing to translate; give TEXT, --input or a pipe" in one_line(err)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--scores", "--json"], "--scores has no effect with --json"),
        (["--continue"], "--continue requires -o FILE"),
        (["--continue", "-o", "/dev/stdout"], "--continue requires -o FILE"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_without_effect_are_errors(mtrain, tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    code, out, err = mtrain("translate", "no-model", "Hi", *options)  # before the model is loaded
    assert (code, out) == (2, "") and message in one_line(err) and not list(tmp_path.iterdir())


NO_SAMPLES = ["--set", "decoding.samples=null"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seed", "7"], "--seed has no effect without --sample; add --sample"),
        (["--temperature", "2"], "--temperature has no effect without --sample"),
        (["--top-k", "5"], "--top-k has no effect without --sample"),
        (["--top-p", "0.5"], "--top-p has no effect without --sample"),
        ([*NO_SAMPLES, "--top-p", "0.5"], "--top-p has no effect without --sample"),
        (["--sample", *NO_SAMPLES], "--sample has no effect with --set decoding.samples=null"),
        (["--sample", "--beam-size", "4"], "--beam-size has no effect on sampling"),
        (["--set", "decoding.samples=2", "--beam-size", "4"], "--beam-size has no effect on sampling"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_of_another_search_are_errors(mtrain, run_dir, tmp_path, options, message):
    job = ["translate", run_dir, "Hi", "--device", "cpu", "-o", tmp_path / "out"]
    code, _, err = mtrain(*job, *options)
    assert code == 2 and message in one_line(err) and not list(tmp_path.iterdir())


def test_options_are_checked_against_the_sampling_that_a_model_is_configured_for(mtrain, run_dir, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(run_dir / "model", model)
    changed(model / "config.yaml", "decoding", samples=2, top_k=3)
    write_manifest(model)
    job = ["translate", model, "It rains.", "--device", "cpu"]
    assert mtrain(*job, "--top-k", 1, "--n-best", 2)[1] == "Es regnet.\n" * 2
    code, _, err = mtrain(*job, "--beam-size", 4)
    assert code == 2 and "--beam-size has no effect on sampling (decoding.samples is 2)" in one_line(err)
    advice = one_line(err).partition("disable sampling with ")[2].split()
    assert advice == [*NO_SAMPLES, "--set", "decoding.top_k=0"]
    assert mtrain(*job, "--beam-size", 4, *advice)[1] == "Es regnet.\n"
    sampled = mtrain(*job, "--set", "decoding.mbr=chrf", "--json")[1]
    assert mtrain(*job, "--set", "decoding.mbr=chrf", "--json", "--sample")[1] == sampled  # as configured


def test_sampling_options_work_with_samples_from_set(mtrain, run_dir):
    job = ["translate", run_dir, "It rains.", "--set", "decoding.samples=2", "--top-k", 1, "--seed", 3]
    assert mtrain(*job, "--n-best", 2, "--device", "cpu")[1] == "Es regnet.\n" * 2


LONG = "x " * 90  # is warned about


def test_an_unwritable_log_does_not_stop_a_command(run_dir, tmp_path):
    job = ["translate", run_dir, "--device", "cpu", "It rains.", LONG, "-o"]
    with Path("/dev/full").open("w") as full:
        for name, stderr in (("full", full.fileno()), ("closed", CLOSED)):
            assert run_forked(*job, tmp_path / name, stderr=stderr)[0] == 0
            lines = (tmp_path / name).read_text().split("\n")
            assert lines[0] == "Es regnet." and len(lines) == 3


@pytest.mark.slow
@pytest.mark.parametrize("redirection", ["2>/dev/full", "2>&-", "<&-", "2>&1 >/dev/null | head -0"])
def test_a_shell_may_redirect_or_close_streams(run_dir, tmp_path, redirection):
    command = f"{sys.executable} -m mtrain translate {run_dir} --device cpu 'It rains.' '{LONG}'"
    command += f" -o {tmp_path}/out {redirection}"
    subprocess.run(command, shell=True, executable="/bin/bash", check=True)
    lines = (tmp_path / "out").read_text().split("\n")
    assert lines[0] == "Es regnet." and len(lines) == 3


def test_an_output_file_keeps_its_link_and_its_permissions(mtrain, run_dir, tmp_path):
    (tmp_path / "target").write_text("old")
    (tmp_path / "target").chmod(0o600)
    (tmp_path / "out").symlink_to("target")
    (tmp_path / ".target.tmp").write_text("precious")
    command = ["translate", run_dir, "--device", "cpu", "It rains.", "-o"]
    assert mtrain(*command, tmp_path / "out")[0] == 0
    assert (tmp_path / "out").is_symlink() and (tmp_path / "target").read_text() == "Es regnet.\n"
    assert (tmp_path / "target").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / ".target.tmp").read_text() == "precious"
    os.mkfifo(tmp_path / "pipe")
    with subprocess.Popen(["cat", str(tmp_path / "pipe")], stdout=subprocess.PIPE, text=True) as reader:
        assert mtrain(*command, tmp_path / "pipe")[0] == 0
        assert reader.communicate(timeout=60)[0] == "Es regnet.\n"
    for place in (tmp_path, tmp_path / "nowhere" / "out", tmp_path / "target" / "out"):
        code, _, err = mtrain(*command, place)
        assert code == 6 and "cannot write" in err and err.count("\n") == 1


def test_the_python_interface_accepts_any_iterable_of_strings(run_dir):
    translator = Translator.load(run_dir, "cpu")
    assert translator.translate([]) == []
    assert [t.text for t in translator.translate(iter(("It rains.", "")))] == ["Es regnet.", ""]
    assert translator.translate("It rains.")[0].text == "Es regnet."
    with pytest.raises(TypeError, match="texts must be strings"):
        translator.translate([1])
