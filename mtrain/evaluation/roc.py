"""The area under the ROC curve."""

import math

import numpy as np
import numpy.typing as npt


def roc_auc(positive: npt.ArrayLike, negative: npt.ArrayLike) -> float:
    """The probability that a positive example has a higher score than a negative one; equal scores count one
    half. NaN if there are none of either, or if a score is NaN."""
    scores = np.concatenate([np.asarray(positive, np.float64), np.asarray(negative, np.float64)])
    count = np.size(positive), np.size(negative)
    if not all(count) or np.isnan(scores).any():
        return math.nan
    _, places, ties = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = np.cumsum(ties) - (ties - 1) / 2  # from 1; equal scores share the mean of theirs
    wins = ranks[places[: count[0]]].sum() - count[0] * (count[0] + 1) / 2
    return float(wins / (count[0] * count[1]))
