"""Checks a block of training pairs: what can be found without the other blocks."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import compress, islice, pairwise, repeat
from operator import eq
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from sentencepiece import SentencePieceNormalizer

from mtrain.config.languages import are_spaced
from mtrain.data.reading.blocks import Block
from mtrain.data.reading.records import count_signs
from mtrain.data.scanning.leaks import NO_HASHES, PairHashes, hash_all
from mtrain.data.scanning.normalization import Change, ChangeCounter
from mtrain.data.scanning.sides import Shift, find_shifts
from mtrain.data.text.hashes import common
from mtrain.data.text.sizes import PerText, measure
from mtrain.data.text.writing_systems import ScriptFilter, script_of

MARKED = "marks of a tokenizer, such as &apos; or @@"
KINDS = ("a copied source", "an extreme length ratio", "an unexpected script", MARKED)
# Of Moses, subword-nmt and SentencePiece.
_MARKS = re.compile(r"&(?:apos|quot|amp|lt|gt|#91|#93|#124);|@-@|@@(?: |$)|\u2581")
LENGTH_BINS = (1, 6, 11, 21, 31, 51, 101)  # words; each bin ends where the next begins
RATIO_BINS = (0.0, 0.25, 0.5, 0.8, 1.25, 2.0, 4.0)  # target characters / source characters
LENGTH_LABELS = [*(f"{a} to {b - 1}" for a, b in pairwise(LENGTH_BINS)), f"{LENGTH_BINS[-1]} or more"]
RATIO_LABELS = [*(f"{a:g} to {b:g}" for a, b in pairwise(RATIO_BINS)), f"{RATIO_BINS[-1]:g} or more"]
PLACES = 5  # locations listed for each kind of suspicious pair, and for unreadable pairs
EXTREME_RATIO = 4.0  # of characters, divided by the typical one, if the longer side has at least `_LONG`
_LONG = 20
_ENOUGH = 100  # pairs that tell the typical ratio
_TEXTS = 200  # of each block, to identify the languages
_LONGEST = 500  # characters of each
_PARTS = 4  # of a block
_FIELDS = 400  # of each side of a block, to tell whether fields are in quotes


class BlockFindings(NamedTuple):
    """What a check finds in one block."""

    usable: int
    empty: int
    bad: int
    unreadable: list[str]  # the first bad pairs, as `file:line: reason`
    lengths: tuple[list[int], list[int]]  # pairs by words of source and target (see `count_words`)
    ratios: list[int]  # in RATIO_BINS
    suspicious: dict[str, tuple[int, list[str]]]  # number of pairs and first locations, by kind
    changes: tuple[Counter[Change], ...]  # by normalization, of source and target
    shifts: list[Shift]
    excerpts: list[Block]  # for each part of the block, some of its usable pairs, shortened
    quotes: dict[str, int]  # signs of quoted fields, see `count_signs`
    hashes: PairHashes  # of the usable pairs; only the hashes that are needed
    overlap: PairHashes  # hashes that also occur in the validation and test sets


Scripts = Sequence[Sequence[Sequence[str]]]  # of the sides of each corpus
Normalizers = Sequence[SentencePieceNormalizer | None]  # of source and target; None changes nothing


class BlockCheck:
    """Checks blocks of training pairs."""

    def __init__(
        self, scripts: Scripts, evaluation_hashes: PairHashes, keep_hashes: bool, normalizers: Normalizers
    ):
        """`scripts` are the expected scripts of the sources and targets of each corpus, none if they are not
        known. `evaluation_hashes` are the sorted hashes of the validation and test sets. With
        `keep_hashes`, the findings contain the hashes of all sources. `normalizers` are the ones that
        the tokenizer will apply."""
        self.scripts, self.evaluation_hashes = scripts, evaluation_hashes
        self.keep_hashes = keep_hashes
        self._counters = [None if each is None else ChangeCounter(each) for each in normalizers]
        distinct = {tuple(expected) for sides in scripts for expected in sides if expected}
        self._filters = {expected: ScriptFilter(*expected) for expected in distinct}

    def check(self, block: Block, corpus: int, unfiltered: Block) -> BlockFindings:
        """Check a block of corpus number `corpus` (from 0). `unfiltered` also has the pairs that filters
        leave out: shifts can only be found in consecutive pairs."""
        usable, scripts = block.usable(), self.scripts[corpus]
        sources, targets = usable.sources, usable.targets
        needs_normalized = self.keep_hashes or bool(len(self.evaluation_hashes.pairs))
        hashes = hash_all(sources, targets, needs_normalized)
        sizes = [np.fromiter(map(len, texts), np.int64, len(texts)) for texts in (sources, targets)]
        ratios = sizes[1] / sizes[0]
        extreme = (np.maximum(*sizes) >= _LONG) & _are_extreme(ratios)
        words = count_words(sources, scripts[0]), count_words(targets, scripts[1])
        sides = zip(self._counters, (sources, targets), strict=True)
        return BlockFindings(
            usable=len(sources),
            empty=len(block.sources) - len(sources),
            bad=len(block.errors),
            unreadable=first_errors(block),
            lengths=(_histogram(words[0], LENGTH_BINS), _histogram(words[1], LENGTH_BINS)),
            ratios=_histogram(ratios, RATIO_BINS),
            suspicious=self._suspicious(usable, corpus, np.flatnonzero(extreme).tolist()),
            changes=tuple(counter.count(texts) if counter else Counter() for counter, texts in sides),
            shifts=find_shifts(unfiltered),
            excerpts=[*_excerpts_of(usable)],
            quotes=count_signs(_sample(sources, _FIELDS) + _sample(targets, _FIELDS)),
            hashes=hashes if self.keep_hashes else PairHashes(hashes.pairs, NO_HASHES, NO_HASHES),
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
        pairs = enumerate(zip(block.sources, block.targets, strict=True))
        marked = [i for i, pair in pairs if any(map(_has_marks, pair))]
        for kind, indices in zip(KINDS, (copied, extreme, sorted(unexpected), marked), strict=True):
            new = [i for i in indices if i not in counted]
            counted.update(new)
            found[kind] = len(new), [block.place_of(block.numbers[i]) for i in new[:PLACES]]
        return found


def _has_marks(text: str) -> bool:
    possible = "&" in text or "@" in text or "\u2581" in text  # few texts, so the expression is rarely needed
    return possible and _MARKS.search(text) is not None


def _are_extreme(ratios: npt.NDArray[np.floating]) -> npt.NDArray[np.bool_]:
    """Whether ratios of target to source characters are extreme for their block: Chinese texts have a third
    of the characters of English ones. A typical ratio that is itself extreme does not excuse the pairs: its
    cause is a wrong column or file."""
    typical = np.median(ratios) if len(ratios) >= _ENOUGH else 1.0
    if not 1 / EXTREME_RATIO < typical < EXTREME_RATIO:
        typical = 1.0
    return ~((ratios > typical / EXTREME_RATIO) & (ratios < typical * EXTREME_RATIO))


def _sample(texts: list[str], most: int) -> list[str]:
    """At most so many texts, at equal distances."""
    return texts[:: len(texts) // most + 1]


def _excerpts_of(block: Block) -> Iterator[Block]:
    """Some of the pairs of each part of a block, shortened."""
    step = len(block.sources) // _TEXTS + 1
    for start in range(0, len(block.sources), step * (_TEXTS // _PARTS)):
        part = slice(start, start + step * (_TEXTS // _PARTS), step)
        sources, targets = ([text[:_LONGEST] for text in side[part]] for side in block[:2])
        yield block._replace(sources=sources, targets=targets, numbers=block.numbers[part], scores=())


def first_errors(block: Block) -> list[str]:
    """The errors of the first unreadable pairs of a block."""
    return [*map(str, islice(block.errors.values(), PLACES))]


def count_words(texts: Sequence[str], scripts: Sequence[str]) -> PerText:
    """The number of words of each text, at least 1. In scripts without spaces, each visible character counts
    as a word."""
    if are_spaced(scripts):
        return np.fromiter(map(str.count, texts, repeat(" ")), np.int64, len(texts)) + 1
    return np.maximum(measure(texts).visible, 1)


def _histogram(values: npt.NDArray[np.generic], bins: Sequence[float]) -> list[int]:
    """How many values are in each bin."""
    counts = np.bincount(np.searchsorted(bins, values, side="right") - 1, minlength=len(bins))
    return [int(count) for count in counts]
