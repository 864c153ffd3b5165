"""Whether two systems differ by more than chance: sacreBLEU's paired significance tests."""

import os
from collections.abc import Iterator, Mapping, Sequence
from operator import ne
from typing import Any, NamedTuple

from sacrebleu.significance import PairedTest, Result

from mtrain.errors import UsageError
from mtrain.evaluation.metrics import decimals, require_equal_counts, without_blank

SIGNIFICANT = 0.05  # differences with smaller p-values are significant


class PairedScore(NamedTuple):
    """The score of a system, and how likely its difference from the baseline is to be due to chance."""

    system: str
    score: float
    mean: float  # over the bootstrap resamples
    confidence: float  # half the width of the 95% confidence interval around the mean
    bootstrap_p: float | None  # of the paired bootstrap test; None for the baseline
    randomization_p: float | None  # of the paired approximate randomization test


class MetricComparison(NamedTuple):
    """The scores of several systems by one metric. The first is the baseline."""

    metric: str
    scores: list[PairedScore]
    signature: str  # has the seed and the numbers of resamples (bs) and trials (ar)

    def rows(self) -> Iterator[list[str]]:
        """Yield a row of text for each system: name, score, mean, confidence (as ± a number) and p-values. A
        star follows a significant p-value, a space follows any other."""
        digits = decimals(self.metric)
        for each in self.scores:
            score, mean, confidence = (f"{x:.{digits}f}" for x in (each.score, each.mean, each.confidence))
            tests = [
                "" if p is None else f"{p:.4f}{'*' if p < SIGNIFICANT else ' '}"
                for p in (each.bootstrap_p, each.randomization_p)
            ]
            yield [each.system, score, mean, f"± {confidence}", *tests]


def require_seed() -> None:
    """Raise UsageError unless SACREBLEU_SEED is unset, `none`, or at least 1. With 0, the seed would be
    random."""
    seed = os.environ.get("SACREBLEU_SEED", "none")
    if seed.lower() != "none" and not (seed.isdecimal() and int(seed)):
        raise UsageError(f"SACREBLEU_SEED={seed}: not a seed; set it to a number of at least 1 or to none")


def compare_systems(
    systems: Mapping[str, Sequence[str]], references: Sequence[Sequence[str]], metrics: dict[str, Any]
) -> list[MetricComparison]:
    """Compare each system's translations with the first system's by paired bootstrap resampling (Koehn 2004)
    and paired approximate randomization (Riezler and Maxwell 2005).

    The numbers of resamples and trials and the seed are sacreBLEU's defaults: 1,000, 10,000, and the
    environment variable SACREBLEU_SEED or 12345. Raises DataError if numbers of lines differ, and UsageError
    for an invalid seed.
    """
    for hypotheses in systems.values():
        require_equal_counts(hypotheses, references)
    require_seed()
    named, first = list(systems.items()), next(iter(systems.values()))
    present: Any = without_blank(references)  # the type hints of sacreBLEU lack None
    # With n different lines, the shuffled systems differ as much as the real ones at least with probability
    # 2^(1 - n). sacreBLEU does not count equal differences.
    different = [sum(map(ne, first, texts)) for texts in systems.values()]
    signatures, bootstrap = PairedTest(named, metrics, present, "bs")()
    randomization_test = PairedTest(named, metrics, present, "ar")
    _, randomization = randomization_test()
    comparisons = []
    names = [name for name in bootstrap if name != "System"]  # sacreBLEU's, such as chrF2++
    for metric, name in zip(metrics, names, strict=True):
        # Of `Result`; by sacreBLEU's type hints, perhaps also of text.
        rows: Any = zip(systems, bootstrap[name], randomization[name], strict=True)
        baseline: Any = bootstrap[name][0]
        scores = [
            PairedScore(  # NumPy's numbers are not valid JSON
                system,
                score=float(resampled.score),
                mean=float(resampled.mean),
                confidence=float(resampled.ci),
                bootstrap_p=_p_value(resampled, baseline),
                randomization_p=_p_value(shuffled, baseline, least=min(1.0, 2.0 ** (1 - lines))),
            )
            for lines, (system, resampled, shuffled) in zip(different, rows, strict=True)
        ]
        signatures[name].update("ar", randomization_test.n_samples)
        comparisons.append(MetricComparison(metric, scores, str(signatures[name])))
    return comparisons


def _p_value(result: Result, baseline: Result, least: float = 0.0) -> float | None:
    """The p-value of a difference from the baseline, at least some number; None for the baseline itself. If
    there is no difference, sacreBLEU returns the smallest p-value, but all resamples differ at least as much:
    it is 1."""
    if result.p_value is None:
        return None
    return 1.0 if result.score == baseline.score else max(least, float(result.p_value))
