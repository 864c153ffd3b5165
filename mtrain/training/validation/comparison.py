"""Which of two validations is the better one."""

import math
from collections.abc import Mapping

from mtrain.training.validation.classifier import ClassifierScores
from mtrain.training.validation.translation import Scores

DECIMALS = {"bleu": 2, "chrf": 2, "nll": 3, "auc": 4}  # of the scores that are shown
# Below this BLEU, differences are mostly noise: on 1,000 sentences, its relative standard error is 7 to 35 %,
# but 2 % for chrF (docs/experiments/automatic-recipe.md, "Small corpora").
LOW_BLEU = 5.0


def is_better(
    scores: Mapping[str, float], best: Mapping[str, float], leading: str, least_bleu: float = 0.0
) -> bool:
    """Whether a validation is better than the `best` one so far, given the finite scores of both by name.
    `best` is empty if there is none.

    The `leading` metric decides, rounded unless it is the nll. Ties are broken by chrF, then the nll: weak
    models have a BLEU of 0, and a BLEU below `least_bleu` counts as 0. A missing score is the worst; without
    the leading one, a validation never wins.
    """
    if leading not in scores:
        return False
    names = [leading, "chrf", "nll"]
    if len(best) == 1 and leading in best and _merit(best, leading, leading, least_bleu):
        names = [leading]  # an earlier version recorded only this score, so a tie does not win
    ours, theirs = ([_merit(each, name, leading, least_bleu) for name in names] for each in (scores, best))
    return not best or ours > theirs


def _merit(scores: Mapping[str, float], name: str, leading: str, least_bleu: float) -> float:
    """A number that is higher for a better score."""
    if name not in scores:
        return -math.inf
    if name == "bleu" and scores[name] < least_bleu:
        return 0.0
    value = -scores[name] if name == "nll" else scores[name]
    return value if name == leading == "nll" else round(value, DECIMALS[name])


def comparable(scores: Scores | ClassifierScores) -> dict[str, float]:
    """The finite scores that are used to compare validations, by name."""
    known = scores.record().items()
    return {name: value for name, value in known if name in DECIMALS and math.isfinite(value)}
