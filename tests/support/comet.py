"""A virtual environment with a stand-in for the `comet` package."""

import subprocess
import sys
from pathlib import Path

import pytest

# The functions of unbabel-comet 2.2.7 that are called. The score is the share of the words of the source and
# the reference that are in the translation.
COMET = r"""
import os, signal
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
    if "environment" in path:
        global __version__
        of_ranks = ("RANK", "LOCAL_", "WORLD_", "MASTER_", "TORCHELASTIC_")
        alone = os.getsid(0) == os.getpid() and not any(name.startswith(of_ranks) for name in os.environ)
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
        __version__ = f"alone: {alone}, HF_HOME={os.environ.get('HF_HOME')}, GPUs={gpus}"
    return Model(path.removesuffix(".ckpt").rpartition("broken/")[2])

ANSWERS = {"text": b"Loading...\n", "number": b"5\n", "bytes": b"\xe9\n", "other": b'{"loss": 1}\n',
           "words": b'["high"]\n', "few": b"[]\n", "nan": b"[NaN]\n"}

class Model:
    def __init__(self, fault):
        self.fault = fault

    def predict(self, samples, batch_size=16, gpus=1, accelerator="auto", progress_bar=True):
        assert (gpus, accelerator, progress_bar) in ((0, "cpu", False), (1, "gpu", False))
        if gpus and not os.environ.get("CUDA_VISIBLE_DEVICES", "0"):
            raise RuntimeError("No supported gpu backend found!")  # as Lightning does
        if samples[0]["src"] == "break":
            self.fail()
        return SimpleNamespace(scores=[share(sample) for sample in samples])

    def fail(self):
        if self.fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        os.write(3, ANSWERS.get(self.fault, b""))  # the copy of stdout that the program has made
        os._exit(0)

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
