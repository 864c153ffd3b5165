"""Tokenizers trained on the toy corpus."""

import unicodedata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st

from mtrain.config.load import validate
from mtrain.config.sections.tokenizer import TokenizerConfig
from mtrain.data.reading.files import toy_pairs
from mtrain.tokenizer.learn import train_tokenizer
from mtrain.tokenizer.rows import Rows
from mtrain.tokenizer.sampling import Resegment
from mtrain.tokenizer.tokenizer import Tokenizer

PAIRS = toy_pairs("train")[:2000]
SOURCE, TARGET = [pair.source for pair in PAIRS], [pair.target for pair in PAIRS]
TYPES = ["unigram", "bpe"]
RULES = ["nmt_nfkc", "nfkc", "nmt_nfkc_cf", "nfkc_cf", "identity"]
CONTROLS = {c: " " for c in range(0x100) if unicodedata.category(chr(c)) == "Cc"}  # all that exist
SPACE = "\u2581"  # how SentencePiece writes a space


def train(folder: Path, source=SOURCE, target=TARGET, seed: int = 1, **keys) -> Tokenizer:
    """Train a tokenizer, by default on the toy corpus."""
    config = validate(TokenizerConfig, {"vocab_size": 400, **keys}, "tokenizer")
    train_tokenizer(config, lambda: source, lambda: target, folder, seed)
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory):
    """Train a tokenizer with the given keys, once per test file."""
    made: dict[str, Tokenizer] = {}

    def trained(**keys) -> Tokenizer:
        if repr(keys) not in made:
            made[repr(keys)] = train(tmp_path_factory.mktemp("tokenizer"), **keys)
        return made[repr(keys)]

    return trained


def roundtrip(tokenizer: Tokenizer, text: str) -> str:
    """A text encoded and decoded."""
    return tokenizer.decode(tokenizer.encode_target([text]))[0]


def resegmented(
    resegment: Resegment, rows: list[list[int]], generator: np.random.Generator
) -> list[list[int]]:
    """New segmentations of rows of ids."""
    new = resegment(Rows.from_lists(rows), generator)
    assert len(new.lengths) == len(rows) and new.ids.dtype == np.int32
    return new.to_lists()


def normalized(tokenizer: Tokenizer, text: str) -> str:
    """SentencePiece's normalization of a text, without control characters."""
    return tokenizer.target.processor.normalize(text).replace(SPACE, " ").translate(CONTROLS).strip(" ")


# Texts with unusual characters.
ODD = [
    "", " ", SPACE, f"a{SPACE}b", "a  b", " a ", "<s> </s> <pad> <unk> <0x0A>", "日本語", "😀👩‍👩‍👧", "ﬁ Ⅳ ①",
    "e\u0301", "\u00a0a\u3000b", "\u200b", "a\u2028b\u2029c\x85d", "a\tb\x0bc\x0cd", "a\nb", "a\r\nb", "a\0b",
    "\ufeff", "\U0010ffff", "ÀÉÎ", "İ", "ß",
]  # fmt: skip
texts = st.text(st.characters(codec="utf-8"), max_size=30) | st.sampled_from(ODD)
