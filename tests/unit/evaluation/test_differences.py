"""Word differences of two sentences."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtrain.evaluation.differences import mark_differences

TEXTS = st.text(st.sampled_from("ab .,\u3000\n犬猫é\u0301\u17d2\u1781\u1039\u1000"), max_size=20)


def marked(sentence: str, other: str) -> str:
    """The sentence with its changed spans in brackets."""
    return "".join(f"[{text}]" if changed else text for text, changed in mark_differences(sentence, other))


@pytest.mark.parametrize(
    ("sentence", "other", "expected"),
    [
        ("A dog runs.", "A dog runs.", "A dog runs."),
        ("A black dog runs.", "A dog runs.", "A [black] dog runs."),
        ("A dog runs.", "A black dog runs.", "A dog runs."),
        ("Two old men talk.", "Two women talk!", "Two [old men] talk[.]"),
        ("the Dog", "the dog", "the [Dog]"),
        ("nothing", "", "[nothing]"),
        ("", "nothing", ""),
        ("a  b", "a b", "a  b"),
        ("我喜欢猫。", "我喜欢狗。", "我喜欢[猫]。"),
        ("Größe geändert", "Größe gleich", "Größe [geändert]"),
        ("한국어 문장", "한국어 글", "한국어 [문장]"),
        ("नमस्ते दुनिया।", "नमस्ते दोस्त।", "नमस्ते [दुनिया]।"),
        ("می\u200cخواهم بروم", "می بروم", "[می\u200cخواهم] بروم"),
        ("I \u2764\ufe0flove", "I love", "I [\u2764\ufe0f]love"),
        ("ខ្មែរ", "ខែរ", "[ខ្មែ]រ"),
        ("ဒုက္ခ", "ဒုခ", "ဒု[က္ခ]"),
        ("น้ำดี", "นำดี", "[น้ำ]ดี"),
        ("བོད་ཡིག", "བོད་ཡིད", "བོད་ཡི[ག]"),
        ("𠮷𠮟る", "𠮷る", "𠮷[𠮟]る"),
        ("ｶﾞｽ", "ｶﾞｶ", "ｶﾞ[ｽ]"),
        ("a👩\u200d👧", "a👩", "a[👩\u200d👧]"),
    ],
)
def test_words_that_the_other_sentence_lacks_are_changed(sentence, other, expected):
    assert marked(sentence, other) == expected


@given(TEXTS, TEXTS)
def test_no_text_is_lost_and_what_is_shared_is_the_same_in_both(sentence, other):
    spans = mark_differences(sentence, other)
    assert "".join(span.text for span in spans) == sentence
    shared = Counter("".join(span.text for span in spans if not span.changed))
    assert Counter({c: n for c, n in shared.items() if not c.isspace()}) <= Counter(other)
    assert not any(span.changed for span in mark_differences(sentence, sentence))
