"""Looks for problems in the data before training: counts, duplicates, leaks, suspicious pairs.

A `DataCheck` collects what is found in each block of training pairs. Its memory is bounded. It needs no
tokenizer. If there is one, `segment` measures how it segments a sample of the training pairs.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field

from mtrain.config.languages import scripts_of_language
from mtrain.config.sections.corpora import Corpus, Holdout, TsvCorpus
from mtrain.config.sections.data import DataConfig
from mtrain.config.sections.filters import RULES
from mtrain.data import Pair, are_too_long
from mtrain.data.pairs.duplicates import find_repeated
from mtrain.data.reading.blocks import Block, parse_block, read_blocks
from mtrain.data.reading.lines import Digests
from mtrain.data.reading.records import count_signs, show_csv
from mtrain.data.scanning.block_check import (
    KINDS,
    LENGTH_BINS,
    PLACES,
    RATIO_BINS,
    BlockCheck,
    BlockFindings,
    Normalizers,
    count_words,
    first_errors,
)
from mtrain.data.scanning.leaks import Leak, LeakFinder
from mtrain.data.scanning.normalization import Change
from mtrain.data.scanning.sides import CorpusSides, Shift, find_shifts
from mtrain.data.text.writing_systems import main_script
from mtrain.progress_bar import waiting_for
from mtrain.storage.temporary import TemporaryStream
from mtrain.tokenizer.tokenizer import Tokenizer

SIDES = ("source", "target")
SCRIPT_PAIRS = 1000  # the first pairs of the corpus, or of a sample, which determine its scripts

# Lists of a fixed length, which is verified when recorded findings are read.
LengthCounts = Annotated[list[int], Field(min_length=len(LENGTH_BINS), max_length=len(LENGTH_BINS))]
RatioCounts = Annotated[list[int], Field(min_length=len(RATIO_BINS), max_length=len(RATIO_BINS))]
OfSides = Annotated[list[float], Field(min_length=2, max_length=2)]  # source, target


@dataclass
class PairCounts:
    """Numbers of pairs in one set."""

    usable: int = 0
    empty: int = 0  # the source or the target is blank
    bad: int = 0  # unreadable; see `Findings.unreadable`


@dataclass
class Suspicious:
    """Training pairs of one suspicious kind."""

    count: int = 0
    places: list[str] = field(default_factory=list)  # file:line of the first ones


@dataclass
class Segmentation:
    """How the tokenizer segments a sample of the training pairs."""

    pairs: int
    too_long: int
    tokens_per_word: OfSides
    unknown: OfSides  # share of tokens that are <unk> or bytes


@dataclass
class Changes:
    """The characters of one side of the training pairs that the tokenizer's normalization changes."""

    count: int
    examples: list[tuple[str, str, int]]  # the most frequent: before, after, how often

    @classmethod
    def of(cls, counts: Counter[Change]) -> "Changes":
        """The changes with these numbers of occurrences."""
        return cls(counts.total(), [(*change, count) for change, count in counts.most_common(PLACES)])


@dataclass
class Findings:
    """The result of a check."""

    sets: dict[str, PairCounts]  # by name: train, validation, and the test sets
    # Training pairs that repeat an earlier one; only in corpora without filters, if filters remove repeated
    # sources or targets.
    duplicates: int
    leaks: dict[str, Leak]
    lengths: tuple[LengthCounts, LengthCounts]  # training pairs by words of source and target
    ratios: RatioCounts  # training pairs by target characters / source characters
    scripts: tuple[str, str]  # of source and target
    suspicious: dict[str, Suspicious]
    segmentation: Segmentation | None = None
    rejected: dict[str, int] = field(default_factory=dict)  # training pairs by rule of `data.filters`
    # Usable pairs by training corpus, if there are several.
    corpora: dict[str, int] = field(default_factory=dict)
    unusable: list[str] = field(default_factory=list)  # training corpora without a usable pair
    shifts: list[Shift] = field(default_factory=list)
    languages: dict[str, str] = field(default_factory=dict)  # corpora in other languages: what is wrong
    quoted: list[str] = field(default_factory=list)  # TSV files whose fields seem to be in quotes
    # The first unreadable pairs of each set, with reasons.
    unreadable: dict[str, list[str]] = field(default_factory=dict)
    changes: dict[str, Changes] = field(default_factory=dict)  # by side, if there are any
    # Training pairs with other sources than the held-out pairs. With several directions, fewer remain.
    remaining: int | None = None


