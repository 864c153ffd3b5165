"""Finds pairs whose targets are shifted against their sources by a missing or additional line on one side,
and sides whose orders have nothing to do with each other.

In windows of consecutive pairs, the lengths of source i and target i + k are compared for all shifts k. If no
shift fits, tokens that occur in a single text on each side are compared, such as numbers and names.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, groupby
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

WINDOW = 250  # pairs, or fewer in a small corpus
_SMALLEST = 50  # pairs of the window of a small corpus
_FEWEST = 20  # pairs
_SIGNIFICANT = 5.0  # minimum agreement of lengths beyond shift 0, in standard deviations for unrelated sides
_DISTINCT = 2.0  # minimum lead over the second-best shift, which sorted sentences do not reach
_TOKENS = 4  # minimum that agree with a shift; also a quarter of all, and three times as many as with 0
_MOST = 10  # windows; of so many, not all are compared by tokens, which is slow
_UNRELATED = 3.0  # maximum agreement of all lengths of sides in different orders, in standard deviations
_MANY = 400  # pairs that show that sides are unrelated
_SPREAD = 0.15  # minimum standard deviation of their logarithmic lengths, which otherwise say nothing
_TOKEN = re.compile(r"\d+|[^\W\d_]+")
Values = npt.NDArray[np.float64]


class Shift(NamedTuple):
    """Consecutive pairs. The target of source i is beside source i + `lines`: 0 if it is aligned, None if it
    may be anywhere."""

    first: int  # index, from 0
    end: int
    lines: int | None


def find_shifts(sources: Sequence[str], targets: Sequence[str]) -> list[Shift]:
    """The consecutive pairs that are shifted, or certainly aligned."""
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
        if is_large and not shifts[i]:  # most shifts last until the end
            break
    if 2 * shifts.count(None) > len(shifts) and _are_unrelated(sources, targets, windows):
        return [Shift(0, len(sources), None)]
    return [*_join(shifts, group)]


def _are_unrelated(sources: Sequence[str], targets: Sequence[str], windows: Sequence[slice]) -> bool:
    """Whether the lengths of many sources and targets vary independently of each other."""
    rows = [
        [*map(len, chain.from_iterable(side[window] for window in windows))] for side in (sources, targets)
    ]
    lengths = np.log1p(np.array(rows, np.float64))
    if lengths.shape[1] < _MANY or lengths.std(axis=1).min() < _SPREAD:
        return False
    return bool(np.corrcoef(lengths)[0, 1] * lengths.shape[1] ** 0.5 < _UNRELATED)


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
    """The shift with which most tokens that occur in one text on each side agree; None if too few do."""
    source_places, target_places = _places_of_unique(sources), _places_of_unique(targets)
    common = source_places.keys() & target_places.keys()
    shifts = Counter(target_places[token] - source_places[token] for token in common)
    for lines, count in shifts.most_common(1):
        if count >= max(_TOKENS, len(common) / 4) and (not lines or count > 3 * shifts[0]):
            return lines
    return None


def _places_of_unique(texts: Sequence[str]) -> dict[str, int]:
    """The tokens that occur in a single text, each with the index of the text."""
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
