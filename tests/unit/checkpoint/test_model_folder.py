"""Model folders: what they contain, and which are refused."""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file, save_file

from mtrain import Translator
from mtrain.checkpoint.average import average_models
from mtrain.checkpoint.model_folder import load_model, save_model_folder, tokenizer_folder
from mtrain.checkpoint.model_info import ModelInfo, read_info, run_folder_of
from mtrain.errors import ModelError
from mtrain.storage.manifest import write_manifest
from mtrain.tokenizer.tokenizer import Tokenizer
from tests.support.training import PAIRS


def test_a_model_folder_is_self_contained_and_reproducible(run_dir, tmp_path):
    contents = (run_dir / "model/config.yaml").read_text()
    best = json.loads((run_dir / "checkpoints/index.json").read_text())["best"]
    weights = partial(shutil.copyfile, run_dir / "checkpoints" / best / "model.safetensors")
    save_model_folder(
        tmp_path / "copy", weights, contents, Tokenizer(run_dir / "tokenizer"), read_info(run_dir / "model")
    )
    files = {path.relative_to(run_dir / "model") for path in (run_dir / "model").rglob("*") if path.is_file()}
    assert {str(file) for file in files} >= {
        "config.yaml",
        "manifest.json",
        "model.safetensors",
        "tokenizer/joint.model",
    }
    for file in files:
        assert (tmp_path / "copy" / file).read_bytes() == (run_dir / "model" / file).read_bytes()
    assert Translator.load(tmp_path / "copy", "cpu").translate(["It rains."])[0].text == "Es regnet."


def test_a_model_folder_without_the_later_dropout_keys_loads(run_dir, tmp_path):
    contents = (run_dir / "model/config.yaml").read_text()
    older = [line for line in contents.splitlines() if "_dropout:" not in line]
    assert len(older) == len(contents.splitlines()) - 3
    weights, copy = partial(shutil.copyfile, run_dir / "model/model.safetensors"), tmp_path / "copy"
    save_model_folder(copy, weights, "\n".join(older), Tokenizer(run_dir / "tokenizer"), ModelInfo())
    assert load_model(copy).config == load_model(run_dir / "model").config


def test_a_model_folder_with_a_key_that_was_removed_loads(run_dir, tmp_path):
    older = (
        (run_dir / "model/config.yaml")
        .read_text()
        .replace("\nmodel:\n", "\nmodel:\n  initialization: xavier\n")
    )
    assert "initialization" in older
    weights, copy = partial(shutil.copyfile, run_dir / "model/model.safetensors"), tmp_path / "copy"
    save_model_folder(copy, weights, older, Tokenizer(run_dir / "tokenizer"), ModelInfo())
    assert load_model(copy).config == load_model(run_dir / "model").config


def test_only_the_weights_in_the_manifest_are_loaded(run_dir, model_copy):
    shutil.copy(model_copy / "model.safetensors", model_copy / "average.safetensors")
    tensors = load_file(model_copy / "average.safetensors")
    save_file({name: tensor * 0 for name, tensor in tensors.items()}, model_copy / "average.safetensors")
    assert Translator.load(model_copy, "cpu").translate(["It rains."])[0].text == "Es regnet."


def test_a_model_that_is_replaced_while_it_is_loaded_is_not_mixed(model_copy, monkeypatch):
    def replaced(model, weights):
        (model_copy / "manifest.json").write_text("{}")

    monkeypatch.setattr("mtrain.checkpoint.model_folder.load_weights", replaced)
    with pytest.raises(ModelError):
        load_model(model_copy)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("eos_id: 3", "eos_id: 2", "the tokenizer and the model have different special token ids"),
        (
            "target_vocab_size: 330",
            "target_vocab_size: 331",
            "sizes of the tokenizer are 330 and 330, but the model expects 330 and 331",
        ),
        ("d_model: 64", "d_model: 32", "has shape"),
        ("encoder_layers: 2", "encoder_layers: 3", "missing tensors"),
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


def test_any_checkpoint_of_a_run_can_be_loaded(run_dir, tmp_path):
    """Users can translate with, average and fine-tune checkpoints other than the best one."""
    checkpoints = sorted((run_dir / "checkpoints").glob("step-*"))
    assert len(checkpoints) == 2
    for folder in checkpoints:
        loaded, weights = load_model(folder), load_file(folder / "model.safetensors")
        assert all(
            torch.equal(loaded.model.get_parameter(name), torch.from_numpy(weights[name])) for name in weights
        )
        assert loaded.config.model == load_model(run_dir).config.model
        assert tokenizer_folder(folder) == run_dir / "tokenizer"
    average_models(checkpoints, tmp_path / "average")
    ancestors = read_info(tmp_path / "average").origin.ancestors
    assert [ancestor.name for ancestor in ancestors] == [f"by-heart, step-{step:08d}" for step in (100, 200)]
    run = shutil.copytree(run_dir, tmp_path / "run")
    base = {"kind": "imported", "ancestors": [{"name": "nllb", "hub": True}], "license": "cc-by-nc-4.0"}
    (run / "origin.json").write_text(json.dumps({"init_from": "base", "name": "base", "origin": base}))
    average_models([run / "checkpoints" / each.name for each in checkpoints], tmp_path / "tuned")
    assert "license: cc-by-nc-4.0" in (tmp_path / "tuned" / "README.md").read_text()
    copy = shutil.copytree(checkpoints[0], tmp_path / checkpoints[0].name)
    with pytest.raises(ModelError, match=r"is a checkpoint outside of its run"):
        load_model(copy)


def test_the_checkpoints_and_the_model_of_a_run_may_be_links(run_dir, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    for file in run_dir.iterdir():
        (run / file.name).symlink_to(file)
    for name in ("checkpoints", "model"):  # on another disk, with other names
        elsewhere = shutil.copytree(run_dir / name, tmp_path / f"of-{name}")
        (run / name).unlink()
        (run / name).symlink_to(elsewhere)
    checkpoint = next((run / "checkpoints").glob("step-*"))
    assert load_model(checkpoint).tokenizer.fingerprint == load_model(run).tokenizer.fingerprint
    assert run_folder_of(checkpoint) == run_folder_of(run / "model") == run


def test_a_run_whose_checkpoints_were_removed_offers_its_model(run_dir, tmp_path):
    run = shutil.copytree(run_dir, tmp_path / "run")
    shutil.rmtree(run / "checkpoints")
    assert Translator.load(run, "cpu").translate([PAIRS[0][0]])[0].text == PAIRS[0][1]
    assert run_folder_of(run / "model") == run.resolve()
    (run / "config.yaml").write_text(
        "server: {port: 80}\n"
    )  # of another program, which has a copy of the model
    assert run_folder_of(run / "model") is None


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (
            "config.json",
            "is not a model of mtrain; a Hugging Face model can be imported with `mtrain import`",
        ),
        ("model.bin", "is a model for CTranslate2 or Bergamot; give the model that it was exported from"),
    ],
)
def test_models_of_other_programs_are_recognized(tmp_path, file, message):
    (tmp_path / file).touch()
    with pytest.raises(ModelError, match=message):
        load_model(tmp_path)


def test_a_name_on_the_hub_is_no_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ModelError, match="no such model or run folder; a model of the Hugging Face Hub can be"
    ):
        load_model(Path("Helsinki-NLP/opus-mt-en-de"))
