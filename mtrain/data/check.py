"""Looks for problems in the data before training: counts, duplicates, leaks, suspicious pairs.

A `DataCheck` sees every training pair once. Its memory is bounded, unless validation pairs are held out of
training: then it grows by 24 bytes per pair. It needs no tokenizer. If there is one, `segment` measures how
it segments a sample of the training pairs.
"""

import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress, repeat
from operator import eq

import numpy as np
import numpy.typing as npt

from mtrain.config.corpora import Corpus, Holdout
from mtrain.config.data import DataConfig
from mtrain.data import Pair
from mtrain.data.corpus import Block, parse_block, read_blocks
from mtrain.data.duplicates import DuplicateCounter
from mtrain.data.lines import Digests
from mtrain.data.scripts import ScriptFilter, main_script, script_of
from mtrain.tokenizer.tokenizer import Tokenizer

KINDS = ("a copied source", "an extreme length ratio", "an unexpected script")
LENGTH_BINS = (1, 6, 11, 21, 31, 51, 101)  # words; each bin ends where the next begins
RATIO_BINS = (0.0, 0.25, 0.5, 0.8, 1.25, 2.0, 4.0)  # target characters / source characters
EXTREME_RATIO = 4.0  # of characters, if the longer side has at least `_LONG`
_LONG = 20
_PLACES = 5  # locations listed for each kind of suspicious pair
_SCRIPT_PAIRS = 1000  # the scripts of the corpus are those of its first pairs
_NO_WORD = re.compile(r"[^\w\0]+")


@dataclass
class Counts:
    """Numbers of pairs in one set."""

    usable: int = 0
    empty: int = 0  # the source or the target is blank
    bad: int = 0  # unreadable


@dataclass
class Leak:
    """How many pairs of a validation or test set are also in the training corpus."""

    pairs: int = 0  # same source and target
    sources: int = 0  # same source
    normalized: int = 0  # same source, ignoring case, spaces and punctuation


@dataclass
class Suspicious:
    """Training pairs of one suspicious kind."""

    count: int = 0
    places: list[str] = field(default_factory=list)  # file:line of the first ones

    def add(self, block: Block, numbers: Iterable[int]) -> None:
        """Count the pairs of a block with these numbers."""
        for number in numbers:
            self.count += 1
            if len(self.places) < _PLACES:
                self.places.append(block.place_of(number))


@dataclass
class Segmentation:
    """How the tokenizer segments a sample of the training pairs."""

    pairs: int
    too_long: int
    tokens_per_word: list[float]  # source, target
    unknown: list[float]  # source, target: share of tokens that are <unk> or bytes


@dataclass
class Findings:
    """The result of a check."""

    sets: dict[str, Counts]  # by name: train, validation, and the test sets
    duplicates: int  # training pairs that repeat an earlier one; see `DuplicateCounter`
    leaks: dict[str, Leak]
    lengths: tuple[list[int], list[int]]  # training pairs by words of source and target, in LENGTH_BINS
    ratios: list[int]  # in RATIO_BINS
    scripts: tuple[str, str]  # of source and target
    suspicious: dict[str, Suspicious]
    segmentation: Segmentation | None = None