class DataCheck:
    """Collects the findings about a config's data while its training pairs are read."""

    def __init__(self, data: DataConfig, digests: Digests | None = None, folder: Path | None = None):
        """Read the validation and test sets. Raises DataError if one is missing or its sides differ in
        length; unreadable lines are counted. `digests` is as in `read_blocks`. Temporary files are written to
        `folder`: 8 bytes for each pair, and 16 more if validation pairs are held out of training."""
        self._data = data
        self._holds_out = isinstance(data.validation, Holdout)
        validation = {} if isinstance(data.validation, Holdout) else {"validation": data.validation}
        taken = ("train", "validation")
        tests = {f"test.{name}" if name in taken else name: [corpus] for name, corpus in data.test.items()}
        evaluation_sets = {**validation, **tests}
        names = dict.fromkeys(("train", "validation", *evaluation_sets))
        self._found = Findings(
            sets={name: PairCounts() for name in names},
            duplicates=0,
            leaks={},
            lengths=([0] * len(LENGTH_BINS), [0] * len(LENGTH_BINS)),
            ratios=[0] * len(RATIO_BINS),
            scripts=("", ""),
            suspicious={kind: Suspicious() for kind in KINDS},
            corpora=dict.fromkeys(data.names, 0),
            unreadable={name: [] for name in names},
        )
        # By training corpus, and at the end of other sets; the last ones may be aligned pairs.
        self._shifts: list[list[Shift]] = [[] for _ in (*data.train, "others")]
        self._sides = [CorpusSides() for _ in data.train]
        self._changes = {side: Counter[Change]() for side in SIDES}
        self._quotes = defaultdict[str, Counter[str]](Counter)  # by TSV file that is read without `quotes`
        # Filtered corpora have no repeated pairs then. Others may, whatever the number of rejected pairs.
        removed = "off" if data.filters is None else data.filters.duplicates
        self._is_filtered_by_side = removed in ("source", "target")
        self._pairs = TemporaryStream(folder)  # hashes, to find duplicates
        sets = {name: self._usable(corpora, name, digests) for name, corpora in evaluation_sets.items()}
        self._leaks = LeakFinder(sets, self._holds_out, folder)

    def block_check(self, first: Sequence[Block], normalizers: Normalizers) -> BlockCheck:
        """A check of blocks whose findings can be added. `first` are the usable pairs of the first
        blocks, about SCRIPT_PAIRS. Corpora of the same languages as the first one should have the scripts of
        these pairs, others the scripts of their languages. For `normalizers`, see `BlockCheck`."""
        pairs = [pair for block in first for pair in zip(*block[:2], strict=True)][:SCRIPT_PAIRS]
        source, target = (main_script(pair[side] for pair in pairs) for side in (0, 1))
        self._found.scripts = source, target
        directions = self._data.directions
        known = {each: (*map(scripts_of_language, each),) for each in directions}
        known[directions[0]] = (source,) if source else (), (target,) if target else ()
        scripts = [known[each] for each in directions]
        return BlockCheck(scripts, self._leaks.evaluation_hashes(), self._holds_out, normalizers)

    def add(self, block: BlockFindings, corpus: int) -> None:
        """Add the findings about the next block, which is of the training corpus with this index. Raises
        StorageError."""
        found, train = self._found, self._found.sets["train"]
        train.usable += block.usable
        found.corpora[[*found.corpora][corpus]] += block.usable
        train.empty += block.empty
        train.bad += block.bad
        _add_first(found.unreadable["train"], block.unreadable)
        self._add_signs(self._data.train[corpus], block.quotes)
        self._add_shifts(corpus, block.shifts)
        for total, changes in zip(self._changes.values(), block.changes, strict=True):
            total.update(changes)
        for excerpt in block.excerpts:
            self._sides[corpus].add(excerpt)
        for sums, counts in zip((*found.lengths, found.ratios), (*block.lengths, block.ratios), strict=True):
            sums[:] = [old + new for old, new in zip(sums, counts, strict=True)]
        for kind, (count, places) in block.suspicious.items():
            found.suspicious[kind].count += count
            _add_first(found.suspicious[kind].places, places)
        if not self._is_filtered_by_side or self._data.train[corpus].filters == "off":
            self._pairs.write(block.hashes.pairs.tobytes())
        self._leaks.add(block.hashes, block.overlap)

    def findings(self, held_out: Sequence[Pair] = (), rejected: dict[str, int] | None = None) -> Findings:
        """The findings about all pairs that were added; to be called once, at the end. Training will leave
        out the pairs `held_out` and all other pairs of the same sources. `rejected` is the number of pairs
        that filters leave out, by reason; only duplicates among them were added. Raises StorageError."""
        found = self._found
        if self._holds_out:
            found.sets["validation"].usable = len(held_out)
        found.leaks, found.remaining = self._leaks.leaks(held_out)
        found.rejected = {reason: count for reason, count in (rejected or {}).items() if reason in RULES}
        repeated = found.rejected.get("duplicates", 0)
        found.sets["train"].usable -= repeated
        keys = self._pairs.as_array(np.uint64)
        with waiting_for("looking for duplicates"):
            duplicates = sum(map(len, find_repeated(keys, np.broadcast_to(np.uint8(0), len(keys)))))
        found.duplicates = max(0, duplicates - (0 if self._is_filtered_by_side else repeated))
        corpora = zip(found.corpora, self._sides, self._data.directions, strict=True)
        languages = {name: sides.what_is_wrong(direction) for name, sides, direction in corpora}
        found.languages = {name: wrong for name, wrong in languages.items() if wrong}
        found.unusable = [name for name, usable in found.corpora.items() if not usable]
        if len(found.corpora) == 1 or repeated:
            found.corpora = {}
        found.shifts = [shift for shift in chain.from_iterable(self._shifts) if shift.lines != 0]
        found.changes = {side: Changes.of(counts) for side, counts in self._changes.items() if counts}
        found.quoted = [file for file, signs in self._quotes.items() if show_csv(signs)]
        found.unreadable = {name: places for name, places in found.unreadable.items() if places}
        return found

    def _add_shifts(self, corpus: int, found: Iterable[Shift]) -> None:
        """Add consecutive pairs, of which the first may continue the last ones of the same file."""
        shifts = self._shifts[corpus]
        for new in found:
            last = shifts[-1] if shifts else None
            if last and last.lines == new.lines and _file_of(last) == _file_of(new):
                last.last, last.pairs = new.last, last.pairs + new.pairs
                continue
            if last and last.lines == 0:
                shifts.pop()  # it will not be shown, nor continued
            if len(shifts) < 2 * PLACES:
                shifts.append(new)

    def _add_signs(self, corpus: Corpus, signs: dict[str, int]) -> None:
        if isinstance(corpus, TsvCorpus) and not corpus.quotes:
            self._quotes[corpus.tsv].update(signs)

    def _usable(self, corpora: Iterable[Corpus], name: str, digests: Digests | None) -> Iterator[Pair]:
        """The usable pairs of a validation or test set, which are counted."""
        counts = self._found.sets[name]
        for corpus in corpora:
            for raw in read_blocks(corpus, digests):
                block = parse_block(raw, corpus)
                usable = block.usable()
                counts.bad += len(block.errors)
                _add_first(self._found.unreadable[name], first_errors(block))
                self._add_shifts(-1, find_shifts(block))
                self._add_signs(corpus, count_signs(usable.sources + usable.targets))
                counts.usable += len(usable.sources)
                counts.empty += len(block.sources) - len(usable.sources)
                yield from map(Pair, usable.sources, usable.targets)


