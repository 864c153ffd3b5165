"""Which of two validations is the better one."""

import pytest

from mtrain.training.validation.comparison import is_better


def scores(**given: float) -> dict[str, float]:
    return {"bleu": 20.0, "chrf": 40.0, "nll": 2.0, **given}


@pytest.mark.parametrize(
    ("leading", "better", "worse"),
    [
        # The leading metric decides, whatever the others say.
        ("bleu", scores(bleu=21, chrf=1, nll=9), scores()),
        ("chrf", scores(bleu=0, chrf=41, nll=9), scores()),
        ("nll", scores(bleu=0, chrf=0, nll=1.9999), scores()),
        # While BLEU is 0, or equal after rounding, chrF decides.
        ("bleu", scores(bleu=0, chrf=7, nll=9), scores(bleu=0, chrf=6)),
        ("bleu", scores(bleu=1e-9, chrf=7), scores(bleu=4e-3, chrf=6)),  # a smoothed BLEU of 0.00
        ("bleu", scores(chrf=40.01), scores(bleu=20.004)),
        ("bleu", scores(bleu=0, chrf=0.02), scores(bleu=0, chrf=0, nll=1)),  # which has written empty lines
        # Then the rounded nll decides.
        ("bleu", scores(nll=1.99), scores()),
        ("chrf", scores(chrf=0, bleu=0, nll=1.99), scores(chrf=0.001, bleu=0)),
        ("bleu", scores(bleu=0, chrf=0, nll=1), scores(bleu=0, chrf=0, nll=3)),
        ("nll", scores(chrf=41), scores()),
        ("auc", {"auc": 0.98, "nll": 3}, {"auc": 0.97, "nll": 1}),
        ("auc", {"auc": 1.0, "nll": 0.1}, {"auc": 1.0, "nll": 0.2}),
        # A score that is not finite is missing, and the worst.
        ("bleu", scores(), {"bleu": 20.0, "chrf": 40.0}),
        ("bleu", scores(), {"chrf": 99.0, "nll": 0.1}),
        ("nll", scores(), {"bleu": 99.0, "chrf": 99.0}),
    ],
)
def test_one_of_two_different_validations_is_better(leading, better, worse):
    assert is_better(better, worse, leading) and not is_better(worse, better, leading)


@pytest.mark.parametrize("leading", ["bleu", "chrf", "nll"])
@pytest.mark.parametrize("other", [scores(), scores(chrf=40.001), scores(bleu=20.001, chrf=39.999)])
def test_what_is_shown_as_equal_is_not_better(leading, other):
    assert not is_better(scores(), other, leading) and not is_better(other, scores(), leading)


def test_the_first_validation_is_the_best_one_if_its_score_is_finite():
    assert is_better(scores(bleu=0, chrf=0, nll=99), {}, "bleu")
    assert not is_better({"chrf": 1.0, "nll": 1.0}, {}, "bleu")


@pytest.mark.parametrize(
    ("leading", "better", "best"),
    [
        # While the recorded score is 0, the others of the best model are unknown, and a model that is
        # learning replaces it.
        ("bleu", scores(bleu=0), {"bleu": 0.0}),
        ("bleu", scores(bleu=0.01, chrf=0), {"bleu": 0.0}),
        ("chrf", scores(bleu=0, chrf=1), {"bleu": 0.0}),
        ("bleu", scores(bleu=20.01, chrf=1, nll=9), {"bleu": 20.0}),
        ("nll", scores(nll=1.999999, chrf=1), {"nll": 2.0}),
        ("auc", {"auc": 0.9801, "nll": 3.0}, {"auc": 0.98}),
    ],
)
def test_a_better_score_than_the_only_one_that_an_earlier_version_recorded_wins(leading, better, best):
    assert is_better(better, best, leading)


@pytest.mark.parametrize(
    ("leading", "best"), [("bleu", {"bleu": 20.0}), ("nll", {"nll": 2.0}), ("chrf", {"chrf": 40.0})]
)
def test_the_same_score_as_the_only_one_that_an_earlier_version_recorded_does_not_win(leading, best):
    same = {"chrf": 99, "nll": 0.1, **best}
    assert not is_better(same, best, leading)
