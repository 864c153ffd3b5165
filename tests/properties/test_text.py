"""Text to ids and back is SentencePiece's own normalisation, of any Unicode."""

import pytest
from test_tokenizer import ODD, RULES, TYPES, normalised, roundtrip, texts, trained  # noqa: F401


@pytest.mark.parametrize("normalization", RULES)
@pytest.mark.parametrize("kind", TYPES)
def test_roundtrip_is_normalisation(tried, trained, kind, normalization):  # noqa: F811
    tokenizer = trained(type=kind, normalization=normalization)

    @tried(25, text=texts)
    def check(text):
        assert roundtrip(tokenizer, text).strip(" ") == normalised(tokenizer, text)

    for text in [*ODD, "\n \r"]:
        assert roundtrip(tokenizer, text).strip(" ") == normalised(tokenizer, text), ascii(text)
