"""Which of two validations is the better one."""

import math
from collections.abc import Mapping

DECIMALS = {"bleu": 2, "chrf": 2, "nll": 3, "auc": 4}  # as they are shown


def is_better(scores: Mapping[str, float], best: Mapping[str, float], leading: str) -> bool:
    """Whether a validation is better than the `best` one so far, given the finite scores of both by name.
    `best` is empty if there is none.

    The `leading` metric decides. If it is equal as it is shown, chrF decides, then the nll: the BLEU of weak
    models is 0. A missing score is the worst; without the leading one, a validation is never better.
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
