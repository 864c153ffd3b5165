"""The columns of TSV, JSONL and Parquet files: their names, a sample, and which contain sentences."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import regex  # supports Unicode properties

from mtrain.config.language_names import find_language, languages_in, words_of
from mtrain.data.reading.lines import read_lines
from mtrain.data.reading.parquet import read_parquet
from mtrain.data.reading.records import count_signs, show_csv, split_quoted
from mtrain.data.scanning.sides import is_sentence
from mtrain.errors import DataError

TableKind = Literal["tsv", "jsonl", "parquet"]
SAMPLE = 1000  # rows
SOURCE_WORDS = frozenset({"source", "src", "input", "original"})
TARGET_WORDS = frozenset({"target", "tgt", "trg", "translation", "output", "reference", "ref"})
_OTHER_WORDS = {"id", "index", "phrase", "phrases", "score", "sentence", "sentence1", "sentence2"}
_OTHER_WORDS |= {"sentences", "string", "strings", "text", "texts", "url", "words"}
_CODE = 3  # letters of the code of a language, at most
_SENTENCE_END = regex.compile(r"(?r)[\p{Sentence_Terminal}།]\Z")
_MISSING = frozenset({"", "-", "n/a", "na", "nan", "none", "null"})  # placeholders for missing values
_PREFIX = 6  # characters
_MANY, _DISTINCT = 20, 0.05  # values that tell whether they repeat, and the share of different sentences


class TableColumn(NamedTuple):
    """A column of TSV, or a field of JSONL or Parquet, with a sample of its texts."""

    name: str  # in the header or the records; the number from 0 without a header
    key: int | str  # what the config calls it: the number, or the field
    texts: list[str]


class Table(NamedTuple):
    """The columns of a file. `header` is whether its first line has their names."""

    columns: list[TableColumn]
    header: bool = False
    quotes: bool = False  # whether fields are in quotes


def read_table(file: Path, kind: TableKind) -> Table:
    """The columns in the first rows of a file. Raises DataError if it is empty or cannot be read."""
    if kind == "tsv":
        return _tsv_columns(file)
    if kind == "jsonl":
        records = _json_records(file)
    else:  # a row that is not valid UTF-8 has no strings
        records = chain.from_iterable(rows for _, _, rows in read_parquet([file], [], SAMPLE))
    texts: dict[str, list[str]] = {}
    for record in islice(records, SAMPLE):
        for field, text in _strings(record):
            texts.setdefault(field, []).append(text)
    return Table([TableColumn(field, field, values) for field, values in texts.items()])


def _tsv_columns(file: Path) -> Table:
    lines = islice((line for line in read_lines(file) if isinstance(line, str)), SAMPLE)
    rows = [line.split("\t") for line in lines if line.strip()]
    if quotes := show_csv(count_signs(chain.from_iterable(rows))):
        rows = [*_without_quotes(map("\t".join, rows))]
    if not rows:
        raise DataError(f"{file}: is empty, or its lines are not valid UTF-8")
    width = Counter(map(len, rows[1:] or rows)).most_common(1)[0][0]
    if len(rows[0]) == width - 1 and _is_over_numbers("", [row[0] for row in rows[1:]]):
        rows[0] = ["", *rows[0]]  # R does not name the column of row numbers
    header = _is_header(rows[0], rows[1:])
    usable = [row for row in rows[header:] if len(row) >= width]
    names = rows[0] if header else [str(number) for number in range(width)]
    columns = [
        TableColumn(_unquoted(name), number, [row[number] for row in usable])
        for number, name in enumerate(names[:width])
    ]
    return Table(columns, header, quotes)


def _without_quotes(lines: Iterable[str]) -> Iterable[list[str]]:
    for line in lines:
        with suppress(DataError):
            yield split_quoted(line)


def _is_header(row: Sequence[str], others: Sequence[Sequence[str]]) -> bool:
    """Whether the cells of a first row are names of columns: at least two say what a column contains, one is
    above a column of numbers, or all but an empty first one count up from 0, as in pandas.

    Two codes of languages may also be two short words, so a header of codes must be shorter than most pairs.
    """
    written = [_unquoted(cell) for cell in row]
    cells = [cell.lower() for cell in written]
    places = [place for place, cell in enumerate(cells) if place == 0 or cell not in _MISSING]
    columns = ([other[place] for other in others if place < len(other)] for place in places)
    is_over_numbers = any(map(_is_over_numbers, [cells[place] for place in places], columns))
    if is_over_numbers and not any(map(_SENTENCE_END.search, cells)):
        return True
    numbers = cells[1:] if not cells[0] else cells
    if len(numbers) > 1 and numbers == [str(number) for number in range(len(numbers))]:
        return True
    following = [cell.strip().lower() for cell in others[0]] if others else []
    names = [cell for cell in written if _is_name(cell) and cell.lower() not in following]
    if names:  # names of rare languages may be words
        names += [cell for cell in written if len(cell) > _CODE and find_language(cell) and cell not in names]
    length = sum(len(cell) for other in others for cell in other)
    is_short = 2 * sum(map(len, row)) * len(others) < length
    return len(names) > 1 and (is_short or max(map(len, names)) > _CODE)


def _unquoted(cell: str) -> str:
    return cell.strip().strip('"')


def _is_over_numbers(cell: str, others: Sequence[str]) -> bool:
    """Whether a cell is not a number, but all others of its column are, as in the index column of pandas."""
    return len(others) > 1 and not _is_number(cell) and all(map(_is_number, others))


def _is_number(cell: str) -> bool:
    return re.fullmatch(r"-?\d+([.,]\d+)?(e-?\d+)?", _unquoted(cell)) is not None


def _is_name(cell: str) -> bool:
    """Whether a cell is a name of a column, such as `en`, `source` or `source text`."""
    known = SOURCE_WORDS | TARGET_WORDS | _OTHER_WORDS
    if cell.lower() in known or languages_in([cell], 1):
        return True
    parts = re.sub("(?<=[a-z])(?=[A-Z])", " ", cell)  # of `sourceText`
    words = [word.lower() for word in words_of(parts)] if not set(cell) & set(".,!?") else []
    has_meaning = [word in known or bool(languages_in([word], 1)) for word in words]
    return 1 < len(words) < 4 and all(has_meaning) and not known.isdisjoint(words)


def _json_records(file: Path) -> Iterable[Any]:
    for number, line in enumerate(read_lines(file), start=1):
        if number == 1 and isinstance(line, DataError):
            raise DataError(f"{line}; JSONL has one JSON object per line")
        if not isinstance(line, str) or not line.strip():
            continue
        record = None
        with suppress(ValueError, RecursionError):
            record = json.loads(line)
        if number == 1 and not isinstance(record, dict):
            is_array = line.lstrip().startswith("[")
            hint = "jq -c '.[]' OLD > NEW converts a JSON array" if is_array else line[:40]
            raise DataError(f"{file}:1: not JSONL, which has one JSON object per line; {hint}")
        yield record


def _strings(record: Any, above: str = "") -> Iterable[tuple[str, str]]:
    """The strings in a record, with the dotted names of their fields."""
    for key, value in record.items() if isinstance(record, dict) else ():
        if "." in str(key) and (above or not isinstance(value, str)):  # which a config cannot name
            continue
        if isinstance(value, str):
            yield f"{above}{key}", value
        elif isinstance(value, dict):
            yield from _strings(value, f"{above}{key}.")


def text_columns(table: Table) -> list[TableColumn]:
    """The columns that contain sentences, and not numbers, identifiers, URLs or the same text in each row.

    A few texts that are repeated may be labels, or sentences with many translations, and texts that begin
    alike may be identifiers or sorted sentences: they count if no two other columns do.
    """
    columns = [column for column in table.columns if _is_text(column.texts)]
    varied = [column for column in columns if _is_varied(column.texts)]
    columns = varied if len(varied) > 1 else columns
    others = [column for column in columns if not _is_same([text[:_PREFIX] for text in column.texts])]
    return others if len(others) > 1 else columns


def _is_text(texts: Sequence[str]) -> bool:
    filled = [text for text in texts if text.strip()]
    like_sentences = sum(map(is_sentence, filled))
    return bool(filled) and like_sentences >= len(filled) / 2 and not _is_same(filled)


def _is_varied(texts: Sequence[str]) -> bool:
    """Whether more than a few different texts are repeated."""
    filled = [text for text in texts if text.strip()]
    return len(filled) < _MANY or len({*filled}) > _DISTINCT * len(filled)


def _is_same(texts: Sequence[str]) -> bool:
    """Whether most texts are the same, apart from empty ones."""
    filled = [text for text in texts if text.strip()]
    return len(filled) >= _MANY and Counter(filled).most_common(1)[0][1] >= 0.9 * len(filled)
