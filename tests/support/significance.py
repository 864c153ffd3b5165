"""Significance tests that take less time."""

import pytest
from sacrebleu.significance import PairedTest

from mtrain.evaluation import compare


@pytest.fixture
def few_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Approximate randomization with 200 trials, which takes a fraction of the time of 10,000."""

    def paired_test(systems, metrics, references, kind):
        return PairedTest(systems, metrics, references, kind, n_samples=200 if kind == "ar" else 0)

    monkeypatch.setattr(compare, "PairedTest", paired_test)
