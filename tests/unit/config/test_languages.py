"""Language codes that are completed to the codes of a model."""

import weakref

import pytest

from mtrain.config.language_names import find_language
from mtrain.config.languages import base_language, find_code, scripts_of_language
from mtrain.errors import UsageError

NLLB = [
    "ace_Arab",
    "ace_Latn",
    "arb_Arab",
    "deu_Latn",
    "eng_Latn",
    "pes_Arab",
    "zho_Hans",
    "zho_Hant",
    "zsm_Latn",
]
M2M = ["de", "en", "pt", "zh"]


@pytest.mark.parametrize(
    ("given", "known", "expected"),
    [
        ("deu_Latn", NLLB, "deu_Latn"),
        ("deu", NLLB, "deu_Latn"),
        ("de", NLLB, "deu_Latn"),
        ("de-AT", NLLB, "deu_Latn"),
        ("ar", NLLB, "arb_Arab"),
        ("fa", NLLB, "pes_Arab"),
        ("ms", NLLB, "zsm_Latn"),
        ("zh-Hant", NLLB, "zho_Hant"),
        ("ace_latn", NLLB, "ace_Latn"),
        ("deu_Latn", M2M, "de"),
        ("pt-BR", M2M, "pt"),
        ("pt-BR-abl1943", M2M, "pt"),  # a variant
        ("zh-Hant-TW", ["zh-Hans", "zh-Hant"], "zh-Hant"),
        ("zh_Hant_HK", ["zho_Hans", "zho_Hant"], "zho_Hant"),
        ("sr-Latn", ["sr", "de"], "sr"),
        ("ca-valencia", ["cat_Latn", "deu_Latn"], "cat_Latn"),
        ("ku", ["ckb_Arab", "kmr_Latn"], "kmr_Latn"),
    ],
)
def test_a_code_is_completed_if_one_fits(given: str, known: list[str], expected: str) -> None:
    assert find_code(given, known) == expected


@pytest.mark.parametrize(
    ("given", "known", "message"),
    [
        ("zh", NLLB, "several codes of the model fit: zho_Hans, zho_Hant; give one"),
        ("ace", NLLB, "ace_Arab, ace_Latn"),
        ("deu_Latx", NLLB, "no such language; did you mean deu_Latn?"),
        ("dex", NLLB, "did you mean deu_Latn?"),
        ("xx", M2M, "its codes are such as de, en, pt, zh"),
    ],
)
def test_other_codes_are_errors(given: str, known: list[str], message: str) -> None:
    with pytest.raises(UsageError) as error:
        find_code(given, known)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("with_script", "expected"), [("ii-Yiii", "YI"), ("sr_Cyrl", "CYRILLIC"), ("ja-Kana", "CJK")]
)
def test_a_code_may_name_the_script(with_script: str, expected: str) -> None:
    assert scripts_of_language(with_script) == (expected,)


def test_the_script_of_an_unknown_language_is_unknown() -> None:
    assert (scripts_of_language("fr"), scripts_of_language("ja")) == (("LATIN",), ("CJK",))
    assert scripts_of_language("jp") == scripts_of_language("cn") == ()


def test_memory_is_bounded_however_many_words_are_asked_for() -> None:
    class Word(str):
        """A text whose end can be seen."""

    word = Word("no language")
    seen = weakref.ref(word)
    assert base_language(word) == word
    assert find_language(word) is None
    del word
    for number in range(5000):
        base_language(f"x{number}")
        find_language(f"x{number}")
    assert seen() is None
