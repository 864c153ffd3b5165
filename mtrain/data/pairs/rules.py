"""The rules of `data.filters` that judge a pair by itself."""

import re
import unicodedata
from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from mtrain.config.filters import Filters
from mtrain.config.languages import has_spaces, scripts_of_language
from mtrain.data.text.identify_language import LanguageFilter
from mtrain.data.text.sizes import TextSizes, measure
from mtrain.data.text.urls import urls_of
from mtrain.data.text.writing_systems import ScriptFilter, script_of

Mask = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.int64]  # indices of pairs

_NUMBER = re.compile(r"\d+")
_SEPARATOR = r"[.,'’\u066b\u066c\uff0c\uff0e \u00a0\u2009\u202f]"  # of thousands
_THOUSANDS = re.compile(
    rf"(?<!\d)(?:\d{{1,3}}(?:{_SEPARATOR}\d{{3}})+|\d\d?(?:,\d\d)+,\d{{3}})(?!\d)"  # 1,234,567 or 12,34,567
)


class Pairs:
    """Pairs, of which neither side is blank. They are only measured if a rule needs that."""

    def __init__(self, sources: list[str], targets: list[str], scores: Sequence[float]):
        self.sides, self.scores = (sources, targets), scores

    @cached_property
    def sizes(self) -> tuple[TextSizes, TextSizes]:
        """The sizes of sources and targets."""
        return measure(self.sides[0]), measure(self.sides[1])


Rule = Callable[[Pairs, Rows], Mask]  # which of the pairs at some rows break the rule


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
        "min_score": lambda score: lambda pairs, rows: ~(np.asarray(pairs.scores)[rows] >= score.value),
        "language": lambda _: _has_other_language(languages),
    }
    values = {name: getattr(filters, name) for name in makers}
    return {name: makers[name](value) for name, value in values.items() if value not in (None, False, "off")}


def _any_side(sides: Sequence[int], is_wrong: Callable[[TextSizes], Mask]) -> Rule:
    """A rule about the sizes of each of some sides."""

    def rule(pairs: Pairs, rows: Rows) -> Mask:
        found = np.zeros(len(rows), np.bool_)
        for side in sides:
            found |= is_wrong(pairs.sizes[side])[rows]
        return found

    return rule


def _share_of_letters(sizes: TextSizes) -> npt.NDArray[np.float64]:
    shares: npt.NDArray[np.float64] = sizes.letters / np.maximum(sizes.visible, 1)
    return shares


def _of_texts(is_wrong: Callable[[str, str], bool]) -> Rule:
    """A rule about source and target."""

    def rule(pairs: Pairs, rows: Rows) -> Mask:
        sources, targets = pairs.sides
        return np.fromiter((is_wrong(sources[i], targets[i]) for i in rows.tolist()), np.bool_, len(rows))

    return rule


def _has_larger_ratio(bound: float) -> Rule:
    def rule(pairs: Pairs, rows: Rows) -> Mask:
        source, target = (sizes.characters[rows] for sizes in pairs.sizes)
        mask: Mask = np.maximum(source, target) > bound * np.minimum(source, target)
        return mask

    return rule


def _has_other_script(languages: tuple[str, str]) -> Rule:
    filters = [ScriptFilter(*scripts_of_language(language)) for language in languages]

    def rule(pairs: Pairs, rows: Rows) -> Mask:
        found = np.zeros(len(pairs.sides[0]), np.bool_)
        for filter_, texts in zip(filters, pairs.sides, strict=True):
            found[filter_.unexpected(texts)] = True
        return found[rows]

    return rule


def _has_other_language(languages: tuple[str, str]) -> Rule:
    source_language, target_language = map(LanguageFilter, languages)
    return _of_texts(
        lambda source, target: source_language.is_other(source) or target_language.is_other(target)
    )


def _has_other_numbers(pairs: Pairs, rows: Rows) -> Mask:
    doubtful = pairs.sizes[0].has_digits | pairs.sizes[1].has_digits
    differ = _of_texts(lambda source, target: not have_same_numbers(source, target))
    found = np.zeros(len(rows), np.bool_)
    found[doubtful[rows]] = differ(pairs, rows[doubtful[rows]])
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
