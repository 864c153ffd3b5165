"""Looks for problems in the data before training: counts, duplicates, leaks, suspicious pairs.

A `DataCheck` sees every training pair once. Its memory grows by 8 bytes per pair, or by 24 if validation
pairs are held out of training. It needs no tokenizer. If there is one, `segment` measures how it segments a
sample of the training pairs.
"""

import re
import unicodedata
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from mtrain.config.corpora import Corpus, Holdout
from mtrain.config.data import DataConfig
from mtrain.data import Pair
from mtrain.data.corpus import Digests, place_of, read_corpus
from mtrain.errors import DataError
from mtrain.tokenizer.tokenizer import Tokenizer

KINDS = ("a copied source", "an extreme length ratio", "an unexpected script")
LENGTH_BINS = (1, 6, 11, 21, 31, 51, 101)  # words; each bin ends where the next begins
RATIO_BINS = (0.0, 0.25, 0.5, 0.8, 1.25, 2.0, 4.0)  # target characters / source characters
EXTREME_RATIO = 4.0  # of characters, if the longer side has at least `_LONG`
_LONG = 20
_PLACES = 5  # locations listed for each kind of suspicious pair
_SCRIPT_PAIRS = 1000  # the scripts of the corpus are those of its first pairs
_WORDS = re.compile(r"\w+")


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

    def add(self, place: str) -> None:
        """Count a pair."""
        self.count += 1
        if len(self.places) < _PLACES:
            self.places.append(place)


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
    duplicates: int  # training pairs that repeat an earlier one
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
        self._first: list[tuple[Pair, Corpus, int]] = []  # until the scripts are known
        self._scripts: tuple[str, str] | None = None
        # The keys of all training pairs; the last two are needed only to compare pairs held out at the end.
        self._keys = [array("q") for _ in range(3 if self._holdout else 1)]
        self._lengths = ([0] * len(LENGTH_BINS), [0] * len(LENGTH_BINS))
        self._ratios = [0] * len(RATIO_BINS)
        self._suspicious = {kind: Suspicious() for kind in KINDS}

    def add(self, item: Pair | DataError, corpus: Corpus, number: int) -> None:
        """Add pair `number` (from 1) of a training corpus, or the error that reading it raised."""
        if not _count(item, self._sets["train"]):
            return
        assert isinstance(item, Pair)
        if self._scripts is None:
            self._first.append((item, corpus, number))
            if len(self._first) == _SCRIPT_PAIRS:
                self._add_first()
        else:
            self._add(item, corpus, number)

    def findings(self, held_out: Sequence[Pair] = ()) -> Findings:
        """The findings about the pairs added so far. `held_out` are those that training will leave out, with
        all other pairs of the same sources."""
        scripts = self._scripts or self._add_first()
        leaks = {name: others.leak() for name, others in self._held_out.items()}
        if self._holdout:
            self._sets["validation"].usable = len(held_out)
            leaks = {"validation": self._leak_of(held_out), **leaks}
        return Findings(
            sets=self._sets,
            duplicates=len(self._keys[0]) - len(np.unique(np.array(self._keys[0]))),
            leaks=leaks,
            lengths=self._lengths,
            ratios=self._ratios,
            scripts=scripts,
            suspicious=self._suspicious,
        )

    def _leak_of(self, held_out: Sequence[Pair]) -> Leak:
        """The leak of held-out pairs into the pairs that remain for training."""
        validation, sources = _HeldOutSet(held_out), {hash(pair.source) for pair in held_out}
        for pair, source, normalized in zip(*self._keys, strict=True):
            if source not in sources:
                validation.compare((pair, source, normalized))
        return validation.leak()

    def _add_first(self) -> tuple[str, str]:
        pairs = [pair for pair, *_ in self._first]
        self._scripts = scripts = _main_script(p.source for p in pairs), _main_script(p.target for p in pairs)
        for item in self._first:
            self._add(*item)
        self._first = []
        return scripts

    def _add(self, pair: Pair, corpus: Corpus, number: int) -> None:
        keys = _keys(pair)
        for column, key in zip(self._keys, keys, strict=False):
            column.append(key)
        for held_out in self._held_out.values():
            held_out.compare(keys)
        for counts, text in zip(self._lengths, pair, strict=True):
            counts[_bin(text.count(" ") + 1, LENGTH_BINS)] += 1
        self._ratios[_bin(len(pair.target) / len(pair.source), RATIO_BINS)] += 1
        if kind := self._kind(pair):
            self._suspicious[kind].add(place_of(corpus, number))

    def _kind(self, pair: Pair) -> str | None:
        """The kind of suspicious pair that this is, if any."""
        assert self._scripts is not None
        source, target = len(pair.source), len(pair.target)
        if pair.source == pair.target and _script(pair.source):
            return KINDS[0]
        if max(source, target) >= _LONG and not 1 / EXTREME_RATIO < target / source < EXTREME_RATIO:
            return KINDS[1]
        if any(_script(text) not in (script, "") for text, script in zip(pair, self._scripts, strict=True)):
            return KINDS[2]
        return None


