"""The bundled toy corpus."""

import pytest

from mtrain.config.corpora import ToyCorpus
from mtrain.data.reading.corpus import content_hash
from mtrain.data.reading.toy import Split, toy_pairs


def test_it_has_three_splits() -> None:
    assert {split: len(toy_pairs(split)) for split in ("train", "validation", "test")} == {
        "train": 5000,
        "validation": 300,
        "test": 300,
    }
    assert toy_pairs("test")[0] == ("I like oranges.", "J'aime les oranges.")


@pytest.mark.parametrize(
    ("split", "digest"),
    [
        ("train", "2590ddb720b74a464d82c8d67762cd39a117b46a712d6756a478c841ad660421"),
        ("validation", "371072ac61fba81de73f4c7fef563b1012e54c0ba69fe3706bdb8737f882f118"),
        ("test", "9d396d9e6797a29cf6fc48a5b49be8588eb9e4b0dd430f24595e55e40306958e"),
    ],
)
def test_its_content_never_changes(split: Split, digest: str) -> None:
    """Run folders record this hash, and a run refuses to resume on other data."""
    assert content_hash(ToyCorpus(toy=split)) == digest
