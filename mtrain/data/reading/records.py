"""Parses the lines, rows and records of a corpus: as decoded blocks, or as a stream of pairs.

A pair that cannot be read is a DataError with `file:line` and the reason. TSV fields may be in double quotes,
as written by spreadsheets and the csv modules of programming languages.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress, islice
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from mtrain.config.sections.corpora import (
    Corpus,
    FieldsCorpus,
    SacrebleuCorpus,
    TextCorpus,
    ToyCorpus,
    TsvCorpus,
)
from mtrain.data import Pair
from mtrain.data.reading.blocks import Column, RawBlock, read_blocks, read_range
from mtrain.data.reading.lines import decode_block
from mtrain.errors import DataError

_SMALL = 100  # pairs that are read at a time if they are wanted one by one, perhaps from a pipe
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


class Block(NamedTuple):
    """Consecutive pairs of a corpus: those that are readable, and the errors of the others."""

    sources: list[str]
    targets: list[str]
    numbers: Sequence[int]  # of the readable pairs in the corpus, from 1
    errors: dict[int, DataError]  # by number, ascending
    name: str  # of the file; of the source file if there are two
    skipped: int = 0  # pairs of the corpus before this file, minus 1 if it has a header
    scores: Sequence[float] = ()  # of the readable pairs, if they were asked for

    @property
    def indices(self) -> npt.NDArray[np.int64]:
        """The indices of the readable pairs among all pairs of the block, if none was left out."""
        first = min((*self.numbers[:1], *islice(self.errors, 1)))
        return np.asarray(self.numbers, np.int64) - first

    def select(self, kept: Sequence[bool] | npt.NDArray[np.bool_]) -> "Block":
        """The block with some of its readable pairs; `kept` says which."""
        return self._replace(
            sources=list(compress(self.sources, kept)),
            targets=list(compress(self.targets, kept)),
            numbers=list(compress(self.numbers, kept)),
            scores=list(compress(self.scores, kept)),
        )

    def have_text(self) -> list[bool]:
        """Whether neither side of each readable pair is blank."""
        both = zip(self.sources, self.targets, strict=True)
        return [bool(source.strip() and target.strip()) for source, target in both]

    def usable(self) -> "Block":
        """The readable pairs of which neither side is blank."""
        return self.select(self.have_text())._replace(errors={})

    def place_of(self, number: int) -> str:
        """The location of a pair, as `file:line`."""
        return f"{self.name}:{number - self.skipped}"


def parse_block(raw: RawBlock, corpus: Corpus, score: Column | None = None) -> Block:
    """Decode the pairs of a block and, if the column or field `score` is given, the number that it has for
    each pair. A pair without this number is unreadable."""
    sides, name = _decode_sides(raw), raw.names[0]
    if block := _parse_readable(raw, sides, corpus, score):  # fast path
        return block
    items: list[Pair | ScoredPair | DataError]
    if isinstance(corpus, TextCorpus | SacrebleuCorpus):
        items = [
            next((side for side in pair if isinstance(side, DataError)), Pair(*cast(Pair, pair)))
            for pair in zip(*sides, strict=True)
        ]
    elif isinstance(corpus, ToyCorpus):
        items = [*raw.records]
    else:
        records = enumerate(sides[0] if sides else raw.records, raw.first - raw.skipped)
        items = [try_pair(item, corpus, name, number, score) for number, item in records]
    errors = {n: item for n, item in enumerate(items, raw.first) if isinstance(item, DataError)}
    numbers: Sequence[int] = range(raw.first, raw.first + len(items))
    if errors:
        numbers = [n for n in numbers if n not in errors]
    pairs = [item for item in items if not isinstance(item, DataError)]
    sources, targets = [pair.source for pair in pairs], [pair.target for pair in pairs]
    scores = [pair.score for pair in pairs if isinstance(pair, ScoredPair)]
    return Block(sources, targets, numbers, errors, name, raw.skipped, scores)


def _decode_sides(raw: RawBlock) -> list[list[str | DataError]]:
    """The lines of the file or of the two files of a block; none if it has records instead."""
    lines = raw.lines
    if raw.ranges:
        parts = zip(raw.names, raw.ranges, strict=True)
        lines = tuple(read_range(Path(name), *part) for name, part in parts)
    both = zip(raw.names, lines, strict=True) if lines else ()
    sides = [decode_block(side, name, raw.first - raw.skipped) for name, side in both]
    if len(set(map(len, sides))) > 1:  # they had equal counts when the ranges were chosen
        raise DataError(f"{raw.names[0]}: changed while it was read; run again")
    return sides


def _parse_readable(
    raw: RawBlock, sides: list[list[str | DataError]], corpus: Corpus, score: Column | None
) -> Block | None:
    """Parse lines of text or TSV of which each has a pair. None if one has none, or if there are records."""
    has_lines = isinstance(corpus, TextCorpus | SacrebleuCorpus | TsvCorpus)
    if not has_lines or any(set(map(type, side)) - {str} for side in sides):
        return None
    lines, scores = cast(list[list[str]], sides), list[float]()
    if isinstance(corpus, TsvCorpus):
        source, target = corpus.source_column, corpus.target_column
        try:
            rows = (
                [*map(split_quoted, lines[0])] if corpus.quotes else [line.split("\t") for line in lines[0]]
            )
            if min(map(len, rows), default=0) <= max(source, target, score if isinstance(score, int) else 0):
                return None
            scores = [float(row[score]) for row in rows] if isinstance(score, int) else []
        except (ValueError, DataError):
            return None
        lines = [[row[source] for row in rows], [row[target] for row in rows]]
    numbers = range(raw.first, raw.first + len(lines[0]))
    return Block(lines[0], lines[1], numbers, {}, raw.names[0], raw.skipped, scores)


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
        needed = max(corpus.source_column, corpus.target_column, column) + 1
        if len(columns) < needed:
            hint = "; separate them by tabs" if len(columns) == 1 and ("," in item or ";" in item) else ""
            raise DataError(f"{len(columns)} column(s); at least {needed} expected{hint}")
        pair = Pair(columns[corpus.source_column], columns[corpus.target_column])
        return pair if score is None else ScoredPair(*pair, _to_score(columns[column], f"column {column}"))
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
        raise DataError(f"{place} is not a number: {str(value)[:40]!r}") from None


def _text_of(record: Any, field: str) -> str:
    value = _value_of(record, field)
    if not isinstance(value, str):
        raise DataError(f"field '{field}' is not a string")
    if "\0" in value or _SURROGATE.search(value):
        raise DataError(f"field '{field}' contains a NUL or an unpaired surrogate")
    return value


def _value_of(record: Any, field: str) -> Any:
    value = record
    for key in field.split("."):
        if not isinstance(value, dict) or key not in value:
            known = ", ".join(map(str, value)) if isinstance(value, dict) else "none"
            raise DataError(f"no field '{field}'; available fields: {known}")
        value = value[key]
    return value


def read_corpus(corpus: Corpus) -> Iterator[Pair | DataError]:
    """Yield the pairs of a corpus in order, and a DataError for each pair that cannot be read. Raises
    DataError if the corpus is missing or unreadable, or if its sides differ in length."""
    for raw in read_blocks(corpus, size=_SMALL):
        block = parse_block(raw, corpus)
        items: dict[int, Pair | DataError] = {**block.errors}
        items.update(zip(block.numbers, map(Pair, block.sources, block.targets), strict=True))
        yield from (items[number] for number in sorted(items))


def read_pairs(corpus: Corpus, bad_lines: str) -> Iterator[Pair | None]:
    """Like `read_corpus`, but an unreadable pair raises DataError, or is None if `bad_lines` is "skip"."""
    for pair in read_corpus(corpus):
        if isinstance(pair, DataError):
            refuse_unless_skipped(pair, bad_lines)
        yield None if isinstance(pair, DataError) else pair


def refuse_unless_skipped(error: DataError, bad_lines: str) -> None:
    """Raise the error of an unreadable pair, unless `bad_lines` is "skip"."""
    if bad_lines != "skip":
        raise DataError(f"{error}; fix it, or set data.bad_lines: skip to drop such pairs")


def good_pairs(corpora: Iterable[Corpus], bad_lines: str) -> Iterator[Pair]:
    """Pairs of several corpora. Unreadable pairs raise DataError or, if `bad_lines` is skip, are skipped."""
    return (pair for corpus in corpora for pair in read_pairs(corpus, bad_lines) if pair is not None)


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
