"""The scan of a block of training pairs, and its check, which needs no other block."""

from collections.abc import Iterator, Sequence
from itertools import compress, islice, pairwise, repeat
from operator import eq
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mtrain.config.languages import Direction, are_spaced
from mtrain.config.sections.data import DataConfig
from mtrain.data.pairs.filters import BlockFilter, FilteredBlock
from mtrain.data.pairs.rejections import EMPTY
from mtrain.data.reading.blocks import RawBlock
from mtrain.data.reading.parse import Block, count_signs, parse_block, refuse_unless_skipped
from mtrain.data.scanning.leaks import NO_HASHES, PairHashes, hash_all
from mtrain.data.scanning.samples import BlockSample, HoldoutCandidate, draw_candidates, sample_block
from mtrain.data.scanning.sides import Shift, find_shifts
from mtrain.data.text.hashes import common
from mtrain.data.text.sizes import measure
from mtrain.data.text.writing_systems import ScriptFilter, script_of

KINDS = ("a copied source", "an extreme length ratio", "an unexpected script")
LENGTH_BINS = (1, 6, 11, 21, 31, 51, 101)  # words; each bin ends where the next begins
RATIO_BINS = (0.0, 0.25, 0.5, 0.8, 1.25, 2.0, 4.0)  # target characters / source characters
LENGTH_LABELS = [*(f"{a} to {b - 1}" for a, b in pairwise(LENGTH_BINS)), f"{LENGTH_BINS[-1]} or more"]
RATIO_LABELS = [*(f"{a:g} to {b:g}" for a, b in pairwise(RATIO_BINS)), f"{RATIO_BINS[-1]:g} or more"]
PLACES = 5  # locations listed for each kind of suspicious pair, and for unreadable pairs
EXTREME_RATIO = 4.0  # of characters, if the longer side has at least `_LONG`
_LONG = 20
_TEXTS = 200  # of each block, to identify the languages
_LONGEST = 500  # characters of each
_PARTS = 4  # of a block
_FIELDS = 400  # of each side of a block, to tell whether fields are in quotes


class Excerpt(NamedTuple):
    """Some of the pairs of a part of a block."""

    first: str  # location, as file:line
    last: str
    sources: list[str]  # shortened
    targets: list[str]


class BlockFindings(NamedTuple):
    """What a check finds in one block."""

    usable: int
    empty: int
    bad: int
    unreadable: list[str]  # the first bad pairs, as `file:line: reason`
    lengths: tuple[list[int], list[int]]  # pairs by words of source and target (see `count_words`)
    ratios: list[int]  # in RATIO_BINS
    suspicious: dict[str, tuple[int, list[str]]]  # number of pairs and first locations, by kind
    shifts: list[Shift]
    excerpts: list[Excerpt]
    quotes: dict[str, int]  # signs of quoted fields, see `count_signs`
    hashes: PairHashes  # of the usable pairs; only the hashes that are needed
    overlap: PairHashes  # hashes that also occur in the validation and test sets


Scripts = Sequence[Sequence[Sequence[str]]]  # of the sides of each corpus


class BlockCheck:
    """Checks blocks of training pairs."""

    def __init__(self, scripts: Scripts, evaluation_hashes: PairHashes, keep_source_hashes: bool):
        """`scripts` are the expected scripts of the sources and targets of each corpus, none if they are not
        known. `evaluation_hashes` are the sorted hashes of the validation and test sets. With
        `keep_source_hashes`, the findings contain the hashes of all sources."""
        self.scripts, self.evaluation_hashes = scripts, evaluation_hashes
        self.keep_source_hashes = keep_source_hashes
        distinct = {tuple(expected) for sides in scripts for expected in sides if expected}
        self._filters = {expected: ScriptFilter(*expected) for expected in distinct}

    def check(self, block: Block, corpus: int, unfiltered: Block) -> BlockFindings:
        """Check a block of corpus number `corpus` (from 0). `unfiltered` also has the pairs that filters
        leave out: shifts can only be found in consecutive pairs."""
        usable, scripts = block.usable(), self.scripts[corpus]
        sources, targets = usable.sources, usable.targets
        needs_normalized = self.keep_source_hashes or bool(len(self.evaluation_hashes.pairs))
        hashes = hash_all(sources, targets, needs_normalized)
        sizes = [np.fromiter(map(len, texts), np.int64, len(texts)) for texts in (sources, targets)]
        ratios = sizes[1] / sizes[0]
        extreme = (np.maximum(*sizes) >= _LONG) & ~((ratios > 1 / EXTREME_RATIO) & (ratios < EXTREME_RATIO))
        return BlockFindings(
            usable=len(sources),
            empty=len(block.sources) - len(sources),
            bad=len(block.errors),
            unreadable=first_errors(block),
            lengths=(count_words(sources, scripts[0]), count_words(targets, scripts[1])),
            ratios=_histogram(ratios, RATIO_BINS),
            suspicious=self._suspicious(usable, corpus, np.flatnonzero(extreme).tolist()),
            shifts=find_shifts(unfiltered),
            excerpts=[*_excerpts_of(usable)],
            quotes=count_signs(_sample(sources, _FIELDS) + _sample(targets, _FIELDS)),
            hashes=hashes if self.keep_source_hashes else PairHashes(hashes.pairs, NO_HASHES, NO_HASHES),
            overlap=PairHashes(*map(common, hashes, self.evaluation_hashes)),
        )

    def _suspicious(self, block: Block, corpus: int, extreme: list[int]) -> dict[str, tuple[int, list[str]]]:
        """Count each suspicious pair as one kind, the first that applies."""
        equal = compress(range(len(block.sources)), map(eq, block.sources, block.targets))
        copied = [i for i in equal if script_of(block.sources[i])]
        sides = zip(self.scripts[corpus], (block.sources, block.targets), strict=True)
        filters = [(self._filters[tuple(expected)], texts) for expected, texts in sides if expected]
        unexpected = {i for filter_, texts in filters for i in filter_.unexpected(texts)}
        found, counted = {}, set[int]()
        for kind, indices in zip(KINDS, (copied, extreme, sorted(unexpected)), strict=True):
            new = [i for i in indices if i not in counted]
            counted.update(new)
            found[kind] = len(new), [block.place_of(block.numbers[i]) for i in new[:PLACES]]
        return found


