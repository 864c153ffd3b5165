"""The mean of models that stem from one another."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file

from mtrain.checkpoint.model_folder import save_model_folder
from mtrain.config.yaml_io import read_yaml_file
from mtrain.decoding.translate import Translator
from mtrain.tokenizer.tokenizer import Tokenizer
from tests.support.paths import ROOT

SCRIPT = ROOT / "scripts/average_models.py"


def average(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True)


@pytest.fixture(scope="module")
def relative(run_dir, tmp_path_factory):
    """Make models a little apart from that of run_dir."""

    def make(seed: int, **sizes: object) -> Path:
        folder, draw = tmp_path_factory.mktemp("relative"), np.random.default_rng(seed)
        tensors = load_file(run_dir / "model/model.safetensors")
        moved = {k: t + draw.normal(0, 0.003, t.shape).astype(t.dtype) for k, t in tensors.items()}
        save_file(moved, folder / "weights")
        raw = read_yaml_file(run_dir / "model/config.yaml")
        raw["model"] |= sizes
        tokenizer = Tokenizer(run_dir / "tokenizer")
        save_model_folder(folder / "model", folder / "weights", yaml.safe_dump(raw), tokenizer)
        return folder / "model"

    return make


def test_it_is_the_mean_and_translates_with_the_settings_of_the_first(run_dir, relative, tmp_path):
    models = [run_dir, relative(1), relative(2, dropout=0.3, max_positions=999)]
    done = average(*models, "-o", tmp_path / "mean")
    assert done.returncode == 0 and not done.stderr
    files = [run_dir / "model", *models[1:], tmp_path / "mean"]
    *each, mean = [load_file(folder / "model.safetensors") for folder in files]
    assert all(tensors.keys() == mean.keys() for tensors in each)
    for name, tensor in mean.items():
        wanted = np.mean([tensors[name].astype(np.float64) for tensors in each], axis=0)
        np.testing.assert_allclose(tensor, wanted, rtol=1e-6)
    assert (tmp_path / "mean/config.yaml").read_bytes() == (run_dir / "model/config.yaml").read_bytes()
    assert Translator.load(tmp_path / "mean", "cpu").translate(["It rains."])[0].text == "Es regnet."


def test_what_cannot_be_averaged_is_one_line(run_dir, relative, tmp_path):
    other = relative(1, heads=8)  # of the same tensors
    done = average(run_dir, other, "-o", tmp_path / "mean")
    said = f"error: {other}: its languages, vocabulary or architecture are not those of {run_dir}\n"
    assert (done.returncode, done.stderr) == (4, said) and not (tmp_path / "mean").exists()
    done = average(run_dir, other, "-o", other)
    assert done.returncode == 2 and "is there already" in done.stderr and done.stderr.count("\n") == 1
    done = average(run_dir, tmp_path / "none", "-o", tmp_path / "mean")
    assert done.returncode == 4 and "no such model" in done.stderr and done.stderr.count("\n") == 1
    done = average(run_dir, "-o", tmp_path / "mean")
    assert done.returncode == 2 and "give two models or more" in done.stderr


def test_a_temporary_file_that_cannot_be_written_is_one_line(run_dir, relative, tmp_path):
    command = [sys.executable, SCRIPT, run_dir, relative(1), "-o", tmp_path / "mean"]
    limited = ["bash", "-c", "trap '' XFSZ; ulimit -f 8; exec \"$@\"", "bash", *map(str, command)]
    done = subprocess.run(limited, capture_output=True, text=True)
    assert done.returncode == 6 and done.stderr.startswith("error: cannot write a temporary file: ")
    assert done.stderr.count("\n") == 1 and not (tmp_path / "mean").exists()
