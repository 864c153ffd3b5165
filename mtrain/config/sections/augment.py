"""The section `data.augment`: how training pairs are changed at random."""

from typing import Annotated

from pydantic import Field

from mtrain.config.section import Section

Probability = Annotated[float, Field(ge=0, le=1)]


class Augment(Section):
    """How training pairs are changed at random, differently in each epoch, so that the model also translates
    such text. Each value is the probability that a pair is changed in this way; several changes may apply to
    one pair. A pair that would become longer than `max_length` is not changed."""

    uppercase: Probability = Field(
        0.0, description="convert both sides to upper case, in scripts that have it (for example 0.07)"
    )
    titlecase: Probability = Field(
        0.0,
        description="begin each word of both sides with a capital, in scripts that have them (for example "
        "0.05)",
    )
    drop_final_punctuation: Probability = Field(
        0.0,
        description="remove the punctuation at the end of both sides, if both have some (for example 0.2)",
    )
    typos: Probability = Field(
        0.0,
        description="add typing errors to the source, about one per ten words and at least one (for example "
        "0.05)",
    )
    noise: Probability = Field(
        0.0,
        description="add pairs with the same random Unicode characters on both sides; their number as a "
        "share of the pairs of an epoch (for example 0.0005)",
    )
    merge: Probability = Field(
        0.0, description="append the next pair to a pair; the next pair also remains (for example 0.05)"
    )

    @property
    def cases(self) -> dict[str, float]:
        """The changes of letter case that are on, with their probabilities."""
        return {name: getattr(self, name) for name in ("uppercase", "titlecase") if getattr(self, name)}
