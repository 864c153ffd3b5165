"""The bundled toy corpus: its generator writes it, and no held-out sentence can be translated from memory."""

import re
from itertools import combinations
from pathlib import Path

import pytest
from make_toy_corpus import SIZES, write_corpus

from mtrain.data.reading.files import TOY_FOLDER, ToySplit, toy_pairs


def test_the_bundled_files_are_what_the_generator_writes(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    for split, size in SIZES.items():
        assert (tmp_path / f"{split}.tsv").read_bytes() == (TOY_FOLDER / f"{split}.tsv").read_bytes()
        assert len({pair.source for pair in toy_pairs(split)}) == size


def test_splits_share_no_source_and_no_target() -> None:
    for one, other in combinations(map(toy_pairs, SIZES), 2):
        assert {pair.source for pair in one}.isdisjoint(pair.source for pair in other)
        assert {pair.target for pair in one}.isdisjoint(pair.target for pair in other)


def words(text: str) -> set[str]:
    return set(re.findall(r"[\w'-]+|[.,?]", text))


@pytest.mark.parametrize("split", ["validation", "test"])
def test_training_has_every_word_of_the_held_out_sentences(split: ToySplit) -> None:
    for side in (0, 1):
        trained = {word for pair in toy_pairs("train") for word in words(pair[side])}
        assert not {word for pair in toy_pairs(split) for word in words(pair[side])} - trained
