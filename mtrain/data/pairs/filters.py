"""Filters training pairs by the rules of `data.filters`: each block by itself, then all for duplicates.

The result, see `Rejections`, is a code for each pair.
"""

import re
from collections.abc import Callable, Sequence
from functools import cache, cached_property, partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mtrain.config.languages import has_spaces, scripts_of_language
from mtrain.config.sections.data import DataConfig
from mtrain.config.sections.filters import RULES, Filters
from mtrain.data.pairs.duplicates import find_repeated
from mtrain.data.pairs.rejections import BAD, DUPLICATE, EMPTY, REASONS, Codes, Rejections
from mtrain.data.reading.blocks import Block
from mtrain.data.text.hashes import Hashes, hash_pairs, hash_texts
from mtrain.data.text.identify_language import LanguageFilter
from mtrain.data.text.sizes import TextSizes, measure
from mtrain.data.text.urls import urls_of
from mtrain.data.text.writing_systems import ScriptFilter, script_of
from mtrain.storage.temporary import TemporaryStream
from mtrain.tokenizer.rows import Indices, Mask

_NUMBER = re.compile(r"\d+")
_OTHER_DIGIT = re.compile(r"[^\D0-9]")  # a digit outside ASCII
_SEPARATOR = r"[.,'’\u066b\u066c\uff0c\uff0e \u00a0\u2009\u202f]"  # of thousands
_THOUSANDS = re.compile(
    rf"(?<!\d)(?:\d{{1,3}}(?:{_SEPARATOR}\d{{3}})+|\d\d?(?:,\d\d)+,\d{{3}})(?!\d)"  # 1,234,567 or 12,34,567
)


class MeasuredPairs:
    """Pairs, of which neither side is blank. They are only measured if a rule needs that."""

    def __init__(self, sources: list[str], targets: list[str], scores: Sequence[float]):
        self.sides, self.scores = (sources, targets), scores

    @cached_property
    def sizes(self) -> tuple[TextSizes, TextSizes]:
        """The sizes of sources and targets."""
        return measure(self.sides[0]), measure(self.sides[1])

    def which(self, is_wrong: Callable[[str, str], bool], indices: Indices) -> Mask:
        """Whether the source and the target of each of the pairs at some indices are wrong."""
        sources, targets = self.sides
        found = (is_wrong(sources[i], targets[i]) for i in indices.tolist())
        return np.fromiter(found, np.bool_, len(indices))


class Rules:
    """The rules of `data.filters` that judge a pair by itself, for the corpora of one direction."""

    def __init__(self, filters: Filters, languages: tuple[str, str]):
        """`languages` are the codes of source and target. Raises UsageError if a package is not installed, or
        does not know a language."""
        values = {name: getattr(filters, name) for name in RULES if name != "duplicates"}
        # The rules that are on, in the order in which they are applied.
        self.bounds = {name: value for name, value in values.items() if value not in (None, False, "off")}
        self._spaced = [side for side, language in enumerate(languages) if has_spaces(language)]
        if "script" in self.bounds:
            self._scripts = [ScriptFilter(*scripts_of_language(language)) for language in languages]
        if "language" in self.bounds:
            self._languages = [*map(LanguageFilter, languages)]

    def broken(self, rule: str, pairs: MeasuredPairs, indices: Indices) -> Mask:
        """Which of the pairs at some indices break a rule."""
        bound: Any = self.bounds[rule]
        match rule:
            case "min_words":
                masks = [pairs.sizes[side].words < bound for side in self._spaced]
            case "max_words":
                masks = [pairs.sizes[side].words > bound for side in self._spaced]
            case "max_word_length":
                masks = [pairs.sizes[side].longest_word > bound for side in self._spaced]
            case "max_ratio":
                source, target = (sizes.characters for sizes in pairs.sizes)
                masks = [np.maximum(source, target) > bound * np.minimum(source, target)]
            case "min_alphabetic":
                masks = [sizes.letters / np.maximum(sizes.visible, 1) < bound for sizes in pairs.sizes]
            case "min_score":
                masks = [~(np.asarray(pairs.scores) >= bound.value)]
            case "script":
                sides = zip(self._scripts, pairs.sides, strict=True)
                return np.isin(indices, [i for script, texts in sides for i in script.unexpected(texts)])
            case "same_numbers":
                with_digits = indices[(pairs.sizes[0].has_digits | pairs.sizes[1].has_digits)[indices]]
                return np.isin(indices, with_digits[pairs.which(have_other_numbers, with_digits)])
            case "same_urls":
                return pairs.which(lambda source, target: urls_of(source) != urls_of(target), indices)
            case "copied":
                return pairs.which(is_copied, indices)
            case _:  # language
                return pairs.which(self._is_in_other_language, indices)
        found = np.zeros(len(indices), np.bool_)
        for mask in masks:
            found |= mask[indices]
        return found

    def _is_in_other_language(self, source: str, target: str) -> bool:
        return self._languages[0].is_other(source) or self._languages[1].is_other(target)


