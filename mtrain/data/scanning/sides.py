"""Finds sides that do not belong together: pairs whose targets are shifted against their sources by a missing
or additional line, sides in different orders, and sides that are exchanged or in unexpected languages.

Shifts are found because sources that resemble each other have targets that resemble each other, whatever the
languages are. In windows of consecutive pairs, the similarities of neighboring sources are correlated with
the similarities of the targets, for each possible shift. Differences between consecutive similarities at the
same distance are used, because in a sorted corpus all neighbors are similar.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from mtrain.config.languages import Direction, is_same_language, scripts_of_language
from mtrain.data.reading.blocks import Block
from mtrain.data.text.identify_language import identify_language
from mtrain.data.text.writing_systems import main_script

_WINDOW = 250  # pairs, or fewer in a small corpus
_FEWEST = 20  # pairs
_MOST = 4  # windows of a block in which nothing is shifted
_SIGNIFICANT = 7.0  # minimum agreement of the sides, in standard deviations for unrelated sides
_LEAD = 1.6  # minimum ratio to the agreement with any other shift
_COMPARED = 300  # characters of a text
_DISTANCES = 64  # values of j - i
_BITS = 8  # of the hashes of trigrams
_UNRELATED = 3.0  # maximum agreement of all lengths of sides in different orders, in standard deviations
_MANY = 400  # pairs that show that sides are unrelated
_SPREAD = 0.15  # minimum standard deviation of their logarithmic lengths, which otherwise say nothing
_TEXTS = 200  # of a side, of which the language is identified
_CHARACTERS = 50  # minimum to determine the script
_MANY_CHARACTERS = 500  # minimum to identify the language, or to compare texts
_IDENTIFIER = re.compile(r"[\d_/@]|\.\w")  # in a word
_DIFFERENT = 0.03  # minimum difference of sides that are exchanged
Profile = npt.NDArray[np.float64]
Matrix = npt.NDArray[np.float32]


@dataclass
class Shift:
    """Consecutive pairs. The target of source i is beside source i + `lines`."""

    first: str  # the location of the first pair, with an error of up to `_WINDOW` pairs
    last: str
    pairs: int
    lines: int | None  # 0 if the sides are aligned; None if targets may be anywhere


def find_shifts(block: Block) -> list[Shift]:
    """The consecutive pairs that are shifted, or certainly aligned."""
    total = len(block.sources)
    if total < _FEWEST:
        return []
    count = min(_MOST, max(1, total // _WINDOW))
    ends = [total * number // count for number in range(1, count + 1)]
    found = [(end, lines) for end in ends if (lines := _shift_before(block, end)) is not None]
    if 2 * len(found) < count and _are_unrelated(block):
        return [_shift_of(block, 0, total, None)]
    starts = list[tuple[int, int]]()  # pairs at which a shift begins, and its lines
    last, before = 0, 0
    for end, lines in found:
        if lines != before:
            starts.append((_first_shifted(block, last, end, lines), lines))
        elif not starts:
            starts.append((0, lines))
        last, before = end, lines
    starts.append((last, 0))
    return [_shift_of(block, first, end, lines) for (first, lines), (end, _) in pairwise(starts)]


def _shift_of(block: Block, first: int, end: int, lines: int | None) -> Shift:
    numbers = block.numbers
    return Shift(block.place_of(numbers[first]), block.place_of(numbers[end - 1]), end - first, lines)


def _first_shifted(block: Block, start: int, end: int, lines: int) -> int:
    """The pair at which a shift by some lines begins, found by bisection; up to `_WINDOW` pairs too early.
    The window before `end` must have this shift, and the window before `start` must not."""
    while end - start > _WINDOW:
        middle = (start + end) // 2
        if _shift_before(block, middle) == lines:
            end = middle
        else:
            start = middle
    return start


def _shift_before(block: Block, end: int) -> int | None:
    """The shift in the window before a pair; None if it is not certain."""
    window = slice(max(0, end - _WINDOW), end)
    sources, targets = block.sources[window], block.targets[window]
    size = len(sources)
    source, target = (np.fft.rfft(_changes(side), 2 * size, axis=0) for side in (sources, targets))
    agreement = np.fft.irfft((source.conj() * target).sum(axis=1), 2 * size)
    agreement = np.roll(agreement, size // 2)[: size // 2 * 2 + 1]  # of shifts by half the size or less
    second, best = agreement.argsort()[-2:].tolist()
    deviation = 1.4826 * float(np.median(np.abs(agreement)))  # of normally distributed values
    if agreement[best] <= max(_SIGNIFICANT * deviation, _LEAD * agreement[second]):
        return None
    return int(best) - size // 2


def _changes(texts: Sequence[str]) -> Matrix:
    """How the resemblance of texts i and i + d changes from i to i + 1, for each i and d: (n - 2, d)."""
    features = _features(texts)
    size = len(texts)
    products = np.zeros((size, size + _DISTANCES), np.float32)
    products[:, :size] = features @ features.T
    row, column = products.strides
    shape, strides = (size - 1, _DISTANCES), (row + column, column)
    return np.diff(np.lib.stride_tricks.as_strided(products[:, 1:], shape, strides), axis=0)


def _features(texts: Sequence[str]) -> Matrix:
    """A unit vector for each text: its trigrams of bytes, by hash, where rare ones have more weight."""
    size = len(texts)
    encoded = [b"\0\0" + text[:_COMPARED].lower().encode("utf-8", "replace") for text in texts]
    data = np.frombuffer(b"".join(encoded), np.uint8).astype(np.uint32)
    rows = np.repeat(np.arange(size), [*map(len, encoded)])[2:]
    trigrams = data[:-2] | data[1:-1] << 8 | data[2:] << 16
    columns = trigrams * np.uint32(2654435769) >> np.uint32(32 - _BITS)
    is_own = data[2:] > 0  # does not end in another text
    features = np.zeros((size, 2**_BITS), np.float32)
    features[rows[is_own], columns[is_own]] = 1
    features *= np.sqrt(np.log(size / np.maximum(features.sum(axis=0), 1)))
    features -= features.mean(axis=0)
    unit: Matrix = features / np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1e-6)
    return unit


def _are_unrelated(block: Block) -> bool:
    """Whether the lengths of many sources and targets vary independently of each other."""
    lengths = np.log1p(np.array([[*map(len, side)] for side in (block.sources, block.targets)], np.float64))
    if lengths.shape[1] < _MANY or lengths.std(axis=1).min() < _SPREAD:
        return False
    return bool(np.corrcoef(lengths)[0, 1] * lengths.shape[1] ** 0.5 < _UNRELATED)


class _DetectedLanguage:
    """The language of some texts, by their script and, if it is installed, by py3langid."""

    def __init__(self, texts: Sequence[str]):
        size = sum(map(len, texts))
        self.script = main_script(texts) if size >= _CHARACTERS else ""
        self.identified = identify_language(texts) if size >= _MANY_CHARACTERS else None

    def is_in(self, language: str, other: str) -> bool:
        """Whether the texts are in a language and not in the other one."""
        fits, fits_other = (self._has_script_of(each) for each in (language, other))
        return fits and (not fits_other or bool(self.identified and self.identified.is_in(language)))

    def is_not_in(self, language: str) -> bool:
        """Whether the texts are certainly not in a language."""
        is_other = self.identified is not None and self.identified.is_not(language)
        return is_other or not self._has_script_of(language)

    def _has_script_of(self, language: str) -> bool:
        scripts = scripts_of_language(language)
        return not scripts or not self.script or self.script in scripts

    def __str__(self) -> str:
        return f"{self.script} script" if self.identified is None else f"language {self.identified.code}"


def is_sentence(text: str) -> bool:
    """Whether a text may be a sentence or a word, rather than a number, an address or an identifier."""
    has_letters = any(map(str.isalpha, text))
    is_identifier = text.isascii() and " " not in text.strip() and _IDENTIFIER.search(text.strip())
    is_address = "://" in text and " " not in text.strip()
    return has_letters and not is_address and not is_identifier


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

    def add(self, part: Block) -> None:
        """Add some pairs of the next part of the corpus."""
        sides = part.sources, part.targets
        for side, texts in zip(self._texts, sides, strict=True):
            side += texts[: _TEXTS - len(side)]
        if min(sum(map(len, texts)) for texts in sides) < _MANY_CHARACTERS:
            return
        source, target = map(_profile, sides)
        if self._difference is None:
            self._difference = source - target
        elif source @ self._difference < -_DIFFERENT and target @ self._difference > _DIFFERENT:
            first = self._exchanged[0] if self._exchanged else part.place_of(part.numbers[0])
            self._exchanged = first, part.place_of(part.numbers[-1])

    def what_is_wrong(self, direction: Direction) -> str:
        """What is wrong, as text to follow the name of the corpus; empty if nothing seems to be wrong."""
        named = zip(("sources", "targets"), self._texts, strict=True)
        others = [name for name, texts in named if 2 * sum(map(is_sentence, texts)) < len(texts)]
        problem = f"the {' and '.join(others)} seem not to be sentences; check the files and columns"
        wrong = [problem] if others else [find_wrong_languages(*self._texts, direction)]
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
