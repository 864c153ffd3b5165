"""`mtrain average`."""

import resource
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file

from mtrain.checkpoint.model_folder import save_model_folder
from mtrain.checkpoint.model_info import ModelInfo
from mtrain.config.yaml_io import read_yaml_file
from mtrain.tokenizer.tokenizer import Tokenizer
from tests.support.cli import one_line, run_forked


@pytest.fixture(scope="module")
def relative(run_dir, tmp_path_factory):
    """Make models that differ a little from the model of run_dir."""

    def make(seed: int, languages: dict[str, str] | None = None, **sizes: object) -> Path:
        folder, draw = tmp_path_factory.mktemp("relative"), np.random.default_rng(seed)
        tensors = load_file(run_dir / "model/model.safetensors")
        moved = {k: t + draw.normal(0, 0.003, t.shape).astype(t.dtype) for k, t in tensors.items()}
        raw = read_yaml_file(run_dir / "model/config.yaml")
        raw |= languages or {}
        raw["model"] |= sizes
        tokenizer = Tokenizer(run_dir / "tokenizer")
        write_weights = partial(save_file, moved)
        save_model_folder(folder / "model", write_weights, yaml.safe_dump(raw), tokenizer, ModelInfo())
        return folder / "model"

    return make


def test_average_has_the_mean_weights_and_the_settings_of_the_first_model(
    mtrain, run_dir, relative, tmp_path
):
    models = [run_dir, relative(1), relative(2, dropout=0.3, max_positions=999)]
    code, out, err = mtrain("average", *models, "-o", tmp_path / "mean")
    assert (code, out) == (0, "") and f"mtrain translate {tmp_path / 'mean'} 'Hello.'" in err
    files = [run_dir / "model", *models[1:], tmp_path / "mean"]
    *each, mean = [load_file(folder / "model.safetensors") for folder in files]
    assert all(tensors.keys() == mean.keys() for tensors in each)
    for name, tensor in mean.items():
        wanted = np.mean([tensors[name].astype(np.float64) for tensors in each], axis=0)
        np.testing.assert_allclose(tensor, wanted, rtol=1e-6)
    assert (tmp_path / "mean/config.yaml").read_bytes() == (run_dir / "model/config.yaml").read_bytes()
    assert mtrain("translate", tmp_path / "mean", "It rains.", "--device", "cpu")[1] == "Es regnet.\n"


def test_set_changes_the_settings_of_the_average(mtrain, run_dir, relative, tmp_path):
    job = ["average", run_dir, relative(1), "-o", tmp_path / "mean", "--quiet"]
    assert mtrain(*job, "--set", "decoding.beam_size=7") == (0, "", "")
    assert read_yaml_file(tmp_path / "mean/config.yaml")["decoding"]["beam_size"] == 7


def test_unknown_languages_and_regions_do_not_prevent_an_average(mtrain, run_dir, relative, tmp_path):
    models = [relative(1, {"source_lang": "und"}), run_dir, relative(2, {"target_lang": "de-AT"})]
    assert mtrain("average", *models, "-o", tmp_path / "mean", "--quiet")[0] == 0
    raw = read_yaml_file(tmp_path / "mean/config.yaml")
    assert (raw["source_lang"], raw["target_lang"]) == ("en", "de")


def test_a_model_of_unknown_languages_does_not_join_those_of_others(mtrain, relative, tmp_path):
    models = [relative(1, {"source_lang": "und"}), relative(2), relative(3, {"source_lang": "fr"})]
    code, _, err = mtrain("average", *models, "-o", tmp_path / "mean")
    assert code == 4 and f"{models[2]}: its languages (fr-de, not en-de) are not the same" in one_line(err)
    code, _, err = mtrain("translate", models[0], "x", "--ensemble", models[1], "--ensemble", models[2])
    assert (
        code == 4
        and f"{models[2]}: its languages (fr-de, not en-de) are not the same as in {models[1]}"
        in one_line(err)
    )


@pytest.mark.parametrize(
    ("settings", "differing"),
    [
        ({"target_lang": "fr"}, "languages (en-fr, not en-de)"),
        ({"language_tags": "target"}, "language tags (target, not none)"),
    ],
)
def test_models_of_other_languages_are_not_averaged(mtrain, run_dir, relative, tmp_path, settings, differing):
    code, _, err = mtrain("average", run_dir, relative(1, settings), "-o", tmp_path / "mean")
    assert code == 4 and f"its {differing} are not the same as in the models before it" in one_line(err)


def test_models_that_cannot_be_averaged_are_named(mtrain, run_dir, relative, tmp_path):
    other = relative(1, heads=8)  # tensors of the same shapes
    code, _, err = mtrain("average", run_dir, other, "-o", tmp_path / "mean")
    reason = "its model settings are not the same as in the models before it"
    assert (
        code == 4
        and one_line(err) == f"error: {other}: {reason}; only models that share them can be averaged\n"
    )
    assert not (tmp_path / "mean").exists()
    code, _, err = mtrain("average", run_dir, other, "-o", other)
    assert code == 2 and str(other) in one_line(err)  # exists and is not overwritten
    code, _, err = mtrain("average", run_dir, tmp_path / "none", "-o", tmp_path / "mean")
    assert code == 4 and "no such model" in one_line(err)
    code, _, err = mtrain("average", run_dir, "-o", tmp_path / "mean")
    assert code == 2 and "average needs two models or more" in one_line(err)


def test_an_average_needs_no_folder_for_temporary_files(mtrain, run_dir, relative, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    assert mtrain("average", run_dir, relative(1), "-o", tmp_path / "mean", "--quiet") == (0, "", "")


def test_weights_that_cannot_be_written_are_a_storage_error(run_dir, relative, tmp_path):
    other, limits = relative(1), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))  # bytes
    try:
        code, _, err = run_forked("average", run_dir, other, "-o", tmp_path / "mean")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 6 and f"{tmp_path / 'mean'}: cannot write: " in one_line(err)
    assert not (tmp_path / "mean").exists()
