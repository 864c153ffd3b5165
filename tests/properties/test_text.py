"""Encoding and decoding any Unicode text gives this text, or the chosen normalization of it."""

import re

import pytest
from hypothesis import strategies as st

from tests.support.tokenizers import CONTROLS, ODD, RULES, TYPES, normalized, roundtrip, texts


@pytest.mark.parametrize("kind", TYPES)
def test_by_default_text_comes_back_as_it_was_written(tried, trained, kind):
    """Except for control characters, for runs of spaces, and for spaces at the ends."""
    tokenizer = trained(type=kind)

    def check_one(text):
        expected = re.sub(" +", " ", text.translate(CONTROLS)).strip(" ")
        assert re.sub(" +", " ", roundtrip(tokenizer, text)).strip(" ") == expected, ascii(text)
        joined = tokenizer.source.join(tokenizer.source.segment([text]))[0]
        assert re.sub(" +", " ", joined.translate(CONTROLS)).strip(" ") == expected, ascii(text)

    @tried(24, text=texts | st.text("ab \u2581\ufdd0\ufdd1", max_size=8))
    def check(text):
        check_one(text)

    for text in [*ODD, "\ufdd0", "\ufdd0\ufdd1\u2581\ufdd1", "م\u200cر", "10\u00a0m²，½"]:
        check_one(text)


@pytest.mark.parametrize("normalization", [rule for rule in RULES if rule != "identity"])
@pytest.mark.parametrize("kind", TYPES)
def test_encoding_and_decoding_normalizes(tried, trained, kind, normalization):
    tokenizer = trained(type=kind, normalization=normalization)

    @tried(12, text=texts)
    def check(text):
        assert roundtrip(tokenizer, text).strip(" ") == normalized(tokenizer, text)

    for text in [*ODD, "\n \r"]:
        assert roundtrip(tokenizer, text).strip(" ") == normalized(tokenizer, text), ascii(text)
