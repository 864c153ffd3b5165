"""A translator of the model that has memorized the pairs, and lines to translate."""

import random
from pathlib import Path

import pytest

from mtrain import Translator
from mtrain.decoding.workers import Workers
from tests.support.training import PAIRS


@pytest.fixture(scope="module")
def translator(run_dir: Path) -> Translator:
    return Translator.load(run_dir, "cpu")


def words_of(count: int, seed: int = 0) -> list[str]:
    """Lines of 1 to 9 known words that do not occur in training."""
    words, draw = " ".join(source for source, _ in PAIRS).split(), random.Random(seed)
    return [" ".join(draw.choices(words, k=draw.randint(1, 9))) for _ in range(count)]


def interrupt_third_window(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Make the windows of lines short, and press Ctrl-C when the third one is to be decoded. The list that is
    returned has an entry for each window."""
    real, windows = Workers.decode, list[int]()

    def interrupted(self, *arguments):
        windows.append(1)
        if len(windows) == 3:
            raise KeyboardInterrupt
        return real(self, *arguments)

    monkeypatch.setattr("mtrain.decoding.split.WINDOW_CHARACTERS", 60)
    monkeypatch.setattr(Workers, "decode", interrupted)
    return windows
