"""Model folders: what they contain, and how they are published."""

import json

from mtrain import Translator
from mtrain.checkpoint.model_folder import load_model, save_model_folder
from mtrain.tokenizer.tokenizer import Tokenizer
from tests.support.training import go


def test_a_model_folder_is_self_contained_and_reproducible(run_dir, tmp_path):
    contents = (run_dir / "model/config.yaml").read_text()
    best = json.loads((run_dir / "checkpoints/index.json").read_text())["best"]
    weights = run_dir / "checkpoints" / best / "model.safetensors"
    save_model_folder(tmp_path / "copy", weights, contents, Tokenizer(run_dir / "tokenizer"))
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
    weights, copy = run_dir / "model/model.safetensors", tmp_path / "copy"
    save_model_folder(copy, weights, "\n".join(older), Tokenizer(run_dir / "tokenizer"))
    assert load_model(copy).config == load_model(run_dir / "model").config


def test_a_stale_model_folder_is_published_again(make_config):
    run = go(make_config())
    good = (run / "model/model.safetensors").read_bytes()
    (run / "model/model.safetensors").write_bytes(b"stale")
    (run / "model/manifest.json").write_text("{}")
    go(make_config())  # a finished run
    assert (run / "model/model.safetensors").read_bytes() == good
    go(make_config(decoding={"beam_size": 2, "max_length_ratio": 1.4}))
    assert load_model(run).config.decoding.beam_size == 2
    assert load_model(run).config.decoding.max_length_ratio == 1.4
