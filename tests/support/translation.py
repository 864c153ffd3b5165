"""A translator of the model that has memorized the pairs, and lines to translate."""

import random
from pathlib import Path

import pytest

from mtrain import Translator
from tests.support.training import PAIRS


@pytest.fixture(scope="module")
def translator(run_dir: Path) -> Translator:
    return Translator.load(run_dir, "cpu")


def words_of(count: int, seed: int = 0) -> list[str]:
    """Lines of 1 to 9 known words that do not occur in training."""
    words, draw = " ".join(source for source, _ in PAIRS).split(), random.Random(seed)
    return [" ".join(draw.choices(words, k=draw.randint(1, 9))) for _ in range(count)]
