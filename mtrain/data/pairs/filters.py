"""Filters training pairs by the rules of `data.filters`: each block by itself, then all for duplicates.

The result, see `Rejections`, is a code for each pair.
"""

import re
import unicodedata
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mtrain.config.data import DataConfig
from mtrain.config.filters import Filters
from mtrain.config.languages import has_spaces, scripts_of_language
from mtrain.data.pairs.duplicates import find_repeated
from mtrain.data.pairs.rejections import BAD, DUPLICATE, EMPTY, REASONS, Codes, Rejections
from mtrain.data.reading.parse import Block
from mtrain.data.text.hashes import Hashes, hash_pairs, hash_texts
from mtrain.data.text.identify_language import LanguageFilter
from mtrain.data.text.sizes import TextSizes, measure
from mtrain.data.text.urls import urls_of
from mtrain.data.text.writing_systems import ScriptFilter, script_of
from mtrain.storage.temporary import TemporaryStream
from mtrain.tokenizer.rows import Indices

Mask = npt.NDArray[np.bool_]

_NUMBER = re.compile(r"\d+")
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


Rule = Callable[[MeasuredPairs, Indices], Mask]  # which of the pairs at some indices break the rule


class FilteredBlock(NamedTuple):
    """The result of filtering a block. Both arrays include the unreadable pairs."""

    codes: Codes
    keys: Hashes  # the same for duplicates; empty if duplicates are kept


class BlockFilter:
    """Applies the rules of `data.filters` to blocks of training pairs."""

    def __init__(self, data: DataConfig):
        """`data.filters` must be given. Raises UsageError if a rule cannot be applied."""
        assert data.filters is not None
        directions = [data.direction_of(corpus) for corpus in data.train if corpus.filters != "off"]
        rules = {each: make_rules(data.filters, each) for each in dict.fromkeys(directions)}
        self._rules = [  # of each corpus
            {} if corpus.filters == "off" else rules[data.direction_of(corpus)] for corpus in data.train
        ]
        self._duplicates = data.filters.duplicates
        self._directions = np.zeros(len(data.train), np.uint64)  # a hash of that of each corpus
        if data.has_several_directions:
            self._directions = hash_texts(list(map(str, data.directions)))

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

    def _judge(self, block: Block, rules: dict[str, Rule]) -> Codes:
        """The codes of the readable pairs."""
        both = zip(block.sources, block.targets, strict=True)
        has_text = [bool(source.strip() and target.strip()) for source, target in both]
        codes = np.where(has_text, 0, EMPTY).astype(np.uint8)
        filled = np.flatnonzero(codes == 0)
        if len(filled) < len(codes):
            block = block.select(has_text)
        pairs = MeasuredPairs(block.sources, block.targets, block.scores)
        indices = np.arange(len(filled))
        for name, rule in rules.items():
            rejected = rule(pairs, indices)
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
        if len(keys):
            for indices in find_repeated(keys, codes):
                corpus_of = np.searchsorted(ends, indices, side="right")
                codes[indices[~np.isin(corpus_of, unfiltered)]] = DUPLICATE
        return Rejections(codes, self._sizes)


def make_rules(filters: Filters, languages: tuple[str, str]) -> dict[str, Rule]:
    """The rules that are on, by name, in the order in which they are applied. `languages` are the codes of
    source and target. Raises UsageError if a package is not installed, or does not know a language."""
    spaced = [side for side, language in enumerate(languages) if has_spaces(language)]
    makers: dict[str, Callable[..., Rule]] = {
        "min_words": lambda bound: _any_side(spaced, lambda sizes: sizes.words < bound),
        "max_words": lambda bound: _any_side(spaced, lambda sizes: sizes.words > bound),
        "max_word_length": lambda bound: _any_side(spaced, lambda sizes: sizes.longest_word > bound),
        "max_ratio": _has_larger_ratio,
        "min_alphabetic": lambda share: _any_side((0, 1), lambda side: _share_of_letters(side) < share),
        "script": lambda _: _has_other_script(languages),
        "copied": lambda _: _of_texts(is_copied),
        "same_numbers": lambda _: _has_other_numbers,
        "same_urls": lambda _: _of_texts(lambda source, target: urls_of(source) != urls_of(target)),
        "min_score": lambda score: lambda pairs, indices: ~(np.asarray(pairs.scores)[indices] >= score.value),
        "language": lambda _: _has_other_language(languages),
    }
    values = {name: getattr(filters, name) for name in makers}
    return {name: makers[name](value) for name, value in values.items() if value not in (None, False, "off")}


