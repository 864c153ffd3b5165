"""Moses' normalization of punctuation, compared with sacremoses."""

import random
from importlib.util import find_spec

import pytest

from mtrain.tokenizer.punctuation import normalize_punctuation, normalized_offsets

AROUND = ["a", "B", "1", " ", "\xa0", "  ", "é", "\t", "."]
MARKS = [*"\r()%:;`'\"„“”–—´‘’‚…«»?!,.[]/-", "nº", "ºC", "cm", "''", "´´", "``"]


def lines(count: int) -> list[str]:
    generator = random.Random(5)
    return ["".join(generator.choices(AROUND + MARKS, k=generator.randint(0, 20))) for _ in range(count)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("„Ja“, sagte er…", '"Ja," sagte er...'),
        ("He’s here — now", "He's here - now"),
        ("« Oui »", '"Oui"'.replace("O", " O").replace("i", "i ")),
        ("«\xa0Oui\xa0»", '"Oui"'),
        ("10\xa0000 ( ten ) ; 5 %", "10.000 (ten); 5%"),
        ("  plain text.  ", "plain text."),
    ],
)
def test_punctuation_becomes_ascii(text: str, expected: str) -> None:
    assert normalize_punctuation(text) == expected


@pytest.mark.skipif(find_spec("sacremoses") is None, reason="needs sacremoses")
def test_texts_are_normalized_as_by_sacremoses() -> None:
    from sacremoses import MosesPunctNormalizer

    theirs = MosesPunctNormalizer("en")
    for line in lines(300):
        assert normalize_punctuation(line) == theirs.normalize(line), line


def test_offsets_point_to_the_characters_before_normalization() -> None:
    for line in lines(300):
        text, offsets = normalized_offsets(line)
        assert text == normalize_punctuation(line) and len(offsets) == len(text) + 1
        assert offsets == sorted(offsets) and all(0 <= i <= len(line) for i in offsets)
        for character, i in zip(text, offsets, strict=False):
            assert not character.isalnum() or line[i] == character
