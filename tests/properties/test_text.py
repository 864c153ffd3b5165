"""Encoding and decoding any Unicode text gives SentencePiece's normalization of it."""

import pytest

from tests.support.tokenizers import ODD, RULES, TYPES, normalized, roundtrip, texts


@pytest.mark.parametrize("normalization", RULES)
@pytest.mark.parametrize("kind", TYPES)
def test_encoding_and_decoding_normalizes(tried, trained, kind, normalization):
    tokenizer = trained(type=kind, normalization=normalization)

    @tried(12, text=texts)
    def check(text):
        assert roundtrip(tokenizer, text).strip(" ") == normalized(tokenizer, text)

    for text in [*ODD, "\n \r"]:
        assert roundtrip(tokenizer, text).strip(" ") == normalized(tokenizer, text), ascii(text)
