"""Changes to text: letter case, final punctuation, typing errors, noise."""

import random
import unicodedata
from collections import Counter

import pytest
import regex

from mtrain.config.sections.augment import Augment
from mtrain.data.rewriting.augment import CHANGES, Side, change_pair, noise, with_cases
from mtrain.tokenizer.vocabulary import pattern_of
from tests.support.tokenizers import SOURCE

ENGLISH, GERMAN, TAGGED = Side("en"), Side("de"), Side("en", pattern_of(["<2de>", "<2de-at>"]))
ANY = random.Random(1)


@pytest.mark.parametrize(
    ("language", "text", "upper", "title"),
    [
        ("en", "don't (go), please.", "DON'T (GO), PLEASE.", "Don't (Go), Please."),
        (
            "en",
            "«a» well-known  McDonald 3rd",
            "«A» WELL-KNOWN  MCDONALD 3RD",
            "«A» Well-known  McDonald 3rd",
        ),
        ("de", "große Straße", "GROSSE STRASSE", "Große Straße"),
        ("tr", "iyi ılık", "İYİ ILIK", "İyi Ilık"),
        ("az", "ijevan", "İJEVAN", "İjevan"),
        ("en", "iyi", "IYI", "Iyi"),
        ("crh", "iyi ılık", "İYİ ILIK", "İyi Ilık"),
        ("tat-Latn", "iyi", "IYI", "Iyi"),
        # Greek capitals have no accents, except for the word "ή".
        ("el", "καλή μέρα", "ΚΑΛΗ ΜΕΡΑ", "Καλή Μέρα"),
        ("ell", "ο Οδυσσέας ή η Μαΐου, ρόιδι, café", "Ο ΟΔΥΣΣΕΑΣ Ή Η ΜΑΪΟΥ, ΡΟΪΔΙ, CAFÉ", None),
        ("grc", "ἐν ἀρχῇ ἦν ὁ λόγος", "ΕΝ ΑΡΧΗΙ ΗΝ Ο ΛΟΓΟΣ", None),
        ("en", "μέρα", "ΜΈΡΑ", "Μέρα"),
        ("hy", "մարդիկ և երևան", "ՄԱՐԴԻԿ ԵՎ ԵՐԵՎԱՆ", "Մարդիկ Եվ Երևան"),
        ("hyw", "երևան", "ԵՐԵՒԱՆ", "Երևան"),
        ("nl", "het ijs (ijskoud) bij", "HET IJS (IJSKOUD) BIJ", "Het IJs (IJskoud) Bij"),
        ("en", "ijs", "IJS", "Ijs"),
        ("haw", "ʻokina", "ʻOKINA", "ʻOkina"),
        ("ff-Adlm", "𞤢𞤣𞤤𞤢𞤥 𞤥𞤢", "𞤀𞤁𞤂𞤀𞤃 𞤃𞤀", "𞤀𞤣𞤤𞤢𞤥 𞤃𞤢"),
        ("en", "𐐨𐐩", "𐐀𐐁", "𐐀𐐩"),
        ("en", "ｆｕｌｌ", "ＦＵＬＬ", "Ｆｕｌｌ"),
        ("chr", "ꭰꭱ", "ᎠᎡ", "Ꭰꭱ"),
        ("ms", "selamat pagi", "SELAMAT PAGI", "Selamat Pagi"),
        ("ru", "мир", "МИР", "Мир"),
        ("hr", "ǆep", "ǄEP", "ǅep"),
        ("zh", "我用iPhone拍照", "我用iPhone拍照", "我用iPhone拍照"),
        ("ka", "კარგი დღე", "ᲙᲐᲠᲒᲘ ᲓᲦᲔ", "კარგი დღე"),  # capitals only in texts in capitals
        ("ar", "مرحبا", "مرحبا", "مرحبا"),
        ("en", "12 + 3", "12 + 3", "12 + 3"),
        ("en", "", "", ""),
    ],
)
def test_letter_case_changes_in_scripts_that_have_it(language: str, text: str, upper: str, title: str | None):
    side = Side(language)
    assert side.change("uppercase", text, ANY) == upper
    if title is not None:
        assert side.change("titlecase", text, ANY) == title


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("It rains.", "It rains"),
        ("Really?! ", "Really"),
        ("Wait ...", "Wait"),
        ("Vraiment\u00a0?", "Vraiment"),
        ("下雨了。", "下雨了"),
        ("यह एक है।", "यह एक है"),
        ("བོད། །", "བོད"),
        ("ខ្មែរ៕", "ខ្មែរ"),
        ("አማርኛ፡፡", "አማርኛ"),
        ("ߒߞߏ߹", "ߒߞߏ"),
        ("ᱚᱞ᱾", "ᱚᱞ"),
        ("Ինչո՞ւ։", "Ինչո՞ւ"),
        ("שלום׃", "שלום"),
        ("مرحبا؟!", "مرحبا"),
        ("Was‽", "Was"),
        ("no end", "no end"),
        ("a. b", "a. b"),
        ('He said "yes."', 'He said "yes."'),
        ("...", "..."),
        ("", ""),
    ],
)
def test_final_punctuation_is_removed(text: str, expected: str):
    assert ENGLISH.change("drop_final_punctuation", text, ANY) == expected