class DataCheck:
    """Collects the findings about a config's data while its training pairs are read."""

    def __init__(self, data: DataConfig, digests: Digests | None = None):
        """Read the validation and test sets. Raises DataError if one is missing or its sides differ in
        length; unreadable lines are counted. `digests` is as in `read_corpus`."""
        self._holdout = isinstance(data.validation, Holdout)
        validation = {} if isinstance(data.validation, Holdout) else {"validation": data.validation}
        others = {**validation, **{name: [corpus] for name, corpus in data.test.items()}}
        self._sets = {name: Counts() for name in ("train", "validation", *others)}
        self._held_out = {
            name: _HeldOutSet(_usable(corpora, self._sets[name], digests)) for name, corpora in others.items()
        }
        self._first: list[tuple[Block, Corpus]] = []  # usable pairs, until the scripts are known
        self._filters: tuple[ScriptFilter, ScriptFilter] | None = None
        self._scripts = ("", "")
        self._duplicates = DuplicateCounter()
        # The keys of all training pairs, which are needed only to compare pairs held out at the end.
        self._keys = [array("q") for _ in range(3 if self._holdout else 0)]
        self._lengths = [np.zeros(len(LENGTH_BINS), np.int64) for _ in Pair._fields]
        self._ratios = np.zeros(len(RATIO_BINS), np.int64)
        self._suspicious = {kind: Suspicious() for kind in KINDS}

    def add(self, block: Block, corpus: Corpus) -> None:
        """Add some pairs of a training corpus."""
        usable = _count(block, self._sets["train"])
        if self._filters is not None:
            self._add(usable, corpus)
            return
        self._first.append((usable, corpus))
        if sum(len(each.sources) for each, _ in self._first) >= _SCRIPT_PAIRS:
            self._add_first()

    def findings(self, held_out: Sequence[Pair] = ()) -> Findings:
        """The findings about the pairs added so far. `held_out` are those that training will leave out, with
        all other pairs of the same sources."""
        self._add_first()
        leaks = {name: others.leak() for name, others in self._held_out.items()}
        if self._holdout:
            self._sets["validation"].usable = len(held_out)
            leaks = {"validation": self._leak_of(held_out), **leaks}
        return Findings(
            sets=self._sets,
            duplicates=self._duplicates.duplicates(),
            leaks=leaks,
            lengths=(self._lengths[0].tolist(), self._lengths[1].tolist()),
            ratios=self._ratios.tolist(),
            scripts=self._scripts,
            suspicious=self._suspicious,
        )

    def _leak_of(self, held_out: Sequence[Pair]) -> Leak:
        """The leak of held-out pairs into the pairs that remain for training."""
        validation, sources = _HeldOutSet(held_out), {hash(pair.source) for pair in held_out}
        pairs, exact, normalized = (np.array(column) for column in self._keys)
        kept = ~np.isin(exact, list(sources))
        validation.compare((pairs[kept], exact[kept], normalized[kept]))
        return validation.leak()

    def _add_first(self) -> None:
        """Determine the scripts by the first pairs, and add these."""
        if self._filters is None:
            sources = [text for block, _ in self._first for text in block.sources]
            targets = [text for block, _ in self._first for text in block.targets]
            self._scripts = main_script(sources[:_SCRIPT_PAIRS]), main_script(targets[:_SCRIPT_PAIRS])
            self._filters = ScriptFilter(self._scripts[0]), ScriptFilter(self._scripts[1])
        for item in self._first:
            self._add(*item)
        self._first = []

    def _add(self, block: Block, corpus: Corpus) -> None:
        if not block.sources:
            return
        keys = _keys(block.sources, block.targets, normalize=self._holdout or bool(self._held_out))
        self._duplicates.add(np.fromiter(keys[0], np.int64))
        for column, new in zip(self._keys, keys, strict=False):
            column.extend(new)
        for held_out in self._held_out.values():
            held_out.compare(keys)
        for counts, texts in zip(self._lengths, block[:2], strict=True):
            words = np.fromiter(map(str.count, texts, repeat(" ")), np.int64, len(texts)) + 1
            counts += _histogram(words, LENGTH_BINS)
        sizes = [np.fromiter(map(len, texts), np.int64, len(texts)) for texts in block[:2]]
        ratios = sizes[1] / sizes[0]
        self._ratios += _histogram(ratios, RATIO_BINS)
        extreme = (np.maximum(*sizes) >= _LONG) & ~((ratios > 1 / EXTREME_RATIO) & (ratios < EXTREME_RATIO))
        self._add_suspicious(block, corpus, np.flatnonzero(extreme).tolist())

    def _add_suspicious(self, block: Block, corpus: Corpus, extreme: list[int]) -> None:
        """Count each suspicious pair as one kind, the first that applies."""
        assert self._filters is not None
        equal = np.flatnonzero(np.fromiter(map(eq, *block[:2]), np.bool_, len(block.sources))).tolist()
        copied = [i for i in equal if script_of(block.sources[i])]
        sides = zip(self._filters, block[:2], strict=True)
        unexpected = {i for filter_, texts in sides for i in filter_.unexpected(texts)}
        counted: set[int] = set()
        for kind, found in zip(KINDS, (copied, extreme, sorted(unexpected)), strict=True):
            rows = [i for i in found if i not in counted]
            self._suspicious[kind].add(block, (block.numbers[i] for i in rows))
            counted.update(rows)


