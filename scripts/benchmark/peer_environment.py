"""The Python environment of the other tools, made on first use; they need other versions than mtrain."""

import shutil
import subprocess
import sys
from pathlib import Path

import torch

from benchmark.job import JobFailed

# JoeyNMT pins versions that conflict with a current torch, so its dependencies are listed here instead.
PACKAGES = ["transformers", "numpy", "pyyaml", "tqdm", "packaging", "importlib_metadata"]
PACKAGES += ["tensorboard", "matplotlib", "sentencepiece", "sacrebleu", "subword-nmt", "ctranslate2"]
WITHOUT_DEPENDENCIES = ["joeynmt==2.3.0"]


def torch_version() -> str:
    """The version of torch that mtrain uses, as on PyPI."""
    return torch.__version__.partition("+")[0]


def default_folder() -> Path:
    """The folder of the environment; each version of torch has one."""
    return Path.home() / ".cache" / "mtrain" / "bench" / f"torch-{torch_version()}"


def peer_python(folder: Path) -> str:
    """The interpreter of the environment in `folder`, which is made if missing. Raises JobFailed."""
    python = folder / "bin" / "python"
    if not python.exists():
        _make(folder)
    return str(python)


def _make(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise JobFailed(f"--peer-env {folder}: exists and is not a Python environment; choose another folder")
    print(f"installing the other tools into {folder} (once, takes some minutes)", file=sys.stderr)
    unfinished = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    install = [str(unfinished / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    install += ["--disable-pip-version-check"]
    wanted = f"torch=={torch_version()}"
    for command in (
        [sys.executable, "-m", "venv", str(unfinished)],
        [*install, wanted, *PACKAGES],
        [*install, "--no-deps", *WITHOUT_DEPENDENCIES],
    ):
        if subprocess.run(command, stdout=sys.stderr).returncode:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise JobFailed(f"cannot make the environment of the other tools: {' '.join(command)} failed")
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)  # bin/python works after a move, other scripts would not