def _sample(texts: list[str], most: int) -> list[str]:
    """At most so many texts, at equal distances."""
    return texts[:: len(texts) // most + 1]


def _excerpts_of(block: Block) -> Iterator[Excerpt]:
    step = len(block.sources) // _TEXTS + 1
    for start in range(0, len(block.sources), step * (_TEXTS // _PARTS)):
        part = slice(start, start + step * (_TEXTS // _PARTS), step)
        numbers = block.numbers[part]
        first, last = block.place_of(numbers[0]), block.place_of(numbers[-1])
        sources, targets = ([text[:_LONGEST] for text in side[part]] for side in block[:2])
        yield Excerpt(first, last, sources, targets)


def first_errors(block: Block) -> list[str]:
    """The errors of the first unreadable pairs of a block."""
    return [*map(str, islice(block.errors.values(), PLACES))]


def count_words(texts: Sequence[str], scripts: Sequence[str]) -> list[int]:
    """How many texts have how many words, in LENGTH_BINS. In scripts without spaces, each character counts
    as a word."""
    if are_spaced(scripts):
        words = np.fromiter(map(str.count, texts, repeat(" ")), np.int64, len(texts)) + 1
    else:
        words = measure(texts).visible
    return _histogram(words, LENGTH_BINS)


def _histogram(values: npt.NDArray[np.generic], bins: Sequence[float]) -> list[int]:
    """How many values are in each bin."""
    counts = np.bincount(np.searchsorted(bins, values, side="right") - 1, minlength=len(bins))
    return [int(count) for count in counts]


class ScanTask(NamedTuple):
    """A block to scan, and the bounds of the samples so far: pairs beyond them need not be returned."""

    corpus: int  # index, from 0
    raw: RawBlock
    threshold: int  # of the text sample
    max_digest: str  # of pairs to hold out


class ScannedBlock(NamedTuple):
    """What a scan collects from a block."""

    pairs: int  # readable pairs
    sample: BlockSample
    candidates: list[HoldoutCandidate]  # to be held out
    findings: BlockFindings | None
    filtered: FilteredBlock | None  # samples, candidates and findings are of the pairs that are kept


class BlockScanner:
    """Scans blocks of the training corpora."""

    def __init__(self, data: DataConfig, seed: int, strict: bool, held_out: int, check: BlockCheck | None):
        """With `strict`, an unreadable pair is an error, unless `data.bad_lines` is `skip`. `held_out` is the
        number of pairs to hold out. Raises UsageError if a filter cannot be applied."""
        self._data, self._check = data, check
        self._seed, self._held_out = seed, held_out
        self._strict = strict
        self._filter = BlockFilter(data) if data.filters else None
        # Keys contain the direction; else, only the first of several corpora with the same sources would be
        # validated. Adding directions does not change the key of the direction of `data`.
        own = Direction(data.source_lang, data.target_lang)
        self._holdout_keys = [str(seed) if each == own else f"{seed} {each}" for each in data.directions]

    def __call__(self, task: ScanTask) -> ScannedBlock:
        """Scan a block. Raises DataError if, with `strict`, a pair is unreadable."""
        corpus = task.corpus
        spec = self._data.train[corpus]
        block = parse_block(task.raw, spec, self._data.score_of(spec))
        if self._strict:
            for error in block.errors.values():
                refuse_unless_skipped(error, self._data.bad_lines)
        unfiltered, filtered = block, None
        if self._filter:
            filtered = self._filter.apply(block, corpus)
            codes = filtered.codes[block.indices]
            block = block.select((codes == 0) | (codes == EMPTY))
        return ScannedBlock(
            len(unfiltered.sources),
            sample_block(block, corpus, self._seed, task.threshold),
            draw_candidates(block, corpus, self._holdout_keys[corpus], self._held_out, task.max_digest),
            self._check.check(block, corpus, unfiltered) if self._check else None,
            filtered,
        )
