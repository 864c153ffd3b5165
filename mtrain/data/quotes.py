"""TSV fields in double quotes, as written by spreadsheets and the csv modules of programming languages."""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from mtrain.errors import DataError

_QUOTED = r'"([^"]*+(?:""[^"]*+)*+)"'  # quotes in it are doubled
_FIELD = re.compile(rf'(?:{_QUOTED}|([^"\t]*+))(?:\t|\Z)')
_IS_QUOTED = re.compile(_QUOTED)
_FIELDS = 20  # minimum number of quoted fields, with no unquoted text, that indicates a csv writer


class QuoteSigns(NamedTuple):
    """The number of fields that are written in each way."""

    doubled: int = 0  # in quotes, with doubled quotes inside
    quoted: int = 0  # in quotes, without quotes inside; or a quotation
    literal: int = 0  # with quotes that a csv writer would have doubled
    bare: int = 0  # text without quotes, counted at most once by `count_signs`

    def plus(self, other: Iterable[int]) -> "QuoteSigns":
        """The sums of two counts."""
        return QuoteSigns(*map(sum, zip(self, other, strict=True)))

    def show_csv(self) -> bool:
        """Whether a csv writer has probably written the fields."""
        are_all_quoted = self.quoted >= _FIELDS and not self.bare
        return (self.doubled > 0 or are_all_quoted) and 4 * self.literal <= self.doubled


def count_signs(fields: Sequence[str]) -> QuoteSigns:
    """Count the ways in which fields are written. Their quotes were read literally."""
    doubled = quoted = literal = 0
    for field in (field for field in fields if '"' in field):
        if (match := _IS_QUOTED.fullmatch(field)) is None:
            literal += 1
        elif '"' in match[1]:
            doubled += 1
        else:
            quoted += 1
    bare = any('"' not in field and any(map(str.isalpha, field)) for field in fields)
    return QuoteSigns(doubled, quoted, literal, int(bare))


def split_quoted(line: str) -> list[str]:
    """The fields of a TSV line, which may be in quotes. Raises DataError if a quote is not closed on the
    line, or is inside a field without quotes."""
    if '"' not in line:
        return line.split("\t")
    fields, start = list[str](), 0
    while True:
        if (match := _FIELD.match(line, start)) is None:
            rule = "they end on the same line, and quotes inside of them are doubled"
            raise DataError(f"the quotes of column {len(fields)} do not end with it; {rule}")
        fields.append(match[2] if match[1] is None else match[1].replace('""', '"'))
        start = match.end()
        if not match[0].endswith("\t"):
            return fields
