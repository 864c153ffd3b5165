"""Scores of sentences of similar length."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from mtrain.evaluation.differences import words
from mtrain.evaluation.metrics import MetricScore, score

BOUNDS = (10, 20, 30, 40, 50)  # the longest source of each bucket but the last, in words


class LengthBucket(NamedTuple):
    """The scores of the sentences whose sources have between `shortest` and `longest` words."""

    shortest: int
    longest: int | None  # None: no limit
    sentences: int
    scores: list[MetricScore]

    @property
    def name(self) -> str:
        """The range of lengths, such as `11-20` or `51+`."""
        return f"{self.shortest}+" if self.longest is None else f"{self.shortest}-{self.longest}"


def score_by_length(
    sources: Sequence[str],
    hypotheses: Sequence[str],
    references: Sequence[Sequence[str]],
    metrics: dict[str, Any],
) -> list[LengthBucket]:
    """Score the sentences of each range of source lengths, in words and punctuation marks (see
    `differences.words`). Ranges without sentences are left out."""
    lengths, buckets = [len(words(source)) for source in sources], []
    starts = (0, *(bound + 1 for bound in BOUNDS))
    for shortest, longest in zip(starts, (*BOUNDS, None), strict=True):
        rows = [row for row, length in enumerate(lengths) if shortest <= length <= (longest or math.inf)]
        if rows:
            chosen = [[reference[row] for row in rows] for reference in references]
            scores = score([hypotheses[row] for row in rows], chosen, metrics)
            buckets.append(LengthBucket(shortest, longest, len(rows), scores))
    return buckets
