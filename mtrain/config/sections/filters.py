"""The section `data.filters`: which pairs are left out of training."""

from typing import Annotated, Literal

from pydantic import Field

from mtrain.config.section import Count, PositiveFraction, PositiveInt, Section


class MinScore(Section):
    """A lower bound for a number that the corpus gives for each pair, as `mtrain score --tsv` writes it."""

    column: Count | Annotated[str, Field(min_length=1)] = Field(
        description="column of the score in TSV files, starting at 0; in other corpora, its field"
    )
    value: float = Field(ge=-1e9, le=1e9, description="pairs with a lower score, or with NaN, are left out")


class Filters(Section):
    """Rules that leave pairs out of `train`. Each rule is off unless it is given; a pair that breaks several
    is counted for the first of them, in this order. Validation and test sets are not filtered."""

    min_words: PositiveInt | None = Field(
        None,
        description="minimum number of words of each side, separated by spaces; not for languages written "
        "without spaces",
    )
    max_words: PositiveInt | None = Field(
        None,
        description="maximum number of words of each side, such as 150; not for languages written without "
        "spaces",
    )
    max_word_length: PositiveInt | None = Field(
        None,
        description="longest word of each side in characters, such as 40; not for languages written without "
        "spaces",
    )
    max_ratio: Annotated[float, Field(ge=1, le=1e9)] | None = Field(
        None, description="maximum ratio of the lengths of the two sides, in characters, such as 3"
    )
    min_alphabetic: PositiveFraction | None = Field(
        None,
        description="minimum share of letters and combining marks among the characters of each side except "
        "spaces, such as 0.5",
    )
    script: bool = Field(
        False,
        description="leave out pairs with a side whose letters are mostly not in a script of its language",
    )
    copied: bool = Field(
        False, description="leave out pairs whose sides are equal, ignoring case, and contain a letter"
    )
    same_numbers: bool = Field(
        False,
        description="leave out pairs whose sides do not contain the same numbers in digits, ignoring "
        "separators of thousands",
    )
    same_urls: bool = Field(
        False,
        description="leave out pairs whose sides do not contain the same URLs (beginning with http://, "
        "https://, ftp:// or www.)",
    )
    min_score: MinScore | None = Field(None, description="lowest score of a pair; null: any")
    language: Literal["py3langid", "off"] = Field(
        "off",
        description="`py3langid`: leave out pairs with a side that is in another language with a probability "
        "above 0.5; needs the `languages` extra",
    )
    duplicates: Literal["pairs", "source", "target", "off"] = Field(
        "off",
        description="leave out pairs that repeat an earlier one that the other filters keep, in any corpus "
        "of the same languages: with the same `source`, the same `target`, or both (`pairs`)",
    )


RULES = tuple(Filters.model_fields)  # in the order in which they are applied
