"""Shifts of one side against the other, and sides that are exchanged or in other languages, are found;
aligned corpora cause no false alarms."""

import random
import sys

import pytest

from mtrain.config.languages import Direction
from mtrain.data.reading.blocks import Block
from mtrain.data.reading.files import toy_pairs
from mtrain.data.scanning.sides import find_shifts, find_wrong_languages

SOURCES, TARGETS = (list(side) for side in zip(*toy_pairs("train"), strict=True))


def numbered(count):
    """Sentences of equal length that can only be told apart by their numbers."""
    numbers = random.Random(1).sample(range(1000, 9999), count)
    return [f"He has {n} dogs." for n in numbers], [f"Er hat {n} Hunde." for n in numbers]


def in_chinese(texts):
    """Text in another script, about a third as long."""
    return ["".join(map(chr, range(0x4E00, 0x4E00 + max(1, len(text) // 3)))) for text in texts]


def shifts_of(sources, targets):
    """The index of the first pair of each shift, the end and the number of lines."""
    numbers = range(1, len(sources) + 1)
    found = find_shifts(Block([*sources], [*targets], numbers, {}, "file"))
    ends = [int(shift.last.removeprefix("file:")) for shift in found]
    return [(end - shift.pairs, end, shift.lines) for end, shift in zip(ends, found, strict=True)]


def length(pair):
    return len(pair[0]), pair


CORPORA = {
    "sentences": (SOURCES, TARGETS),
    "other script": (SOURCES, in_chinese(TARGETS)),
    "sorted by length": tuple(zip(*sorted(zip(SOURCES, TARGETS, strict=True), key=length), strict=True)),
    "equal lengths": numbered(3000),
    "sorted": tuple(zip(*sorted(zip(*numbered(3000), strict=True), key=str), strict=True)),
}


def insert(texts, place, count):
    """Insert additional lines, and remove as many at the end."""
    return [*texts[:place], *texts[:count], *texts[place:]][: len(texts)]


@pytest.mark.parametrize("name", CORPORA)
@pytest.mark.parametrize("size", [20, 50, 100, 200, 1000, None])
def test_aligned_pairs_are_not_shifted(name, size):
    sources, targets = (side[:size] for side in CORPORA[name])
    assert {lines for _, _, lines in shifts_of(sources, targets)} <= {0}
    shuffled = random.Random(2).sample(targets, len(targets))
    assert not any(lines for _, _, lines in shifts_of(sources, shuffled))


@pytest.mark.parametrize("name", ["sentences", "other script"])
@pytest.mark.parametrize("size", [1000, None])
@pytest.mark.parametrize("order", [sorted, lambda texts: random.Random(2).sample(texts, len(texts))])
def test_sides_in_different_orders_are_found(name, size, order):
    sources, targets = (side[:size] for side in CORPORA[name])
    assert shifts_of(sources, order(targets)) == [(0, len(sources), None)]


@pytest.mark.parametrize("name", CORPORA)
@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 0.7, 0.9])
@pytest.mark.parametrize("lines", [1, -1, 2, -10, 10])
def test_a_shift_is_found_where_it_begins(name, share, lines):
    sources, targets = CORPORA[name]
    place = int(share * len(sources))
    if lines > 0:
        targets = insert(targets, place, lines)
    else:
        sources = insert(sources, place, -lines)
    [(first, end, found)] = [shift for shift in shifts_of(sources, targets) if shift[2]]
    assert found == lines and abs(first - place) <= 250 and end == len(sources)


def test_a_part_of_a_corpus_is_shifted():
    targets = [*TARGETS[:1000], *TARGETS[1001:3000], "Trop.", *TARGETS[3000:]]
    [(first, end, lines)] = [shift for shift in shifts_of(SOURCES, targets) if shift[2] != 0]
    assert lines == -1
    assert abs(first - 1000) <= 250 and abs(end - 3000) <= 250


@pytest.mark.parametrize("size", [50, 100, 200])
def test_a_small_corpus_that_is_shifted(size):
    assert [lines for _, _, lines in shifts_of(SOURCES[: size - 1], TARGETS[1:size])] == [-1]


@pytest.mark.parametrize(
    ("sources", "targets"),
    [([], []), (["a"], ["b"]), ([""] * 300, [""] * 300), (["It rains."] * 3000, ["Es regnet."] * 3000)],
)
def test_texts_that_tell_nothing(sources, targets):
    assert not any(lines for _, _, lines in shifts_of(sources, targets))


# ------------------------------------------------------------------------------------------------ languages

ENGLISH, FRENCH = (list(side)[:200] for side in zip(*toy_pairs("train"), strict=True))
RUSSIAN = ["Это предложение написано по-русски, чтобы мы могли это проверить."] * 20
NORWEGIAN = ["Hunden løper fort gjennom parken, og barna leker på stranden om sommeren."] * 20
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
    found = find_wrong_languages(NORWEGIAN, ENGLISH, Direction("en", "nb"))  # which py3langid calls no
    assert found == (cure.format("nb", "en") if is_installed else "")


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
