"""Folders that survive crashes and tell when they are damaged; outputs that replace nothing too early."""

import os
import shutil
import subprocess
import sys

import pytest

from mtrain import Translator
from mtrain.checkpoint.model_folder import load_model
from mtrain.errors import ModelError, StorageError
from mtrain.storage.atomic import verify_folder, write_folder, write_manifest
from mtrain.training import loop
from mtrain.training.validate import Scores
from tests.support.training import PAIRS, go, last_checkpoint, losses


def fill(text):
    return lambda folder: (folder / "a").write_text(text)


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path):
    folder = tmp_path / "folder"
    write_folder(folder, fill("old"))

    def fail(new):
        (new / "a").write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(StorageError, match="No space left on device"):
        write_folder(folder, fail)
    verify_folder(folder, ["a"])
    assert (folder / "a").read_text() == "old" and [path.name for path in tmp_path.iterdir()] == ["folder"]
    write_folder(folder, fill("new"))
    assert (folder / "a").read_text() == "new"


def test_a_crash_between_the_renames_loses_nothing(tmp_path):
    folder = tmp_path / "folder"
    write_folder(folder, fill("old"))
    folder.rename(tmp_path / ".folder.old")
    with pytest.raises(KeyError):
        write_folder(folder, lambda _: {}["a bug"])
    assert (folder / "a").read_text() == "old"


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "a").write_text("oll"),
        lambda folder: (folder / "a").write_text("older"),
        lambda folder: (folder / "a").unlink(),
        lambda folder: (folder / "manifest.json").unlink(),
        lambda folder: (folder / "manifest.json").write_text("{}"),
        lambda folder: (folder / "manifest.json").write_text("[" * 100_000),
        lambda folder: (folder / "manifest.json").write_text('{"a": {"size": 3}}'),
        lambda folder: (folder / "manifest.json").write_text('{"../a": {"size": 3, "sha256": ""}, "a": {}}'),
        lambda folder: [(folder / "a").rename(folder / "b"), (folder / "a").symlink_to("b")],
    ],
)
def test_all_damage_is_noticed(tmp_path, damage):
    write_folder(tmp_path / "folder", fill("old"))
    damage(tmp_path / "folder")
    with pytest.raises(ModelError):
        verify_folder(tmp_path / "folder", ["a"])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("eos_id: 3", "eos_id: 2", "special ids are not those of the model"),
        ("target_vocab_size: 330", "target_vocab_size: 331", "the model expects others"),
        ("d_model: 64", "d_model: 32", "the model has"),
        ("encoder_layers: 2", "encoder_layers: 3", "tensors missing"),
        ("norm: pre", "norm: before", "model.norm"),
    ],
)
def test_a_model_folder_whose_parts_disagree_is_refused(run_dir, tmp_path, old, new, message):
    folder = shutil.copytree(run_dir / "model", tmp_path / "model")
    config = (folder / "config.yaml").read_text()
    assert old in config
    (folder / "config.yaml").write_text(config.replace(old, new))
    write_manifest(folder)
    with pytest.raises(ModelError, match=message):
        load_model(folder)


def test_a_run_without_its_model_folder_offers_its_best_checkpoint(run_dir, tmp_path):
    run = shutil.copytree(run_dir, tmp_path / "run")
    shutil.rmtree(run / "model")
    for index in (None, '{"best": 5}', '{"best": "step-00000099"}', '{"best": "../.."}', "[]", "{"):
        if index is not None:
            (run / "checkpoints/index.json").write_text(index)
        assert Translator.load(run, "cpu").translate([PAIRS[0][0]])[0].text == PAIRS[0][1]
    for folder in (run / "checkpoints").glob("step-*"):
        shutil.rmtree(folder)
    with pytest.raises(ModelError, match="no checkpoint yet"):
        load_model(run)


def test_a_damaged_best_checkpoint_is_never_published(make_config, monkeypatch, caplog):
    told = iter([Scores(1.0, 3, 40, 20)] + [Scores(1.0, 3, 10, 20)] * 9)
    monkeypatch.setattr(loop.Validator, "__call__", lambda *_: next(told))
    run = go(make_config())
    weights = run / "checkpoints/step-00000004/model.safetensors"
    good = (run / "model/model.safetensors").read_bytes()
    assert good == weights.read_bytes()
    weights.write_bytes(good[:-100] + bytes(100))
    go(make_config(training={"max_steps": 10}, decoding={"beam_size": 3}))
    assert "model/ stays as it is" in caplog.text
    assert (run / "model/model.safetensors").read_bytes() == good


def test_damaged_data_of_a_run_is_made_anew(make_config, caplog):
    run = go(make_config())
    for name, damage in (("summary.json", b"{"), ("train.arrow", None), ("validation.jsonl", b"")):
        file = run / "data" / name
        contents = bytearray(file.read_bytes())
        contents[len(contents) // 2] ^= 1
        file.write_bytes(contents if damage is None else damage)
        step = int(last_checkpoint(run).name[5:]) + 2
        go(make_config(training={"max_steps": step}))
        assert int(last_checkpoint(run).name[5:]) == step
    assert "encoded again" in caplog.text


def test_a_bad_line_in_the_metrics_is_dropped(make_config):
    run = go(make_config())
    with (run / "metrics.jsonl").open("ab") as stream:
        stream.write(b'\xff\n{"step": 9, "loss"')
    go(make_config(training={"max_steps": 12}))
    assert [step for step, *_ in losses(run)] == [2, 4, 6, 8, 10, 12]


def test_a_file_of_somebody_else_stays_in_the_run_folder(make_config, tmp_path):
    for name in (".mine.tmp", ".project.tmp/notes", "log.txt"):
        (tmp_path / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / name).write_text("precious")
    go(make_config())
    go(make_config(training={"max_steps": 10}))
    assert all((tmp_path / "run" / name).exists() for name in (".mine.tmp", ".project.tmp/notes", "log.txt"))


@pytest.mark.parametrize(
    "redirection",
    [
        "2>/dev/full",
        "2>&-",
        *(pytest.param(r, marks=pytest.mark.slow) for r in ("<&-", "2>&1 >/dev/null | head -0")),
    ],
)
def test_a_log_that_nobody_reads_stops_nothing(run_dir, tmp_path, redirection):
    long = "x " * 90  # is warned about
    command = (
        f"{sys.executable} -m mtrain translate {run_dir} --device cpu 'It rains.' '{long}' -o {tmp_path}/out"
    )
    subprocess.run(f"{command} {redirection}", shell=True, executable="/bin/bash", check=True)
    lines = (tmp_path / "out").read_text().split("\n")
    assert lines[0] == "Es regnet." and len(lines) == 3


def test_an_output_keeps_its_link_its_mode_and_its_neighbours(mtrain, run_dir, tmp_path):
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


def test_the_python_interface_takes_any_strings(run_dir):
    translator = Translator.load(run_dir, "cpu")
    assert translator.translate([]) == []
    assert [t.text for t in translator.translate(iter(("It rains.", "")))] == ["Es regnet.", ""]
    assert translator.translate("It rains.")[0].text == "Es regnet."
    with pytest.raises(TypeError, match="texts must be strings"):
        translator.translate([1])
