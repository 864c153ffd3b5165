"""Decides which of two validations is better."""

import math
from collections.abc import Mapping

DECIMALS = {"bleu": 2, "chrf": 2, "nll": 3, "auc": 4}  # of the scores that are shown


def is_better(scores: Mapping[str, float], best: Mapping[str, float], leading: str) -> bool:
    """Whether a validation is better than the `best` one so far, given the finite scores of both by name.
    `best` is empty if there is none.

    The `leading` metric decides, rounded unless it is the nll. Ties are broken by chrF, then the nll: weak
    models have a BLEU of 0. A missing score is the worst; without the leading one, a validation never wins.
    """
    if leading not in scores:
        return False
    names = [leading, "chrf", "nll"]
    exact = leading == "nll"
    if len(best) == 1:  # recorded by an earlier version, which compared one score
        names, exact = list(best), True
    ours, theirs = (
        [_merit(each, name, exact and name == names[0]) for name in names] for each in (scores, best)
    )
    return not best or ours > theirs


def _merit(scores: Mapping[str, float], name: str, exact: bool) -> float:
    """A number that is higher for a better score."""
    sign = -1 if name == "nll" else 1
    value = sign * scores[name] if name in scores else -math.inf
    return value if exact else round(value, DECIMALS[name])
