"""The Python environment of the other tools, made on first use: they need versions that mtrain does not."""

import shutil
import subprocess
import sys
from pathlib import Path

import torch

from benchmark.job import JobFailed

# JoeyNMT pins versions that today's torch refuses, so it comes without its dependencies; these are they.
PACKAGES = ["transformers", "numpy", "pyyaml", "tqdm", "packaging", "importlib_metadata"]
PACKAGES += ["tensorboard", "matplotlib", "sentencepiece", "sacrebleu", "subword-nmt", "ctranslate2"]
WITHOUT_DEPENDENCIES = ["joeynmt==2.3.0"]


def torch_version() -> str:
    """The version that mtrain runs on, as PyPI names it."""
    return torch.__version__.partition("+")[0]


def default_folder() -> Path:
    """Where the environment is kept; another version of torch has another."""
    return Path.home() / ".cache" / "mtrain" / "bench" / f"torch-{torch_version()}"


def peer_python(folder: Path) -> str:
    """The interpreter of the environment in `folder`, which is made if it has none. Raises JobFailed."""
    python = folder / "bin" / "python"
    if not python.exists():
        _make(folder)
    return str(python)


def _make(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise JobFailed(f"--peer-env {folder}: is in use, but not by a Python environment; give another")
    print(f"installing the other tools into {folder} (once; some minutes)", file=sys.stderr)
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
    unfinished.rename(folder)  # only bin/python is used, which may be moved; the other scripts may not
