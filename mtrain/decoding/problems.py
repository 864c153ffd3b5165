"""Finds translations that are probably wrong: empty ones, those that repeat themselves, those that are much
longer or shorter than their sources, and those with broken characters."""

import re
from collections import Counter
from collections.abc import Iterable
from typing import Literal

Problem = Literal["empty", "looping", "extreme_length", "broken_characters"]

_TAIL = 400  # characters at the end of a text that are examined
_REPEATED = re.compile(r"(.{1,100}?)\1{2,}", re.DOTALL)  # some characters at least three times
_LEAST_REPEATED = 10  # characters; "..." and "hahaha" are common
_MAX_RATIO, _ALLOWANCE = (
    3,
    20,
)  # the longer text is at most `_MAX_RATIO` times the shorter one plus `_ALLOWANCE`
_SHOWN = 5  # lines that a summary names for each problem
_DESCRIPTIONS: dict[Problem, str] = {
    "empty": "empty",
    "looping": "looping or cut at the maximum length",
    "extreme_length": "of extreme length",
    "broken_characters": "with bytes that are no characters",
}


def find_problem(source: str, translation: str, finished: bool = True) -> Problem | None:
    """The first of these problems of a translation, if it has one. `finished` is false if it was cut at the
    maximum length.

    empty: it has no text, but the source has.
    broken_characters: byte pieces were generated that are not valid UTF-8, which sampling at a high
    temperature may do. U+FFFD takes their place.
    looping: it was cut, or the characters at its end are repeated: at least three times, and at least 10
    characters in all. The end of the source is not.
    extreme_length: one of the texts is longer than three times the other plus 20, in characters and in bytes.
    A language with few or long characters alone, such as Chinese, is therefore no problem.
    """
    source, translation = source.strip(), translation.strip()
    if not translation:
        return "empty" if source else None
    if "\ufffd" in translation and "\ufffd" not in source:
        return "broken_characters"
    if not finished or (_loops(translation) and not _loops(source)):
        return "looping"
    sizes = [(len(source), len(translation)), (len(source.encode()), len(translation.encode()))]
    is_extreme = all(max(size) > _MAX_RATIO * min(size) + _ALLOWANCE for size in sizes)
    return "extreme_length" if is_extreme else None


def _loops(text: str) -> bool:
    """Whether a text ends with repetitions, which final punctuation may follow."""
    tail = text[-_TAIL:].casefold()[::-1]
    without_punctuation = tail.lstrip(".,;:!?…。！？ ")
    found = map(_REPEATED.match, (tail, without_punctuation))
    return any(match is not None and len(match[0]) >= _LEAST_REPEATED for match in found)


class ProblemCounter:
    """Counts the translations that have a problem."""

    def __init__(self) -> None:
        self.counts: Counter[Problem] = Counter()
        self._lines: dict[Problem, list[int]] = {}

    def add(self, line: int, source: str, translation: str, finished: bool = True) -> None:
        """Examine the translation of a line, whose number is from 1."""
        if (problem := find_problem(source, translation, finished)) is not None:
            self.counts[problem] += 1
            lines = self._lines.setdefault(problem, [])
            if len(lines) < _SHOWN:
                lines.append(line)

    def as_dict(self) -> dict[str, int]:
        """The number of translations with each problem."""
        return {problem: self.counts[problem] for problem in _DESCRIPTIONS}

    def summary(self, total: int) -> str | None:
        """One line about the problems of `total` translations, with the numbers of some lines; None if there
        are none."""
        parts = [self._describe(problem, what) for problem, what in _DESCRIPTIONS.items()]
        found = f"{self.counts.total():,} of {total:,} translations"
        return f"{found} may be wrong: {', '.join(filter(None, parts))}" if self.counts else None

    def _describe(self, problem: Problem, description: str) -> str:
        count, lines = self.counts[problem], self._lines.get(problem, [])
        shown = ", ".join(f"{line:,}" for line in lines) + (", ..." if count > len(lines) else "")
        return f"{count:,} {description} (line{'s' if count > 1 else ''} {shown})" if count else ""


def count_problems(sources: Iterable[str], translations: Iterable[str]) -> dict[str, int]:
    """The number of translations with each problem. Whether they were cut is not known."""
    counter = ProblemCounter()
    for line, (source, translation) in enumerate(zip(sources, translations, strict=True), start=1):
        counter.add(line, source, translation)
    return counter.as_dict()
