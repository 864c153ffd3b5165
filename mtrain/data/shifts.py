"""Finds pairs whose target is some lines away from its source: a line is missing on one side, or too much.

In windows of consecutive pairs, the lengths of source i and target i + k are compared for all shifts k. Where
they agree with none, the tokens are compared that occur once on each side, such as numbers and names.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

WINDOW = 250  # pairs, or fewer in a small corpus
_SMALLEST = 50  # pairs of the window of a small corpus
_FEWEST = 20  # pairs
_SIGNIFICANT = 5.0  # standard deviations of the agreement of lengths of unrelated sides
_DISTINCT = 2.0  # of these by which another shift agrees less: it does not, if sentences are sorted by length
_TOKENS = 4  # that agree with a shift; also a fourth of all, and three times as many as without a shift
_MOST = 10  # windows; of so many, not all are compared by tokens
_TOKEN = re.compile(r"\d+|[^\W\d_]+")
Values = npt.NDArray[np.float64]


class Shift(NamedTuple):
    """Consecutive pairs. The target of source i is beside source i + `lines`, which is 0 if it is aligned."""

    first: int  # index, from 0
    end: int
    lines: int


def find_shifts(sources: Sequence[str], targets: Sequence[str]) -> list[Shift]:
    """The consecutive pairs that are shifted, or certainly not."""
    size = min(WINDOW, max(_SMALLEST, len(sources) // 8), len(sources))
    if size < _FEWEST:
        return []
    group = max(size, len(sources) // _MOST)  # pairs that a window at their end represents
    windows = [slice(end - size, end) for end in range(group, len(sources) + 1, group)]
    agreement = _agreement(*(_lengths(side, windows) for side in (sources, targets)))
    shifts = [_shift_of_lengths(row) for row in agreement]
    if not any(lines is not None for lines in shifts):  # the lengths of all windows together may tell
        total = _shift_of_lengths(agreement.sum(axis=0) / len(agreement) ** 0.5)
        shifts = [total or None] * len(agreement)
    is_large = len(windows) == _MOST
    for i in reversed([i for i, lines in enumerate(shifts) if lines is None]):
        shifts[i] = _shift_of_tokens(sources[windows[i]], targets[windows[i]])
        if is_large and not shifts[i]:  # tokens take long, and most shifts last until the end
            break
    return [*_join(shifts, group)]


def _lengths(texts: Sequence[str], windows: Sequence[slice]) -> Values:
    """The logarithms of the lengths of the texts in each window, standardized: (windows, size)."""
    lengths = np.log1p(np.array([[*map(len, texts[window])] for window in windows], np.float64))
    lengths -= lengths.mean(axis=1, keepdims=True)
    standardized: Values = np.clip(lengths / np.maximum(lengths.std(axis=1, keepdims=True), 0.01), -3, 3)
    return standardized


def _agreement(source: Values, target: Values) -> Values:
    """The correlation of lengths with each shift, times the square root of the window's size, so that its
    deviation is about 1 for unrelated sides: (windows, 2 * size). Negative shifts are at the end."""
    size = source.shape[1]
    spectrum = np.fft.rfft(source, 2 * size).conj() * np.fft.rfft(target, 2 * size)
    agreement: Values = np.fft.irfft(spectrum, 2 * size) / size**0.5
    return agreement


def _shift_of_lengths(agreement: Values) -> int | None:
    """The shift with which the lengths agree; None if they agree with none."""
    second, best = agreement.argsort()[-2:].tolist()
    margin = agreement[best] - max(0.0, agreement[0] if best else 0.0)
    if margin < _SIGNIFICANT or agreement[best] - agreement[second] < _DISTINCT:
        return None
    return int(best) if best < len(agreement) // 2 else int(best) - len(agreement)


def _shift_of_tokens(sources: Sequence[str], targets: Sequence[str]) -> int | None:
    """The shift with which most tokens agree that occur in one text on each side; None if few do."""
    source_places, target_places = _places_of_unique(sources), _places_of_unique(targets)
    common = source_places.keys() & target_places.keys()
    shifts = Counter(target_places[token] - source_places[token] for token in common)
    for lines, count in shifts.most_common(1):
        if count >= max(_TOKENS, len(common) / 4) and (not lines or count > 3 * shifts[0]):
            return lines
    return None


def _places_of_unique(texts: Sequence[str]) -> dict[str, int]:
    """The tokens that occur in a single text, and which one that is."""
    places: dict[str, int] = {}
    for place, text in enumerate(texts):
        for token in _TOKEN.findall(text):
            if places.setdefault(token, place) != place:
                places[token] = -1
    return {token: place for token, place in places.items() if place >= 0}


def _join(shifts: Sequence[int | None], size: int) -> Iterator[Shift]:
    """Join windows that are shifted by the same number of lines, and undecided ones between them."""
    decided = [(window, lines) for window, lines in enumerate(shifts) if lines is not None]
    for lines, run in groupby(decided, key=itemgetter(1)):
        windows = [window for window, _ in run]
        yield Shift(windows[0] * size, (windows[-1] + 1) * size, lines)
