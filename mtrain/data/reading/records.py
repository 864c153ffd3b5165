"""Finds the pair in a line of TSV or JSONL, or in a row of a table.

TSV fields may be in double quotes, as written by spreadsheets and the csv modules of programming languages.
"""

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

from mtrain.config.sections.corpora import FieldsCorpus, TsvCorpus
from mtrain.data import Pair
from mtrain.errors import DataError

Column = int | str  # a column of TSV, from 0, or a field of JSONL and tables
_SETTING = "which data.filters.min_score names"
_SURROGATE = re.compile("[\ud800-\udfff]")
_QUOTED = r'"([^"]*+(?:""[^"]*+)*+)"'  # quotes in it are doubled
_FIELD = re.compile(rf'(?:{_QUOTED}|([^"\t]*+))(?:\t|\Z)')
_IS_QUOTED = re.compile(_QUOTED)
_FIELDS = 20  # minimum number of quoted fields, with no unquoted text, that indicates a csv writer


class ScoredPair(NamedTuple):
    """A pair with a number that the corpus gives for it."""

    source: str
    target: str
    score: float


def try_pair(
    item: Any, corpus: TsvCorpus | FieldsCorpus, name: str, number: int, score: Column | None
) -> Pair | ScoredPair | DataError:
    """The pair in a line of TSV or JSONL, or in a row of a table; or a DataError if it has none. `number` is
    the number of the line or row in the file `name`."""
    if isinstance(item, DataError):
        return item
    if isinstance(item, UnicodeDecodeError):
        return DataError(f"{name}:{number}: not valid UTF-8 (byte {item.start + 1} of a field)")
    try:
        return _pair_of(item, corpus, score)
    except DataError as error:
        return DataError(f"{name}:{number}: {error}")


def _pair_of(item: Any, corpus: TsvCorpus | FieldsCorpus, score: Column | None) -> Pair | ScoredPair:
    if isinstance(corpus, TsvCorpus):
        columns = split_quoted(item) if corpus.quotes else item.split("\t")
        column = score if isinstance(score, int) else 0
        needed = max(corpus.source_column, corpus.target_column) + 1
        if len(columns) < needed:
            hint = "; separate them by tabs" if len(columns) == 1 and ("," in item or ";" in item) else ""
            raise DataError(f"{len(columns)} column(s); at least {needed} expected{hint}")
        pair = Pair(columns[corpus.source_column], columns[corpus.target_column])
        if score is None:
            return pair
        if len(columns) <= column:
            raise DataError(f"{len(columns)} column(s); no column {column} (from 0), {_SETTING}")
        return ScoredPair(*pair, _to_score(columns[column], f"column {column}"))
    if isinstance(item, str):
        if not item.strip():
            raise DataError("a blank line, not JSON")
        try:
            item = json.loads(item)
        except (ValueError, RecursionError) as error:
            raise DataError(f"not JSON: {error}") from None
    pair = Pair(_text_of(item, corpus.source_field), _text_of(item, corpus.target_field))
    if not isinstance(score, str):
        return pair
    return ScoredPair(*pair, _to_score(_value_of(item, score), f"field '{score}'"))


def _to_score(value: Any, place: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise DataError(f"{place}, {_SETTING}, is not a number: {str(value)[:40]!r}") from None


def _text_of(record: Any, field: str) -> str:
    value = _value_of(record, field)
    if not isinstance(value, str):
        raise DataError(f"field '{field}' is not a string")
    if "\0" in value or _SURROGATE.search(value):
        raise DataError(f"field '{field}' contains a NUL or an unpaired surrogate")
    return value


def columns_of(fields: Iterable[str], names: Collection[str]) -> list[str] | None:
    """The columns of a table that have some fields; see `_value_of`. None, which means all columns, if no
    field is given or one is missing; the error can then list all columns."""
    columns = dict.fromkeys(field if field in names else field.partition(".")[0] for field in fields)
    return [*columns] if columns and columns.keys() <= {*names} else None


def _value_of(record: Any, field: str) -> Any:
    """The value of a field; a dot in its name separates an object and a field in it, unless a field of the
    record has this name."""
    if isinstance(record, dict) and field in record:
        return record[field]
    value = record
    for key in field.split("."):
        if not isinstance(value, dict) or key not in value:
            known = ", ".join(map(str, value)) if isinstance(value, dict) else "none"
            raise DataError(f"no field '{field}'; available fields: {known}")
        value = value[key]
    return value


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
