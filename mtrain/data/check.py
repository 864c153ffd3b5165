"""What is wrong with the data, before it is trained on: counts, duplicates, leakage, suspicious pairs.

One pass over all corpora, in memory that grows by 32 bytes a training pair. It needs no tokenizer; with one,
a sample of the training pairs is read once more and segmented as well.
"""

import re
import unicodedata
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import chain, islice
from typing import Any

import numpy as np

from mtrain.config.corpora import Corpus, Holdout
from mtrain.config.schema import DataConfig
from mtrain.data import Pair
from mtrain.data.corpus import place_of, read_corpus
from mtrain.errors import DataError
from mtrain.tokenizer.tokenizer import Tokenizer

KINDS = ("a copied source", "an extreme length ratio", "another script")
LENGTH_BINS = (1, 6, 11, 21, 31, 51, 101)  # words; each bin ends where the next begins
RATIO_BINS = (0.0, 0.25, 0.5, 0.8, 1.25, 2.0, 4.0)  # target over source characters
EXTREME_RATIO = 4.0  # of characters, where the longer side has `_LONG` or more
_LONG = 20
_PLACES = 5  # told of each kind of suspicious pair
_SAMPLE = 20_000  # pairs that are segmented, spread over the training pairs
_WORDS = re.compile(r"\w+")

Placed = Iterator[tuple[Pair, Corpus, int]]  # and which of a corpus it is, from 1


@dataclass
class Counts:
    """The pairs of one set."""

    usable: int = 0
    empty: int = 0  # a side is blank
    bad: int = 0  # cannot be read


@dataclass
class Leak:
    """How many pairs of a validation or test set are in training."""

    pairs: int = 0  # both sides alike
    sources: int = 0
    normalised: int = 0  # sources, but for case, spaces and punctuation


@dataclass
class Suspects:
    """Training pairs of one kind."""

    count: int = 0
    places: list[str] = field(default_factory=list)  # file:line of the first

    def add(self, place: str) -> None:
        """Count one."""
        self.count += 1
        if len(self.places) < _PLACES:
            self.places.append(place)


@dataclass
class Segmentation:
    """How the tokenizer takes a sample of the training pairs."""

    pairs: int
    too_long: int
    tokens_per_word: list[float]  # of source and target
    unknown: list[float]  # of both, share of tokens that are <unk> or bytes


@dataclass
class Findings:
    """All that was found."""

    sets: dict[str, Counts]  # train, and the others by name
    duplicates: int  # training pairs that repeat an earlier one
    leaks: dict[str, Leak]
    lengths: tuple[list[int], list[int]]  # training pairs by words of source and target, in LENGTH_BINS
    ratios: list[int]  # in RATIO_BINS
    scripts: tuple[str, str]  # that the sides are written in
    suspects: dict[str, Suspects]
    segmentation: Segmentation | None = None


