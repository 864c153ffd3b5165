"""Sides of a corpus that are exchanged, or not in the languages of the config."""

import sys

import pytest

from mtrain.config.languages import Direction
from mtrain.data.reading.files import toy_pairs
from mtrain.data.scanning.side_languages import find_wrong_languages

ENGLISH, FRENCH = (list(side)[:200] for side in zip(*toy_pairs("train"), strict=True))
RUSSIAN = ["Это предложение написано по-русски, чтобы мы могли это проверить."] * 20
CHINESE = ["猫在垫子上睡觉，狗在院子里散步。"] * 20


@pytest.mark.parametrize("is_installed", [True, False])
def test_exchanged_sides(monkeypatch, is_installed):
    if not is_installed:
        monkeypatch.setitem(sys.modules, "py3langid", None)
    cure = "the sources seem to be in {} and the targets in {}; exchange the two sides"
    assert find_wrong_languages(RUSSIAN, ENGLISH, Direction("en", "ru")) == cure.format("ru", "en")
    assert find_wrong_languages(CHINESE, RUSSIAN, Direction("ru", "zh-TW")) == cure.format("zh-TW", "ru")
    found = find_wrong_languages(FRENCH, ENGLISH, Direction("en", "fr"))
    assert found == (cure.format("fr", "en") if is_installed else "")


@pytest.mark.parametrize(
    ("sources", "targets", "languages", "found"),
    [
        (ENGLISH, FRENCH, ("en", "de"), "the targets seem to be in language fr, not in de; check the files"),
        (ENGLISH, RUSSIAN, ("en", "fr"), "the targets seem to be in language ru, not in fr; check the files"),
        (RUSSIAN[:2], CHINESE, ("ja", "zh"), "the sources seem to be in CYRILLIC script, not in ja; check"),
        (RUSSIAN, CHINESE, ("de", "fr"), "the sources seem to be in language ru, not in de and the targets"),
        (ENGLISH, FRENCH, ("en", "fr"), ""),
        (ENGLISH, FRENCH, ("eng_Latn", "fr-CA"), ""),
        (RUSSIAN, CHINESE, ("ru", "zho_Hans"), ""),
        (RUSSIAN, CHINESE, ("tlh", "haw-Hans"), ""),
        (ENGLISH, ENGLISH, ("en", "en-GB"), ""),
        (["Ja."], ["Yes."], ("en", "de"), ""),
        ([], [], ("en", "de"), ""),
    ],
)
def test_wrong_languages(sources, targets, languages, found):
    wrong = find_wrong_languages(sources, targets, Direction(*languages))
    assert wrong.startswith(found) and bool(wrong) == bool(found)
