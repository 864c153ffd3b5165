"""Copies of a run and of its model folder, which tests may change."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from mtrain.decoding.translate import Translator
from mtrain.runs.results import score_test_sets


@pytest.fixture
def run_copy(run_dir, tmp_path) -> Path:
    """A copy of a finished run."""
    return Path(shutil.copytree(run_dir, tmp_path / "by-heart"))


@pytest.fixture
def model_copy(run_dir, tmp_path) -> Path:
    """A copy of the model folder of that run."""
    return Path(shutil.copytree(run_dir / "model", tmp_path / "copied"))


@pytest.fixture(scope="session")
def scored_run(run_dir, tmp_path_factory) -> Path:
    """A copy of that run, to be left as it is, whose model was scored on its test set, as at the end of
    `mtrain fit`."""
    run = Path(shutil.copytree(run_dir, tmp_path_factory.mktemp("scored") / "by-heart"))
    with Translator.load(run, "cpu") as translator:
        list(score_test_sets(run, translator))
    return run


def card_of(folder: Path) -> Any:
    """The ModelCard in a model folder, as the Hugging Face Hub reads it."""
    return ModelCard((folder / "README.md").read_text(encoding="utf-8"))
