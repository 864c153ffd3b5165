"""The characters that a normalization changes, compared with SentencePiece's normalization of whole texts."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mtrain.data.scanning.normalization import ChangeCounter
from mtrain.tokenizer.vocabulary import make_normalizer

# Letters that compose with each other or with marks, and characters that normalization replaces or removes.
COMPOSING = "aeoEq,é " + "\u0301\u0302\u0323\u0340\u034f" + "ｶガか\uff9e\u3099" + "한하\u1112\u1161\u11ab"
SCRIPTS = (
    "ﷺآ\u0627\u0653\u064e"
    + "कक़\u093c\u093f"
    + "\u09c7\u09be"
    + "ไทำ\u0e49"
    + "\u17c1"
    + "\U00011935\U00011930\U00016d63\U00016d67"
)
REPLACED = "，。“…²Å½ﬁ\u00a0\u2009\u200b\u200c\u200d\ufeff\ufffd\u3000" + "👍🏽"


@pytest.mark.parametrize("rule", ["nmt_nfkc", "nfkc"])
def test_a_text_has_changes_if_and_only_if_normalization_changes_it(rule: str):
    normalizer = make_normalizer(rule)
    assert normalizer is not None
    counter = ChangeCounter(normalizer)

    @given(st.text(st.sampled_from(COMPOSING + SCRIPTS + REPLACED), max_size=6))
    @example("q\u0323\u0302\u0301")
    def check(text: str) -> None:
        assert bool(counter.count([text])) == (normalizer.Normalize(text) != text)

    check()


def count(rule: str, *texts: str) -> dict[tuple[str, str], int]:
    return dict(ChangeCounter(make_normalizer(rule)).count(texts))


def test_characters_are_counted_as_a_reader_sees_them():
    found = count("nmt_nfkc", "e\u0301 e\u0301\u0334", "\u1112\u1161\u11ab", "q\u0323\u0302")
    assert found == {("e\u0301", "é"): 2, ("\u1112\u1161\u11ab", "한"): 1}
    # What joins a letter is counted without it. Texts do not join each other.
    assert count("nmt_nfkc", "می\u200cخواهم", "کتاب\u200cها", "é", "\u0301") == {("\u200c", " "): 2}
    assert count("nfkc", "m² km²，") == {("²", "2"): 2, ("，", ","): 1}


def test_spaces_and_ascii_characters_are_not_counted():
    assert count("nmt_nfkc", "  two  spaces ", "\ttab", "  é  è ", "\x01") == {}
    assert count("nmt_nfkc", "10\u00a0%", "\u3000") == {("\u00a0", " "): 1, ("\u3000", " "): 1}


def test_lowercasing_alone_is_wished_for():
    assert count("nmt_nfkc_cf", "ÄRGER, ΣΊΣΥΦΟΣ, Ǆ") == {("Ǆ", "dž"): 1}
    assert count("nfkc_cf", "E\u0301") == {("E\u0301", "é"): 1}


def test_identity_has_no_normalizer():
    assert make_normalizer("identity") is None
