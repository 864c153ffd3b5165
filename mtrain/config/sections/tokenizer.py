"""The `tokenizer` section."""

import re
from typing import Literal, Self

from pydantic import Field, model_validator

from mtrain.config.section import FilePath, Section

Normalization = Literal["nmt_nfkc", "nfkc", "nmt_nfkc_cf", "nfkc_cf", "identity"]


class TokenizerConfig(Section):
    """The SentencePiece subword tokenizer."""

    type: Literal["unigram", "bpe"] = Field("unigram", description="subword algorithm")
    vocab_size: int = Field(
        8000, ge=8, le=1_000_000, description="vocabulary size, including special tokens and bytes"
    )
    joint: bool = Field(True, description="one vocabulary for both languages; false: one for each")
    character_coverage: float = Field(
        1.0, ge=0.98, le=1, description="share of all characters in the text that the vocabulary covers"
    )
    byte_fallback: bool = Field(
        True, description="encode characters outside the vocabulary as bytes, not as <unk>"
    )
    normalization: Normalization = Field(
        "identity",
        description="SentencePiece's Unicode normalization; `identity`: text stays as it is, "
        "`_cf`: it is also lowercased",
    )
    symbols: list[str] = Field([], description="user-defined tokens that are never split, such as `<bt>`")
    path: FilePath | None = Field(
        None, description="run or model folder whose tokenizer is reused; the other keys must agree with it"
    )

    @model_validator(mode="after")
    def _symbols_are_usable(self) -> Self:
        if len(set(self.symbols)) < len(self.symbols) or any(s.split() != [s] for s in self.symbols):
            raise ValueError("symbols must be distinct, non-empty and without whitespace")
        if taken := [s for s in self.symbols if re.fullmatch(r"<(s|/s|pad|unk|0x[0-9A-F]{2})>", s)]:
            raise ValueError(f"symbols: {taken[0]} is a reserved token")
        return self