@pytest.mark.parametrize("name", CHANGES)
def test_symbols_are_never_changed(name: str):
    for seed in range(30):
        text = "<2de-at> the dog <2de> runs in the <2de>park."
        changed = TAGGED.change(name, text, random.Random(seed))
        assert changed != text
        assert changed.startswith("<2de-at>") and changed.count("<2de>") == 2, changed
    many = "<2de>" * 3000 + " a dog."  # more than there are placeholders
    assert TAGGED.change(name, many, ANY) == many


def test_typing_errors_change_a_few_letters_and_depend_on_the_generator_only():
    counts = Counter[int]()
    for number, text in enumerate(SOURCE[:300]):
        one, two = (ENGLISH.change("typos", text, random.Random(number)) for _ in range(2))
        assert one == two
        distance = _distance(one, text)
        counts[distance] += 1
        assert distance <= 2 * max(1, round(len(text.split()) / 10)), (text, one)
        assert set(one) <= {*text, *"qwertyuiopasdfghjklzxcvbnm", *"QWERTYUIOPASDFGHJKLZXCVBNM"}
    assert counts[0] < 15  # an omitted letter may have been doubled, for example
    long = " ".join(["house"] * 100)
    assert 10 < _distance(ENGLISH.change("typos", long, random.Random(3)), long) <= 20
    for text in ("", "a", "12 34.", "🙂🙂", "कि"):
        assert ENGLISH.change("typos", text, ANY) == text


def _distance(one: str, other: str) -> int:
    """The number of insertions, deletions and replacements between two texts."""
    row = list(range(len(other) + 1))
    for i, a in enumerate(one, start=1):
        before, row = row, [i]
        for j, b in enumerate(other, start=1):
            row.append(min(before[j] + 1, row[-1] + 1, before[j - 1] + (a != b)))
    return row[-1]


def test_a_wrong_letter_is_a_neighbor_on_the_keyboard_or_from_the_same_text():
    for seed in range(200):
        assert set(ENGLISH.change("typos", "ff", random.Random(seed))) <= set("fdgrv ")
        assert set(ENGLISH.change("typos", "мирный", random.Random(seed))) <= set("мирный ")


@pytest.mark.parametrize(
    ("language", "text"),
    [("hi", "क्या हिन्दी"), ("he", "שָׁלוֹם עוֹלָם"), ("th", "ที่นั่นซื้อผู้"), ("en", "e\u0301a\u0300")],
)
def test_marks_stay_with_their_letters(language: str, text: str):
    letters = {" ", *regex.findall(r"\p{L}\p{M}*", text)}
    for seed in range(200):
        wrong = Side(language).change("typos", text, random.Random(seed))
        assert {*regex.findall(r"\p{L}\p{M}*|.", wrong)} <= letters, wrong


def test_text_without_spaces_has_as_many_typing_errors_as_other_text():
    text = "".join(map(chr, range(0x4E00, 0x4E00 + 300)))
    distances = [_distance(Side("zh").change("typos", text, random.Random(seed)), text) for seed in range(3)]
    assert all(7 < distance <= 20 for distance in distances)


def test_both_sides_change_alike_but_typing_errors_are_in_the_source_only():
    sides = ENGLISH, GERMAN

    def changed(name: str, source: str, *targets: str):
        return change_pair(name, source, list(targets), sides, random.Random(4))

    assert changed("uppercase", "a dog.", "ein Hund.", "Hund!") == ("A DOG.", ["EIN HUND.", "HUND!"])
    assert changed("uppercase", "NATO", "Nato") == ("NATO", ["Nato"])
    assert changed("uppercase", "猫", "cat") == ("猫", ["cat"])
    assert changed("uppercase", "cat", "猫") == ("CAT", ["猫"])
    assert changed("titlecase", "a dog.", "ein Hund.") == ("A Dog.", ["Ein Hund."])
    assert changed("drop_final_punctuation", "Oh!", "Oh!", "Ach.") == ("Oh", ["Oh", "Ach"])
    assert changed("drop_final_punctuation", "Oh", "Oh!") == ("Oh", ["Oh!"])
    assert changed("drop_final_punctuation", "Oh!", "Oh") == ("Oh!", ["Oh"])
    source, targets = changed("typos", "a small dog", "ein kleiner Hund")
    assert source != "a small dog" and targets == ["ein kleiner Hund"]


def test_noise_consists_of_printable_characters_of_many_kinds():
    generator = random.Random(1)
    texts = [noise(generator) for _ in range(500)]
    assert texts == [noise(again) for again in [random.Random(1)] for _ in range(500)]
    assert all(text and text.split(" ") == text.split() and len(text) <= 6 * 5 + 5 for text in texts)
    characters = set("".join(texts)) - {" "}
    assert {unicodedata.category(character)[0] for character in characters} == {"L", "S"}
    assert len(characters) > 1000 and len(set(texts)) > 450


def test_the_sample_for_a_tokenizer_has_the_same_case_on_both_sides():
    augment = Augment(uppercase=0.2, titlecase=0.3, typos=1, drop_final_punctuation=1)
    side = Side("en", pattern_of(["<bt>"]))
    texts = ["<bt> a small dog runs."] * 2000
    sources, targets = (list(with_cases(texts, side, augment, seed=1)) for _ in range(2))
    assert sources == targets
    counts = Counter(sources)
    assert counts.keys() == {texts[0], "<bt> A Small Dog Runs.", "<bt> A SMALL DOG RUNS."}
    assert (
        abs(counts["<bt> A SMALL DOG RUNS."] - 400) < 60 and abs(counts["<bt> A Small Dog Runs."] - 480) < 70
    )
    assert list(with_cases(texts, side, augment, seed=2)) != sources