def _count(item: Pair | DataError, counts: Counts) -> bool:
    """Count a pair, and return whether it is usable."""
    if isinstance(item, DataError):
        counts.bad += 1
        return False
    if not (item.source.strip() and item.target.strip()):
        counts.empty += 1
        return False
    counts.usable += 1
    return True


def _usable(corpora: Iterable[Corpus], counts: Counts, digests: Digests | None) -> Iterator[Pair]:
    for corpus in corpora:
        for item in read_corpus(corpus, digests):
            if _count(item, counts) and isinstance(item, Pair):
                yield item


def _bin(value: float, bins: Sequence[float]) -> int:
    return bisect_right(bins, value) - 1


def _normalized(text: str) -> str:
    """The words of a text, without case, spaces and punctuation."""
    return " ".join(_WORDS.findall(text.casefold()))


def _keys(pair: Pair) -> tuple[int, int, int]:
    """Hashes of the pair, of its source, and of its normalized source (if it has any words)."""
    return hash(pair), hash(pair.source), hash(_normalized(pair.source) or pair.source)


class _HeldOutSet:
    """A validation or test set, and which of its pairs occur in training."""

    def __init__(self, pairs: Iterable[Pair]):
        keys = [_keys(pair) for pair in pairs]
        self._columns: list[tuple[int, ...]] = list(zip(*keys, strict=True)) or [(), (), ()]
        self._wanted = [frozenset(column) for column in self._columns]
        self._found: list[set[int]] = [set(), set(), set()]

    def compare(self, keys: tuple[int, int, int]) -> None:
        """Record which pairs of the set have a key of this training pair."""
        for key, wanted, found in zip(keys, self._wanted, self._found, strict=True):
            if key in wanted:
                found.add(key)

    def leak(self) -> Leak:
        """The number of pairs found in training."""
        both = zip(self._columns, self._found, strict=True)
        return Leak(*(sum(key in found for key in column) for column, found in both))


_FIRST_WORD = re.compile("[A-Z]+")
_SCRIPT_GROUPS = dict.fromkeys(("HIRAGANA", "KATAKANA"), "CJK")  # Japanese mixes all three


@cache
def _script_of(character: str) -> str:
    """The script of a letter, from its Unicode name; empty for other characters."""
    if not character.isalpha():
        return ""
    name = _FIRST_WORD.match(unicodedata.name(character, ""))
    return _SCRIPT_GROUPS.get(name[0], name[0]) if name else ""


def _script(text: str) -> str:
    """The script of most letters of a text; empty if it has no letters."""
    if max(text, default="") < "\u0250":  # fast path for Latin text
        return "LATIN" if any(map(str.isalpha, text)) else ""
    letters = Counter(map(_script_of, text))
    del letters[""]
    return max(letters, key=letters.__getitem__, default="")


def _main_script(texts: Iterable[str]) -> str:
    """The script of most texts."""
    scripts = Counter(map(_script, texts))
    del scripts[""]
    return max(scripts, key=scripts.__getitem__, default="")


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
