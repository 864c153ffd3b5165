"""Hashes of texts, and their normalization."""

import re

import numpy as np
import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st

from mtrain.data.text.hashes import common, hash_normalized, hash_pairs, hash_texts, unique

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0")) | st.text(
    "aA ß_½²İ!-é、カ\u0301", max_size=9
)
MARKS = regex.findall(r"(?V1)[[\p{Mn}\p{Mc}]--\p{Variation_Selector}]", "".join(map(chr, range(0x40000))))
NO_WORD = re.compile(rf"[^\w{''.join(MARKS)}]+")
KEYS = st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 5)).map(lambda keys: np.array(keys, np.uint64))


@given(texts=st.lists(TEXT), known=st.lists(TEXT))
def test_texts_with_the_same_words_have_the_same_hash(texts: list[str], known: list[str]):
    """Whatever the texts before and after them."""
    words = [NO_WORD.sub(" ", text.casefold()).strip() or text for text in texts]
    hashes = hash_normalized(texts).tolist()
    assert [hashes.index(each) for each in hashes] == [words.index(each) for each in words]
    assert hash_normalized([*known, *texts, *known]).tolist()[len(known) : len(known) + len(texts)] == hashes


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("वह जाता है।", "वह जाती है", False),  # he goes, she goes
        ("เขามา", "เข้ามา", False),
        ("שֶׁל", "של", False),
        ("Ὀδυσσεύς", "ὀδυσσεύσ!", True),
        ("☺\ufe0f ok", "OK", True),
        ("می\u200cروم", "می روم", True),
    ],
)
def test_marks_of_letters_distinguish_words(one: str, other: str, same: bool):
    first, second = hash_normalized([one, other]).tolist()
    assert (first == second) == same


@given(texts=st.lists(TEXT))
def test_only_equal_texts_have_the_same_hash(texts: list[str]):
    assert len(set(hash_texts(texts).tolist())) == len(set(texts))


def test_the_hash_of_a_text_never_changes():
    """A text has the same hash in all processes."""
    assert hash_texts(["", "é"]).tolist() == [0x2D06800538D394C2, 0xF7940A006CF10CB3]


def test_a_pair_and_its_reverse_have_different_hashes():
    a, b = hash_texts(["a"]), hash_texts(["b"])
    assert len({hash_pairs(*sides).item() for sides in ((a, a), (a, b), (b, a), (b, b))}) == 4


@given(keys=KEYS, wanted=KEYS)
def test_sets_of_keys(keys: np.ndarray, wanted: np.ndarray):
    assert unique(keys).tolist() == sorted(set(keys.tolist()))
    assert set(common(keys, unique(wanted)).tolist()) == set(keys.tolist()) & set(wanted.tolist())
