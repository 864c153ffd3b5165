"""Finds corpora whose sides are in unexpected languages, or exchanged."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mtrain.config.languages import Direction, is_same_language, scripts_of_language
from mtrain.data.text.identify_language import identify_language
from mtrain.data.text.writing_systems import main_script

_TEXTS = 200  # of a side, of which the language is identified
_CHARACTERS = 50  # minimum to determine the script
_MANY_CHARACTERS = 500  # minimum to identify the language, or to compare texts
_DIFFERENT = 0.03  # minimum difference of sides that are exchanged
Profile = npt.NDArray[np.float64]


class _DetectedLanguage:
    """The language of some texts, by their script and, if it is installed, by py3langid."""

    def __init__(self, texts: Sequence[str]):
        size = sum(map(len, texts))
        self.script = main_script(texts) if size >= _CHARACTERS else ""
        self.identified = identify_language(texts) if size >= _MANY_CHARACTERS else None

    def is_in(self, language: str, other: str) -> bool:
        """Whether the texts are in a language and not in the other one."""
        fits, fits_other = (self._has_script_of(each) for each in (language, other))
        seen = self.identified and self.identified.code
        return fits and (not fits_other or is_same_language(seen, language))

    def is_not_in(self, language: str) -> bool:
        """Whether the texts are certainly not in a language."""
        is_other = self.identified is not None and self.identified.is_not(language)
        return is_other or not self._has_script_of(language)

    def _has_script_of(self, language: str) -> bool:
        scripts = scripts_of_language(language)
        return not scripts or not self.script or self.script in scripts

    def __str__(self) -> str:
        return f"{self.script} script" if self.identified is None else f"language {self.identified.code}"


def find_wrong_languages(sources: Sequence[str], targets: Sequence[str], direction: Direction) -> str:
    """What is wrong with the languages of a corpus, as text to follow its name; empty if nothing seems to
    be wrong."""
    if is_same_language(*direction):
        return ""
    sides = _DetectedLanguage(sources), _DetectedLanguage(targets)
    source, target = direction
    if sides[0].is_in(target, source) and sides[1].is_in(source, target):
        return f"the sources seem to be in {target} and the targets in {source}; exchange the two sides"
    wrong = [
        f"the {name} seem to be in {side}, not in {language}"
        for name, side, language in zip(("sources", "targets"), sides, direction, strict=True)
        if side.is_not_in(language)
    ]
    return f"{' and '.join(wrong)}; check the files, columns and languages" if wrong else ""


class CorpusSides:
    """Collects some texts of each side of a corpus, and finds parts whose sides are exchanged, compared with
    the beginning of the corpus."""

    def __init__(self) -> None:
        self._texts: tuple[list[str], list[str]] = [], []
        self._difference: Profile | None = None  # between the sides at the beginning
        self._exchanged: tuple[str, str] | None = None  # the first and the last place

    def add(self, first: str, last: str, sources: Sequence[str], targets: Sequence[str]) -> None:
        """Add texts of the next part, which begins and ends at some places."""
        for side, texts in zip(self._texts, (sources, targets), strict=True):
            side += texts[: _TEXTS - len(side)]
        if min(sum(map(len, texts)) for texts in (sources, targets)) < _MANY_CHARACTERS:
            return
        source, target = _profile(sources), _profile(targets)
        if self._difference is None:
            self._difference = source - target
        elif source @ self._difference < -_DIFFERENT and target @ self._difference > _DIFFERENT:
            first = self._exchanged[0] if self._exchanged else first
            self._exchanged = first, last

    def what_is_wrong(self, direction: Direction) -> str:
        """What is wrong, as text to follow the name of the corpus; empty if nothing seems to be wrong."""
        wrong = [find_wrong_languages(*self._texts, direction)]
        if self._exchanged:
            pairs = "pairs from about {} to {}".format(*self._exchanged)
            wrong.append(f"the sides of {pairs} seem to be exchanged, compared with the first pairs")
        return "; ".join(filter(None, wrong))


def _profile(texts: Sequence[str]) -> Profile:
    """The frequencies of pairs of bytes, by hash, as a unit vector of their square roots."""
    data = np.frombuffer("\n".join(texts).lower().encode("utf-8", "replace"), np.uint8).astype(np.int64)
    counts = np.bincount((data[:-1] * 31 + data[1:]) % 4096, minlength=4096)
    profile: Profile = np.sqrt(counts / counts.sum())
    return profile