class FilteredBlock(NamedTuple):
    """The result of filtering a block. Both arrays include the unreadable pairs."""

    codes: Codes
    keys: Hashes  # the same for duplicates; empty if duplicates are kept


class BlockFilter:
    """Applies the rules of `data.filters` to blocks of training pairs."""

    def __init__(self, data: DataConfig):
        """`data.filters` must be given. Raises UsageError if a rule cannot be applied."""
        assert data.filters is not None
        rules_for = cache(partial(Rules, data.filters))  # a direction
        self._rules = [  # of each corpus
            None if corpus.filters == "off" else rules_for(data.direction_of(corpus)) for corpus in data.train
        ]
        self._duplicates = data.filters.duplicates
        self._directions = hash_texts(list(map(str, data.directions)))  # of each corpus

    def apply(self, block: Block, corpus: int) -> FilteredBlock:
        """Filter a block of corpus number `corpus` (from 0). With `filters: off`, only unreadable and empty
        pairs are rejected."""
        count, readable = len(block.numbers) + len(block.errors), block.indices
        codes = np.full(count, BAD, np.uint8)
        codes[readable] = self._judge(block, self._rules[corpus])
        keys = np.zeros(0 if self._duplicates == "off" else count, np.uint64)
        if len(keys):
            keys[readable] = self._hash(block) ^ self._directions[corpus]
        return FilteredBlock(codes, keys)

    def _judge(self, block: Block, rules: Rules | None) -> Codes:
        """The code of each readable pair: 0 or the reason for its rejection."""
        have_text = block.have_text()
        codes = np.where(have_text, 0, EMPTY).astype(np.uint8)
        filled = np.flatnonzero(codes == 0)
        if len(filled) < len(codes):
            block = block.select(have_text)
        pairs = MeasuredPairs(block.sources, block.targets, block.scores)
        indices = np.arange(len(filled))
        if rules is not None:
            for name in rules.bounds:
                rejected = rules.broken(name, pairs, indices)
                codes[filled[indices[rejected]]] = REASONS.index(name) + 1
                indices = indices[~rejected]
        return codes

    def _hash(self, block: Block) -> Hashes:
        if self._duplicates == "pairs":
            return hash_pairs(hash_texts(block.sources), hash_texts(block.targets))
        return hash_texts(block.sources if self._duplicates == "source" else block.targets)


class RejectionRecorder:
    """Collects the results of filtering all blocks of the training corpora, in order."""

    def __init__(self, data: DataConfig, folder: Path | None = None):
        """Temporary files are written to `folder`: a byte for each pair, and 8 more to find duplicates.
        Raises StorageError, as the other methods do."""
        self._corpora = data.train
        self._sizes = [0] * len(data.train)  # pairs in each corpus
        self._codes, self._keys = TemporaryStream(folder), TemporaryStream(folder)

    def add(self, corpus: int, block: FilteredBlock) -> None:
        """Add the next block, which is of corpus number `corpus` (from 0)."""
        self._sizes[corpus] += len(block.codes)
        self._codes.write(block.codes.tobytes())
        self._keys.write(block.keys.tobytes())

    def finish(self) -> Rejections:
        """Find duplicates among the pairs that are not rejected yet, and return all codes. Duplicates are
        kept in corpora with `filters: off`."""
        unfiltered = [i for i, corpus in enumerate(self._corpora) if corpus.filters == "off"]
        codes: Codes = self._codes.as_array(np.uint8)
        keys: Hashes = self._keys.as_array(np.uint64)
        ends = list(accumulate(self._sizes))
        for indices in find_repeated(keys, codes):
            corpus_of = np.searchsorted(ends, indices, side="right")
            codes[indices[~np.isin(corpus_of, unfiltered)]] = DUPLICATE
        return Rejections(codes, self._sizes)


def is_copied(source: str, target: str) -> bool:
    """Whether two texts are the same, ignoring case and the spaces around them, and have a letter."""
    source, target = source.strip(), target.strip()
    is_same = len(source) == len(target) and source.casefold() == target.casefold()
    return is_same and bool(script_of(source))


def have_other_numbers(source: str, target: str) -> bool:
    """Whether two texts contain different numbers in digits. How often they occur, leading zeros and
    separators of thousands are ignored; other separators end a number, as in 3.14 and 12:30."""
    if set(_NUMBER.findall(source)) == set(_NUMBER.findall(target)):  # fast path
        return False
    return _numbers_of(source) != _numbers_of(target)


def _numbers_of(text: str) -> frozenset[str]:
    if not text.isascii():
        text = _OTHER_DIGIT.sub(lambda digit: str(int(digit[0])), text)
    text = _THOUSANDS.sub(lambda match: "".join(_NUMBER.findall(match[0])), text)
    return frozenset(number.lstrip("0") for number in _NUMBER.findall(text))
