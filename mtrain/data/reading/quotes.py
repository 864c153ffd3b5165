"""TSV fields in double quotes, as written by spreadsheets and the csv modules of programming languages."""

import re
from collections import Counter
from collections.abc import Iterable

from mtrain.errors import DataError

_QUOTED = r'"([^"]*+(?:""[^"]*+)*+)"'  # quotes in it are doubled
_FIELD = re.compile(rf'(?:{_QUOTED}|([^"\t]*+))(?:\t|\Z)')
_IS_QUOTED = re.compile(_QUOTED)
_FIELDS = 20  # minimum number of quoted fields, with no unquoted text, that indicates a csv writer


def count_signs(fields: Iterable[str]) -> Counter[str]:
    """The number of fields that are written in each way. Their quotes were read literally. `doubled` fields
    are in quotes, with doubled quotes inside; `quoted` ones have no quotes inside, and may be quotations;
    `literal` ones have quotes that a csv writer would have doubled; `bare` ones are text without quotes."""
    return Counter(map(_sign_of, fields))


def _sign_of(field: str) -> str:
    if '"' not in field:
        return "bare" if any(map(str.isalpha, field)) else "none"
    if (match := _IS_QUOTED.fullmatch(field)) is None:
        return "literal"
    return "doubled" if '"' in match[1] else "quoted"


def show_csv(signs: Counter[str]) -> bool:
    """Whether a csv writer has probably written the fields that were counted."""
    are_all_quoted = signs["quoted"] >= _FIELDS and not signs["bare"]
    in_quotes = signs["doubled"] + signs["quoted"]
    return (signs["doubled"] > 0 or are_all_quoted) and 4 * signs["literal"] <= in_quotes


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
