"""Faults of output files: two commands write the same one, or other users read it."""

import multiprocessing
import os
import shutil
import stat
from pathlib import Path

import pytest

from mtrain.cli import main
from mtrain.errors import UsageError
from mtrain.storage.atomic import replacing, write_atomically, write_new_folder, write_text
from mtrain.storage.manifest import verify_folder
from tests.support.faults.processes import start, wait


def test_39_a_folder_that_is_being_written_is_refused_and_left_alone(tmp_path):
    out = tmp_path / "new" / "out"

    def fill(folder: Path) -> None:
        write_text(folder / "a", "first")
        with pytest.raises(
            UsageError, match="out: another process is writing this folder; wait, or give ano"
        ):
            write_new_folder(out, lambda other: write_text(other / "a", "second"))

    write_new_folder(out, fill)
    verify_folder(out, ["a"])
    assert (out / "a").read_text() == "first" and [path.name for path in out.parent.iterdir()] == ["out"]
    with pytest.raises(UsageError, match="already exists and is not overwritten"):
        write_new_folder(out, lambda folder: write_text(folder / "a", "third"))
    assert (out / "a").read_text() == "first" and [path.name for path in out.parent.iterdir()] == ["out"]


def test_39_a_folder_whose_writer_failed_or_was_killed_can_be_written_again(tmp_path):
    with pytest.raises(KeyError):
        write_new_folder(tmp_path / "out", lambda _: {}["a bug"])
    assert not [*tmp_path.iterdir()]
    assert wait(start(lambda: write_new_folder(tmp_path / "out", lambda _: os._exit(9)))).exit_code == 9
    write_new_folder(tmp_path / "out", lambda folder: write_text(folder / "a", "second"))
    verify_folder(tmp_path / "out", ["a"])
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_39_two_writers_of_a_file_do_not_mix(tmp_path):
    file = tmp_path / "info.json"
    with replacing(file) as first:
        write_text(first, "first, which is long")
        write_atomically(file, "second")
        assert file.read_text() == "second"
    assert file.read_text() == "first, which is long" and [*tmp_path.iterdir()] == [file]


@pytest.mark.slow
@pytest.mark.parametrize("command", ["average", "export", "init"])
def test_39_of_two_commands_that_start_together_one_writes_the_output(run_dir, corpus, tmp_path, command):
    arguments = {
        "average": ["average", run_dir, run_dir, "-o", "out"],
        "export": ["export", run_dir, "out", "--format", "ctranslate2"],
        "init": ["init", corpus / "train.en", corpus / "train.de", "--yes", "-o", "out/config.yaml"],
    }[command]
    barrier, codes = multiprocessing.Barrier(2), []

    def work() -> None:
        os.chdir(tmp_path)
        barrier.wait()
        main([str(argument) for argument in arguments])

    def code_of(child: int) -> int:
        return wait(child).exit_code

    for _ in range(50):
        if command == "init":
            (tmp_path / "out").mkdir()
        codes.append(sorted(map(code_of, [start_command(work), start_command(work)])))
        if command == "init":
            assert "train.en" in (tmp_path / "out/config.yaml").read_text()
        else:
            verify_folder(tmp_path / "out", ["model.bin" if command == "export" else "model.safetensors"])
        assert [path.name for path in tmp_path.iterdir()] == ["out"]
        shutil.rmtree(tmp_path / "out")
    allowed = ([0, 2], [0, 0]) if command == "init" else ([0, 2],)
    assert all(pair in allowed for pair in codes), codes


def start_command(work) -> int:
    """Start a command whose exit code is the exit code of the process."""

    def run() -> None:
        try:
            work()
        except SystemExit as end:
            os._exit(int(end.code or 0))

    return start(run)


@pytest.mark.slow
@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_49_the_umask_decides_who_can_read_what_commands_write(
    mtrain, config_file, corpus, tmp_path, monkeypatch, umask
):
    (tmp_path / "written").mkdir(mode=0o777 & ~umask)
    monkeypatch.chdir(tmp_path / "written")
    sides, cpu = (corpus / "train.en", corpus / "train.de"), ("--device", "cpu")
    marian = ("--set", "model.norm=post", "--set", "training.max_steps=2")
    commands: list[list[object]] = [
        ["init", *sides, "--yes", "-o", "c.yaml"],
        ["prepare", config_file, "--run-dir", "r", "--set", "data.folder=data"],
        ["fit", config_file, "--run-dir", "r", "--set", "data.folder=data", *marian, *cpu],
        ["fit", config_file, "--run-dir", "ema", *marian, "--set", "training.ema_decay=0.9", *cpu],
        ["average", "r", "r", "-o", "models/mean"],
        ["export", "r", "exported/hf", "--format", "marian"],
        ["export", "r", "exported/ct2", "--format", "ctranslate2"],
        ["import", "exported/hf", "models/imported"],
        ["translate", "r", "-i", sides[0], "-o", "o.txt", *cpu],
        ["translate", "r", "-i", sides[0], "-o", "o.gz", *cpu],
        ["evaluate", "r", "--compare", "ema", "--sentence-scores", "s.tsv", "--html", "e.html", *cpu],
        ["report", "r", "-o", "report.html"],
        [
            "clean",
            config_file,
            "-o",
            "clean.tsv",
            "--rejected",
            "rejected.tsv",
            "--set",
            "data.filters={max_ratio: 3}",
        ],
        ["score", "r", "-i", sides[0], "--target", sides[1], "-o", "scores.txt", *cpu],
    ]
    before = os.umask(umask)
    try:
        for command in commands:
            code, _, err = mtrain(*command)
            assert code == 0, (command, err)
    finally:
        os.umask(before)
    written = {str(path.relative_to(Path.cwd())): path for path in Path.cwd().rglob("*")}
    assert {
        "o.gz",
        "clean.tsv",
        "r/model/model.safetensors",
        "data/shard-00000.safetensors",
    } <= written.keys()
    modes = {name: stat.S_IMODE(path.stat().st_mode) for name, path in written.items()}
    usual = {True: 0o777 & ~umask, False: 0o666 & ~umask}
    assert not {name: oct(mode) for name, mode in modes.items() if mode != usual[written[name].is_dir()]}
