"""A translator with the model of the small corpus."""

from pathlib import Path

import pytest

from mtrain import Translator


@pytest.fixture(scope="module")
def translator(run_dir: Path) -> Translator:
    return Translator.load(run_dir, "cpu")