def _count(block: Block, counts: Counts) -> Block:
    """Count the pairs of a block, and return the usable ones."""
    stripped = zip(map(str.strip, block.sources), map(str.strip, block.targets), strict=True)
    filled = [bool(source and target) for source, target in stripped]
    counts.bad += len(block.errors)
    counts.empty += filled.count(False)
    counts.usable += filled.count(True)
    if all(filled):
        return block
    sources, targets = (list(compress(texts, filled)) for texts in block[:2])
    return block._replace(sources=sources, targets=targets, numbers=list(compress(block.numbers, filled)))


def _usable(corpora: Iterable[Corpus], counts: Counts, digests: Digests | None) -> Iterator[Pair]:
    for corpus in corpora:
        for raw in read_blocks(corpus, digests):
            block = _count(parse_block(raw, corpus), counts)
            yield from map(Pair, block.sources, block.targets)


def _histogram(values: npt.NDArray[np.generic], bins: Sequence[float]) -> npt.NDArray[np.int64]:
    """How many values are in each bin."""
    return np.bincount(np.searchsorted(bins, values, side="right") - 1, minlength=len(bins))


# Hashes of pairs, of their sources, and of their normalized sources.
Keys = tuple[Iterable[int], Iterable[int], Iterable[int]]


def _keys(sources: Sequence[str], targets: Sequence[str], normalize: bool = True) -> Keys:
    """The hashes of pairs. Sources are normalized to their words, without case, spaces and punctuation; those
    without words stay as they are."""
    pairs = list(map(hash, zip(sources, targets, strict=True)))
    if not normalize or not sources:
        return pairs, [], []
    words = map(str.strip, _NO_WORD.sub(" ", "\0".join(sources).casefold()).split("\0"))
    normalized = (text or source for text, source in zip(words, sources, strict=True))
    return pairs, list(map(hash, sources)), list(map(hash, normalized))


class _HeldOutSet:
    """A validation or test set, and which of its pairs occur in training."""

    def __init__(self, pairs: Iterable[Pair]):
        pairs = list(pairs)
        self._columns = _keys([pair.source for pair in pairs], [pair.target for pair in pairs])
        self._wanted = [frozenset(column) for column in self._columns]
        self._found: list[set[int]] = [set(), set(), set()]

    def compare(self, keys: Keys) -> None:
        """Record which pairs of the set have a key of these training pairs."""
        for column, wanted, found in zip(keys, self._wanted, self._found, strict=False):
            found |= wanted.intersection(column)

    def leak(self) -> Leak:
        """The number of pairs found in training."""
        both = zip(self._columns, self._found, strict=True)
        return Leak(*(sum(key in found for key in column) for column, found in both))


def segment(pairs: Sequence[Pair], tokenizer: Tokenizer, max_length: int) -> Segmentation:
    """Segment a sample of the training pairs."""
    texts = [[pair.source for pair in pairs], [pair.target for pair in pairs]]
    sides = tokenizer.encode_source(texts[0]), tokenizer.encode_target(texts[1])
    longer = [max(map(len, ids)) + 1 for ids in zip(*sides, strict=True)]
    found = Segmentation(len(pairs), sum(length > max_length for length in longer), [], [])
    for rows, side, vocabulary in zip(sides, texts, (tokenizer.source, tokenizer.target), strict=True):
        tokens, unlearned = sum(map(len, rows)), vocabulary.unlearned()
        found.tokens_per_word.append(tokens / max(1, sum(len(text.split()) for text in side)))
        found.unknown.append(sum(i in unlearned for ids in rows for i in ids) / max(1, tokens))
    return found
