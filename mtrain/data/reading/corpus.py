"""Readers of parallel text: every kind of corpus as a stream of pairs.

`parse_block` decodes the blocks that `mtrain.data.reading.blocks` cuts. A pair that cannot be read is a
DataError with `file:line` and the reason.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress, islice
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt

from mtrain.config.corpora import Corpus, HubCorpus, SacrebleuCorpus, TextCorpus, ToyCorpus, TsvCorpus
from mtrain.data import Pair
from mtrain.data.reading.blocks import RawBlock, load_dataset, read_blocks
from mtrain.data.reading.files import files_of, toy_pairs
from mtrain.data.reading.lines import Digests, decode_block, read_range
from mtrain.data.reading.quotes import split_quoted
from mtrain.data.reading.records import Column, ScoredPair, try_pair
from mtrain.errors import DataError

_SMALL = 100  # pairs that are read at a time if they are wanted one by one, perhaps from a pipe


class Block(NamedTuple):
    """Consecutive pairs of a corpus: those that are readable, and the errors of the others."""

    sources: list[str]
    targets: list[str]
    numbers: Sequence[int]  # of the readable pairs in the corpus, from 1
    errors: dict[int, DataError]  # by number, ascending
    name: str  # of the file, that of the sources if there are two
    skipped: int = 0  # pairs of the corpus before this file, minus 1 if it has a header
    scores: Sequence[float] = ()  # of the readable pairs, if they were asked for

    @property
    def first(self) -> int:
        """The number of the first pair, if none was left out."""
        return min((*self.numbers[:1], *islice(self.errors, 1)))

    def select(self, kept: Sequence[bool] | npt.NDArray[np.bool_]) -> "Block":
        """The block with some of its readable pairs; `kept` says which."""
        return self._replace(
            sources=list(compress(self.sources, kept)),
            targets=list(compress(self.targets, kept)),
            numbers=list(compress(self.numbers, kept)),
            scores=list(compress(self.scores, kept)),
        )

    def place_of(self, number: int) -> str:
        """The location of a pair, as `file:line`."""
        return f"{self.name}:{number - self.skipped}"


def parse_block(raw: RawBlock, corpus: Corpus, score: Column | None = None) -> Block:
    """Decode the pairs of a block and, if the column or field `score` is given, the number that it has for
    each pair. A pair without this number is unreadable."""
    first, skipped, name = raw.first, raw.skipped, raw.names[0]
    lines = raw.lines
    if raw.ranges:
        ranges = zip(raw.names, raw.ranges, strict=True)
        lines = tuple(read_range(Path(file), *each) for file, each in ranges)
    both = zip(lines, raw.names, strict=True) if lines else ()
    sides = [decode_block(side, file, first - skipped) for side, file in both]
    if len(set(map(len, sides))) > 1:  # they had equal counts when the ranges were chosen
        raise DataError(f"{name}: changed while it was read; run again")
    if columns := _readable_columns(sides, corpus, score):  # fast path
        sources, targets, scores = columns
        return Block(sources, targets, range(first, first + len(sources)), {}, name, skipped, scores)
    items: list[Pair | ScoredPair | DataError]
    if isinstance(corpus, TextCorpus | SacrebleuCorpus):
        pairs_of_sides = zip(*sides, strict=True)
        errors_first = (
            next((side for side in pair if isinstance(side, DataError)), pair) for pair in pairs_of_sides
        )
        items = [item if isinstance(item, DataError) else Pair(*cast(Pair, item)) for item in errors_first]
    elif isinstance(corpus, ToyCorpus):
        items = [*raw.records]
    else:
        records = sides[0] if sides else raw.records
        items = [try_pair(item, corpus, name, n, score) for n, item in enumerate(records, first - skipped)]
    errors = {n: item for n, item in enumerate(items, first) if isinstance(item, DataError)}
    numbers: Sequence[int] = range(first, first + len(items))
    if errors:
        numbers = [n for n in numbers if n not in errors]
    pairs = [item for item in items if not isinstance(item, DataError)]
    sources, targets = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    scores = [pair.score for pair in pairs if isinstance(pair, ScoredPair)]
    return Block(sources, targets, numbers, errors, name, skipped, scores)


def _readable_columns(
    sides: list[list[str | DataError]], corpus: Corpus, score: Column | None
) -> tuple[list[str], list[str], list[float]] | None:
    """The source and target texts, and the scores, in lines of text or TSV. None if one cannot be read."""
    if not isinstance(corpus, TextCorpus | SacrebleuCorpus | TsvCorpus) or any(
        set(map(type, side)) - {str} for side in sides
    ):
        return None
    lines = cast(list[list[str]], sides)
    if not isinstance(corpus, TsvCorpus):
        return lines[0], lines[1], []
    columns = corpus.source_column, corpus.target_column
    try:
        rows = [*map(split_quoted, lines[0])] if corpus.quotes else [line.split("\t") for line in lines[0]]
        if min(map(len, rows), default=0) <= max(*columns, score if isinstance(score, int) else 0):
            return None
        scores = [float(row[score]) for row in rows] if isinstance(score, int) else []
    except (ValueError, DataError):
        return None
    return [row[columns[0]] for row in rows], [row[columns[1]] for row in rows], scores


def read_corpus(corpus: Corpus, digests: Digests | None = None) -> Iterator[Pair | DataError]:
    """Yield the pairs of a corpus in order, and a DataError for each pair that cannot be read. Arguments and
    errors are those of `read_blocks`."""
    for raw in read_blocks(corpus, digests, _SMALL):
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


def content_hash(corpus: Corpus, digests: Digests | None = None) -> str:
    """SHA-256 of the contents of a corpus, without modification times. Files in `digests` are not read; the
    others are added to it."""
    digest, files, digests = hashlib.sha256(), files_of(corpus), {} if digests is None else digests
    if isinstance(corpus, HubCorpus) and not files:
        digest.update(load_dataset(corpus)._fingerprint.encode())
    elif isinstance(corpus, ToyCorpus):
        digest.update(json.dumps(toy_pairs(corpus.toy)).encode())
    for file in files:
        if file not in digests:
            with file.open("rb") as stream:
                digests[file] = hashlib.file_digest(stream, "sha256").digest()
        digest.update(digests[file])
    return digest.hexdigest()
