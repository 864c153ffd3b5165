"""The bundled toy corpus, English to French. `scripts/make_toy_corpus.py` generates it and describes it."""

from pathlib import Path
from typing import Literal

from mtrain.data import Pair

FOLDER = Path(__file__).parents[1] / "toy"

Split = Literal["train", "validation", "test"]


def toy_pairs(split: Split) -> list[Pair]:
    """The sentence pairs of a split: 5,000 for training, 300 for validation and 300 for test."""
    text = (FOLDER / f"{split}.tsv").read_text(encoding="utf-8")
    return [Pair(*line.split("\t")) for line in text.splitlines()]