def _file_of(shift: Shift) -> str:
    return shift.first.rpartition(":")[0]


def _add_first(places: list[str], new: Sequence[str]) -> None:
    places += new[: PLACES - len(places)]


def count_tag_ids(data: DataConfig, tokenizer: Tokenizer) -> tuple[int, int]:
    """The number of ids that tell the languages on each side. It is the same for all corpora."""
    return tokenizer.tags_of(data.direction_of(data.train[0]), data.language_tags).counts


def segment(pairs: Sequence[Pair], tokenizer: Tokenizer, data: DataConfig) -> Segmentation:
    """Segment a sample of the training pairs."""
    texts = [[pair.source for pair in pairs], [pair.target for pair in pairs]]
    sides = tokenizer.encode_source(texts[0]), tokenizer.encode_target(texts[1])
    added = [1 + count for count in count_tag_ids(data, tokenizer)]
    lengths = ((len(a) + added[0], len(b) + added[1]) for a, b in zip(*sides, strict=True))
    too_long = sum(are_too_long(*both, data.max_length) for both in lengths)
    found = Segmentation(len(pairs), too_long, [], [])
    for rows, side, vocabulary in zip(sides, texts, (tokenizer.source, tokenizer.target), strict=True):
        tokens, unlearned = sum(map(len, rows)), vocabulary.unlearned()
        words = int(count_words(side, [main_script(side[:SCRIPT_PAIRS])]).sum())
        found.tokens_per_word.append(tokens / max(1, words))
        found.unknown.append(sum(i in unlearned for ids in rows for i in ids) / max(1, tokens))
    return found
