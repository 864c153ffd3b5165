"""The section `data.corruptions`: the bad pairs that a pair classifier is trained on."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from mtrain.config.section import Section

Frequency = Annotated[float, Field(ge=0, le=1000)]


class Corruptions(Section):
    """How often each kind of corruption is made, relative to the others. Half of the training pairs are
    corrupted, different pairs in each epoch. Validation reports all kinds, also with a share of 0."""

    misaligned: Frequency = Field(1.0, description="the target comes from another pair of similar length")
    truncated: Frequency = Field(1.0, description="the beginning or the end of a side is missing")
    extended: Frequency = Field(1.0, description="a side is joined with the same side of another pair")
    wrong_language: Frequency = Field(
        1.0, description="both sides are in the same language: a side is copied, or comes from another pair"
    )
    numbers: Frequency = Field(
        1.0,
        description="a number of one side is changed; if a side has no number, the same one is first "
        "inserted on both sides, and the good version keeps it",
    )
    replaced_words: Frequency = Field(1.0, description="some words of a side come from another pair")
    word_order: Frequency = Field(1.0, description="the words of a side are in random order")

    @model_validator(mode="after")
    def _some_kind_is_made(self) -> Self:
        if not any(share for _, share in self):
            raise ValueError("all kinds of corruption are 0; give one of them a share above 0")
        return self
