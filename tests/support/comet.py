"""A virtual environment with a stand-in for the `comet` package."""

import subprocess
import sys
from pathlib import Path

import pytest

# The functions of unbabel-comet 2.2.7 that are called. The score is the share of the words of the source and
# the reference that are in the translation.
COMET = """
from types import SimpleNamespace
__version__ = "0.0"

def download_model(name):
    print("downloading", name)  # as libraries do; must not reach the scores
    if "missing" in name:
        raise KeyError(f"Model '{name}' not supported by COMET.")
    return f"/cache/{name}.ckpt"

def load_from_checkpoint(path):
    assert path.endswith(".ckpt")
    print("loaded", path)
    return Model()

class Model:
    def predict(self, samples, batch_size=16, gpus=1, accelerator="auto", progress_bar=True):
        assert (gpus, accelerator, progress_bar) == (0, "cpu", False)
        return SimpleNamespace(scores=[share(sample) for sample in samples])

def share(sample):
    words = sample["src"].split() + sample["ref"].split()
    return sum(word in sample["mt"].split() for word in words) / len(words)
"""
TORCH = "class cuda:\n    is_available = staticmethod(lambda: False)\n"


@pytest.fixture(scope="session")
def comet_environment(tmp_path_factory) -> Path:
    """A virtual environment, as `set_up_comet` makes it, with the stand-in."""
    folder = tmp_path_factory.mktemp("comet") / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    [packages] = folder.glob("lib/python*/site-packages")
    (packages / "comet.py").write_text(COMET)
    (packages / "torch.py").write_text(TORCH)
    return folder
