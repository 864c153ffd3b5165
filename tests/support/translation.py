"""A translator of the model that knows every pair."""

from pathlib import Path

import pytest

from mtrain import Translator


@pytest.fixture(scope="module")
def translator(run_dir: Path) -> Translator:
    return Translator.load(run_dir, "cpu")
