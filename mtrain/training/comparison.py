"""Which of two validations is the better one."""

from collections.abc import Mapping

METRICS = ("bleu", "chrf", "nll", "auc")  # by which validations are compared, if they have them
_DECIMALS = {"bleu": 2, "chrf": 2, "auc": 4}  # as they are shown; nll is compared exactly


def is_better(scores: Mapping[str, float], best: Mapping[str, float], leading: str) -> bool:
    """Whether a validation is better than the `best` one so far, given the finite scores of both by name.
    `best` is empty if there is none.

    The `leading` metric decides. If it is equal as it is shown, chrF decides, then the nll: the BLEU of weak
    models is 0. A missing score is the worst; without the leading one, a validation is never better.
    """
    if leading not in scores:
        return False
    exact = len(best) == 1  # recorded by an earlier version, which knew no other rule
    names = best if exact else (leading, "chrf", "nll")
    ours, theirs = ([_merit(each, name, exact) for name in names] for each in (scores, best))
    return not best or ours > theirs


def _merit(scores: Mapping[str, float], name: str, exact: bool) -> float:
    """A number that is higher for a better score."""
    if name not in scores:
        return float("-inf")
    return -scores[name] if name == "nll" else round(scores[name], 15 if exact else _DECIMALS[name])


def is_zero(scores: Mapping[str, float], metric: str) -> bool:
    """Whether a score is known and is shown as 0."""
    return metric in scores and round(scores[metric], _DECIMALS[metric]) == 0
