"""Faults of loaded files: crafted folders and tensors that do not fit."""

import json
import os
import re
import resource
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mtrain.checkpoint.checkpoint import load_checkpoint, open_checkpoint
from mtrain.checkpoint.model_folder import load_model
from mtrain.checkpoint.tensors import load_tensors
from mtrain.config.sections.training import TrainingConfig
from mtrain.errors import ModelError
from mtrain.regular_files import MAX_CONFIG_BYTES, MAX_JSON_BYTES
from mtrain.storage.manifest import write_manifest
from mtrain.training.step.optimizer import make_optimizer
from tests.support.faults.processes import run_in_child
from tests.support.training import fit_on_cpu, last_checkpoint


@pytest.fixture
def folder(run_dir, tmp_path) -> Path:
    return Path(shutil.copytree(run_dir / "model", tmp_path / "model"))


def change_tensors(folder: Path, change) -> None:
    """Change the tensors of a model folder and rewrite its manifest to match."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    write_manifest(folder)


SIZES = {"d_model": 16384, "ffn_dim": 65536, "encoder_layers": 256, "max_positions": 1000000000}


def test_25_sizes_that_disagree_with_the_weights_allocate_no_memory(folder, tmp_path):
    """Loading a crafted folder may not use more memory than loading a valid one."""
    config = (folder / "config.yaml").read_text()
    for key, value in SIZES.items():
        crafted = Path(shutil.copytree(folder, tmp_path / key))
        (crafted / "config.yaml").write_text(re.sub(rf"{key}: \d+", f"{key}: {value}", config))
        write_manifest(crafted)

    def load() -> None:
        load_model(folder)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        lines = []
        for key in SIZES:
            try:
                load_model(tmp_path / key)
                lines.append("loaded")
            except ModelError as error:
                lines.append(str(error))
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        (tmp_path / "found.json").write_text(json.dumps([*lines, grown]))

    assert run_in_child(load) == 0
    *lines, grown = json.loads((tmp_path / "found.json").read_text())
    assert grown < 100_000  # KiB
    found = [re.search("has shape|missing tensors|loaded", line)[0] for line in lines]
    assert found == ["has shape", "has shape", "missing tensors", "loaded"]  # sinusoids are not stored


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t["encoder_norm.bias"].fill_(float("nan")), "encoder_norm.bias contains NaN"),
        (lambda t: t["encoder_norm.bias"].fill_(float("-inf")), "encoder_norm.bias contains NaN"),
        (lambda t: t.pop("encoder_norm.bias"), r"missing tensors: \['encoder_norm.bias'\]"),
        (lambda t: t.update(extra=torch.ones(3)), r"unexpected tensors: \['extra'\]"),
        (
            lambda t: t.update({"encoder_norm.bias": torch.ones(3)}),
            r"encoder_norm.bias has shape \[3\]; expected",
        ),
        (lambda t: t.update({"encoder_norm.bias": torch.ones(64).long()}), "or integers"),
    ],
)
def test_26_tensors_that_do_not_fit_are_named(folder, change, message):
    change_tensors(folder, change)
    with pytest.raises(ModelError, match=message):
        load_model(folder)


def test_26_half_precision_weights_are_converted_to_fp32(folder):
    change_tensors(folder, lambda tensors: tensors.update({n: t.half() for n, t in tensors.items()}))
    model = load_model(folder).model
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert all(parameter.requires_grad and not parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("contents", [b"", b"\x00" * 7, b"\xff" * 64, (2**60).to_bytes(8, "little") + b"{}"])
def test_25_a_damaged_safetensors_header_is_an_error(folder, contents):
    (folder / "model.safetensors").write_bytes(contents)
    write_manifest(folder)
    with pytest.raises(ModelError, match="cannot read"):
        load_model(folder)


class Pickled:
    """Creates a file when it is unpickled."""

    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


@pytest.mark.parametrize("zipped", [True, False])
def test_25_a_pickle_is_never_read(folder, tmp_path, zipped):
    saved = {"encoder_norm.bias": Pickled(tmp_path / "executed")}
    torch.save(saved, folder / "model.safetensors", _use_new_zipfile_serialization=zipped)
    write_manifest(folder)
    for load in (lambda: load_model(folder), lambda: load_tensors(folder / "model.safetensors")):
        with pytest.raises(ModelError, match="cannot read"):
            load()
    assert not (tmp_path / "executed").exists()


def test_25_a_yaml_tag_in_a_config_is_never_executed(folder, tmp_path):
    config = (folder / "config.yaml").read_text()
    tag = f"source_lang: !!python/object/apply:os.mkdir [{tmp_path}/executed]"
    (folder / "config.yaml").write_text(config.replace("source_lang: en", tag))
    write_manifest(folder)
    with pytest.raises(ModelError, match="not valid YAML"):
        load_model(folder)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    "name", ["../stray", "/etc/hostname", "tokenizer/../../stray", "a\0b", "loop", "link"]
)
def test_25_a_file_outside_the_folder_is_refused(folder, name):
    (folder.parent / "stray").write_text("a")
    (folder / "link").symlink_to("../stray")
    write_manifest(folder)
    (folder / "loop").symlink_to("loop")
    entries = json.loads((folder / "manifest.json").read_text())
    entries[name] = entries["link"]
    if name != "link":
        del entries["link"]
    (folder / "manifest.json").write_text(json.dumps(entries, indent=1, sort_keys=True) + "\n")
    with pytest.raises(ModelError, match="is a link or is outside the folder"):
        load_model(folder)


@pytest.mark.parametrize("target", ["../stray", "pipe"])
@pytest.mark.parametrize("name", ["tokenizer/joint.model", "config.yaml", "manifest.json"])
def test_25_a_link_or_a_pipe_that_the_manifest_does_not_list_is_refused(folder, name, target):
    (folder / name).rename(folder.parent / "stray")
    if target == "pipe":
        os.mkfifo(folder / name)  # reading from it would block forever
    else:
        (folder / name).symlink_to(folder.parent / "stray")
    if name != "manifest.json":
        entries = json.loads((folder / "manifest.json").read_text())
        del entries[name]
        (folder / "manifest.json").write_text(json.dumps(entries, indent=1, sort_keys=True) + "\n")
    if (name, target) != ("manifest.json", "../stray"):  # a link to a valid manifest is harmless
        with pytest.raises(ModelError, match=r"does not list|not a regular file"):
            load_model(folder)


def test_25_a_huge_json_file_is_refused_without_reading_it(run_dir, tmp_path):
    folder = Path(shutil.copytree(run_dir, tmp_path / "run")) / "checkpoints/step-00000200"
    state = (folder / "state.json").read_text()
    open_checkpoint(folder)
    (folder / "state.json").write_text(state + " " * MAX_JSON_BYTES)
    write_manifest(folder)
    with pytest.raises(ModelError, match=r"state\.json: .*too large: .* bytes, at most 4,194,304 expected"):
        open_checkpoint(folder)
    (folder / "manifest.json").write_text("{}" + " " * MAX_JSON_BYTES)
    with pytest.raises(ModelError, match=r"manifest\.json: .*too large: .* bytes"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop("exp_avg.encoder_norm.bias"),
            "exp_avg.encoder_norm.bias is missing or does not fit",
        ),
        (
            lambda t: t.update({"step.encoder_norm.bias": torch.ones(2)}),
            "step.encoder_norm.bias is missing or",
        ),
    ],
)
def test_26_an_optimizer_that_does_not_fit_is_refused(run_dir, tmp_path, change, message):
    folder = Path(shutil.copytree(run_dir, tmp_path / "run")) / "checkpoints/step-00000200"
    tensors = load_file(folder / "optimizer.safetensors")
    change(tensors)
    save_file(tensors, folder / "optimizer.safetensors")
    write_manifest(folder)
    model = load_model(run_dir).model
    optimizer = make_optimizer(model, TrainingConfig(max_steps=1))
    with pytest.raises(ModelError, match=message):
        load_checkpoint(open_checkpoint(folder), model, optimizer)


def test_26_a_random_state_of_another_generator_is_refused(run_dir, tmp_path):
    folder = Path(shutil.copytree(run_dir, tmp_path / "run")) / "checkpoints/step-00000200"
    state = json.loads((folder / "state.json").read_text())
    state["rng"]["cpu"] += "00"
    (folder / "state.json").write_text(json.dumps(state))
    write_manifest(folder)
    model = load_model(run_dir).model
    with pytest.raises(ModelError, match="not a valid state of a random generator"):
        load_checkpoint(open_checkpoint(folder), model, make_optimizer(model, TrainingConfig(max_steps=1)))


def test_26_averaged_weights_that_do_not_fit_are_refused(make_config):
    run = fit_on_cpu(make_config(training={"ema_decay": 0.9}))
    folder = last_checkpoint(run)
    save_file({"other": torch.ones(3)}, folder / "average.safetensors")
    write_manifest(folder)
    with pytest.raises(ModelError, match="its tensors do not match the model"):
        fit_on_cpu(make_config(training={"ema_decay": 0.9, "max_steps": 10}))


@pytest.mark.parametrize("kind", ["pipe", "file"])
def test_25_averaged_weights_that_the_manifest_does_not_list_are_not_read(run_dir, tmp_path, kind):
    run = Path(shutil.copytree(run_dir, tmp_path / "run"))
    shutil.rmtree(run / "model")
    for checkpoint in (run / "checkpoints").glob("step-*"):
        if kind == "pipe":
            os.mkfifo(checkpoint / "average.safetensors")  # reading from it would block forever
        else:
            shutil.copy(checkpoint / "model.safetensors", checkpoint / "average.safetensors")
        with pytest.raises(ModelError, match=r"does not list average\.safetensors"):
            open_checkpoint(checkpoint)
    with pytest.raises(ModelError, match=r"does not list average\.safetensors"):
        load_model(run)


@pytest.mark.parametrize("target", ["pipe", "/dev/zero", "loop"])
def test_25_a_run_whose_config_is_not_a_regular_file_is_refused(run_dir, tmp_path, target):
    run = Path(shutil.copytree(run_dir, tmp_path / "run"))
    shutil.rmtree(run / "model")
    (run / "config.yaml").unlink()
    if target == "pipe":
        os.mkfifo(run / "config.yaml")
    else:
        (run / "config.yaml").symlink_to("config.yaml" if target == "loop" else target)
    with pytest.raises(ModelError, match=r"config\.yaml: (a named pipe|cannot read the config)"):
        load_model(run)


def test_25_a_huge_config_is_refused_without_reading_it(folder):
    with (folder / "config.yaml").open("ab") as stream:
        stream.write(b"\n# " + b"x" * MAX_CONFIG_BYTES)
    write_manifest(folder)
    with pytest.raises(ModelError, match=r"config\.yaml: cannot be read: too large: .*, at most 262,144 "):
        load_model(folder)
