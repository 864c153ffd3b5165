"""The area under the ROC curve, compared with its definition."""

import math
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from mtrain.training.validation.classifier import roc_auc

scores = st.lists(
    st.sampled_from([-2.5, 0.0, 0.1, 0.2, 1.0, 3.0]) | st.floats(-5, 5), min_size=1, max_size=20
)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(scores, scores)
def test_it_is_the_share_of_pairs_in_the_right_order(positive, negative):
    """Comparing each positive with each negative example; ties count one half."""
    wins = [(p > n) + (p == n) / 2 for p in positive for n in negative]
    assert math.isclose(roc_auc(positive, negative), sum(wins) / len(wins), abs_tol=1e-12)


def test_it_is_the_area_below_the_curve():
    """The trapezoids between the points (false positive rate, true positive rate) of all thresholds."""
    positive, negative = [0.9, 0.8, 0.8, 0.3], [0.8, 0.4, 0.3, 0.3, 0.1]
    thresholds = sorted({*positive, *negative, 2.0}, reverse=True)
    points = [
        (sum(n >= t for n in negative) / len(negative), sum(p >= t for p in positive) / len(positive))
        for t in thresholds
    ]
    area = sum((x2 - x1) * (y1 + y2) / 2 for (x1, y1), (x2, y2) in pairwise(points))
    assert math.isclose(roc_auc(positive, negative), area)


def test_it_is_not_defined_for_one_class_or_nan():
    assert all(map(math.isnan, (roc_auc([], [1.0]), roc_auc([1.0], []), roc_auc([math.nan], [0.0]))))