def check_data(data: DataConfig, tokenizer: Tokenizer | None = None) -> Findings:
    """Read every corpus of a config. Raises DataError if one is missing or its sides differ in length; single
    lines that are not clean text are counted."""
    held_out = {} if isinstance(data.validation, Holdout) else {"validation": data.validation}
    others = {**held_out, **{name: [corpus] for name, corpus in data.test.items()}}
    sets = {name: Counts() for name in ("train", *others)}
    watched = {name: _Watched(_usable(corpora, sets[name])) for name, corpora in others.items()}
    train = _usable(data.train, sets["train"])
    first = list(islice(train, 1000))
    scan = _Scan((_main_script(p.source for p, *_ in first), _main_script(p.target for p, *_ in first)))
    for pair, corpus, number in chain(first, train):
        keys = _keys(pair)
        if kind := scan.add(pair, keys[0]):
            scan.suspects[kind].add(place_of(corpus, number))
        for each in watched.values():
            each.compare(keys)
    found = Findings(
        sets=sets,
        duplicates=scan.duplicates(),
        leaks={name: each.leak() for name, each in watched.items()},
        lengths=(scan.histogram(scan.words[0], LENGTH_BINS), scan.histogram(scan.words[1], LENGTH_BINS)),
        ratios=scan.histogram(scan.ratios, RATIO_BINS),
        scripts=scan.scripts,
        suspects=scan.suspects,
    )
    if tokenizer is not None and first:
        step = -(-sets["train"].usable // _SAMPLE)
        sample = [pair for pair, *_ in islice(_usable(data.train, Counts()), 0, None, step)]
        found.segmentation = _segment(sample, tokenizer, data.max_length)
    return found


def _usable(corpora: Iterable[Corpus], counts: Counts) -> Placed:
    """The pairs that can be used; the others are counted."""
    for corpus in corpora:
        for number, pair in enumerate(read_corpus(corpus), start=1):
            if isinstance(pair, DataError):
                counts.bad += 1
            elif not (pair.source.strip() and pair.target.strip()):
                counts.empty += 1
            else:
                counts.usable += 1
                yield pair, corpus, number


def _normalised(text: str) -> str:
    """A text's words, without case, spaces and punctuation."""
    return " ".join(_WORDS.findall(text.casefold()))


def _keys(pair: Pair) -> tuple[int, int, int]:
    """What makes a pair the same as another: all of it, its source, its source's words, if it has any."""
    return hash(pair), hash(pair.source), hash(_normalised(pair.source) or pair.source)


class _Watched:
    """A set whose pairs are looked for in training."""

    def __init__(self, pairs: Placed):
        keys = [_keys(pair) for pair, *_ in pairs]
        self.own: list[tuple[int, ...]] = list(zip(*keys, strict=True)) or [(), (), ()]
        self.wanted = [frozenset(each) for each in self.own]
        self.found: list[set[int]] = [set(), set(), set()]

    def compare(self, keys: tuple[int, int, int]) -> None:
        """Note which of its pairs a training pair is."""
        for key, wanted, found in zip(keys, self.wanted, self.found, strict=True):
            if key in wanted:
                found.add(key)

    def leak(self) -> Leak:
        """What was found, counted in its own pairs."""
        both = zip(self.own, self.found, strict=True)
        return Leak(*(sum(key in found for key in own) for own, found in both))


class _Scan:
    """Figures of the training pairs, as they come."""

    def __init__(self, scripts: tuple[str, str]):
        self.scripts = scripts
        self.hashes = array("q")
        self.words, self.ratios = (array("l"), array("l")), array("d")
        self.suspects = {kind: Suspects() for kind in KINDS}

    def add(self, pair: Pair, key: int) -> str | None:
        """Take a pair in; returns which of KINDS it is suspected of."""
        self.hashes.append(key)
        for words, text in zip(self.words, pair, strict=True):
            words.append(text.count(" ") + 1)
        source, target = len(pair.source), len(pair.target)
        self.ratios.append(target / source)
        if pair.source == pair.target and _script(pair.source):
            return KINDS[0]
        if max(source, target) >= _LONG and not 1 / EXTREME_RATIO < target / source < EXTREME_RATIO:
            return KINDS[1]
        if any(_script(text) not in (script, "") for text, script in zip(pair, self.scripts, strict=True)):
            return KINDS[2]
        return None

    def duplicates(self) -> int:
        """Pairs that repeat an earlier one."""
        return len(self.hashes) - len(np.unique(np.array(self.hashes)))

    def histogram(self, values: Any, bins: tuple[float, ...]) -> list[int]:
        """How many values there are from each bin's start to the next one's."""
        return np.histogram(np.array(values), [*bins, np.inf])[0].tolist()  # type: ignore[no-any-return]


_FIRST_WORD = re.compile("[A-Z]+")
_SAME = dict.fromkeys(("HIRAGANA", "KATAKANA"), "CJK")  # of one language's writing


@cache
def _script_of(character: str) -> str:
    """The script of a letter, by its Unicode name; nothing for what is no letter."""
    if not character.isalpha():
        return ""
    name = _FIRST_WORD.match(unicodedata.name(character, ""))
    return _SAME.get(name[0], name[0]) if name else ""


def _script(text: str) -> str:
    """The script of most letters of a text; nothing if it has none."""
    if max(text, default="") < "\u0250":  # the fast way for most of the world's corpora
        return "LATIN" if any(map(str.isalpha, text)) else ""
    letters = Counter(map(_script_of, text))
    del letters[""]
    return max(letters, key=letters.__getitem__, default="")


def _main_script(texts: Iterable[str]) -> str:
    """The script of most texts."""
    scripts = Counter(map(_script, texts))
    del scripts[""]
    return max(scripts, key=scripts.__getitem__, default="")


def _segment(sample: list[Pair], tokenizer: Tokenizer, max_length: int) -> Segmentation:
    texts = [[pair.source for pair in sample], [pair.target for pair in sample]]
    sides = tokenizer.encode_source(texts[0]), tokenizer.encode_target(texts[1])
    longer = [max(map(len, ids)) + 1 for ids in zip(*sides, strict=True)]
    found = Segmentation(len(sample), sum(length > max_length for length in longer), [], [])
    for rows, side, vocabulary in zip(sides, texts, (tokenizer.source, tokenizer.target), strict=True):
        tokens, strange = sum(map(len, rows)), vocabulary.strange()
        found.tokens_per_word.append(tokens / max(1, sum(len(text.split()) for text in side)))
        found.unknown.append(sum(i in strange for ids in rows for i in ids) / max(1, tokens))
    return found