def _any_side(sides: Sequence[int], is_wrong: Callable[[TextSizes], Mask]) -> Rule:
    """A rule about the sizes of each of some sides."""

    def rule(pairs: MeasuredPairs, indices: Indices) -> Mask:
        found = np.zeros(len(indices), np.bool_)
        for side in sides:
            found |= is_wrong(pairs.sizes[side])[indices]
        return found

    return rule


def _share_of_letters(sizes: TextSizes) -> npt.NDArray[np.float64]:
    shares: npt.NDArray[np.float64] = sizes.letters / np.maximum(sizes.visible, 1)
    return shares


def _of_texts(is_wrong: Callable[[str, str], bool]) -> Rule:
    """A rule about source and target."""

    def rule(pairs: MeasuredPairs, indices: Indices) -> Mask:
        sources, targets = pairs.sides
        return np.fromiter(
            (is_wrong(sources[i], targets[i]) for i in indices.tolist()), np.bool_, len(indices)
        )

    return rule


def _has_larger_ratio(bound: float) -> Rule:
    def rule(pairs: MeasuredPairs, indices: Indices) -> Mask:
        source, target = (sizes.characters[indices] for sizes in pairs.sizes)
        mask: Mask = np.maximum(source, target) > bound * np.minimum(source, target)
        return mask

    return rule


def _has_other_script(languages: tuple[str, str]) -> Rule:
    filters = [ScriptFilter(*scripts_of_language(language)) for language in languages]

    def rule(pairs: MeasuredPairs, indices: Indices) -> Mask:
        found = np.zeros(len(pairs.sides[0]), np.bool_)
        for filter_, texts in zip(filters, pairs.sides, strict=True):
            found[filter_.unexpected(texts)] = True
        return found[indices]

    return rule


def _has_other_language(languages: tuple[str, str]) -> Rule:
    source_language, target_language = map(LanguageFilter, languages)
    return _of_texts(
        lambda source, target: source_language.is_other(source) or target_language.is_other(target)
    )


def _has_other_numbers(pairs: MeasuredPairs, indices: Indices) -> Mask:
    doubtful = pairs.sizes[0].has_digits | pairs.sizes[1].has_digits
    differ = _of_texts(lambda source, target: not have_same_numbers(source, target))
    found = np.zeros(len(indices), np.bool_)
    found[doubtful[indices]] = differ(pairs, indices[doubtful[indices]])
    return found


def is_copied(source: str, target: str) -> bool:
    """Whether two texts are the same, ignoring case and the spaces around them, and have a letter."""
    source, target = source.strip(), target.strip()
    is_same = len(source) == len(target) and source.casefold() == target.casefold()
    return is_same and bool(script_of(source))


def have_same_numbers(source: str, target: str) -> bool:
    """Whether two texts contain the same numbers in digits, however often. Leading zeros and separators of
    thousands are ignored; other separators end a number, as in 3.14 and 12:30."""
    if set(_NUMBER.findall(source)) == set(_NUMBER.findall(target)):  # fast path
        return True
    return _numbers_of(source) == _numbers_of(target)


def _numbers_of(text: str) -> frozenset[str]:
    if not text.isascii():
        text = _NUMBER.sub(lambda match: _to_ascii(match[0]), text)
    text = _THOUSANDS.sub(lambda match: "".join(_NUMBER.findall(match[0])), text)
    return frozenset(number.lstrip("0") for number in _NUMBER.findall(text))


def _to_ascii(number: str) -> str:
    return number if number.isascii() else "".join(str(unicodedata.decimal(digit)) for digit in number)
