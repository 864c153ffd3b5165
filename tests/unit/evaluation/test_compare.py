"""Paired significance tests. `test_cli_evaluate.py` compares them with the command line of sacreBLEU."""

import pytest
import sacrebleu

from mtrain.errors import DataError, UsageError
from mtrain.evaluation.compare import SIGNIFICANT, compare_systems
from mtrain.evaluation.metrics import make_metrics

REFERENCES = [f"The dog number {n} runs in the park today." for n in range(40)]
SYSTEMS = {
    "baseline": [line.replace("dog", "cat") for line in REFERENCES],
    "same": [line.replace("dog", "cat") for line in REFERENCES],
    "better": REFERENCES,
    "similar": [
        line.replace("dog", "cat").replace("park", "house") if n % 2 else line
        for n, line in enumerate(REFERENCES)
    ],
}


@pytest.mark.usefixtures("few_trials")
def test_only_real_differences_are_significant():
    [comparison] = compare_systems(SYSTEMS, [REFERENCES], make_metrics(["bleu"]))
    scores = {score.system: score for score in comparison.scores}
    assert comparison.metric == "bleu" and list(scores) == list(SYSTEMS)
    assert scores["baseline"].bootstrap_p is None and scores["baseline"].randomization_p is None
    assert scores["better"].score == pytest.approx(100)
    for p in ("bootstrap_p", "randomization_p"):
        values = {name: getattr(score, p) for name, score in scores.items() if name != "baseline"}
        assert [name for name, value in values.items() if value < SIGNIFICANT] == ["better"]
        assert values["same"] == 1  # sacreBLEU's is the smallest possible value
    stars = [row[0] for row in comparison.rows() if row[-1].endswith("*")]
    assert stars == ["better"]
    assert abs(scores["similar"].mean - scores["similar"].score) < scores["similar"].confidence


@pytest.mark.parametrize("lines", [1, 2, 4])
@pytest.mark.usefixtures("few_trials")
def test_few_lines_that_differ_are_no_evidence(lines):
    """All random exchanges of these lines change the score at most as much with probability 2^(1 - lines)."""
    systems = {"baseline": SYSTEMS["baseline"], "a": REFERENCES[:lines] + SYSTEMS["baseline"][lines:]}
    [comparison] = compare_systems(systems, [REFERENCES], make_metrics(["bleu"]))
    assert comparison.scores[1].score > comparison.scores[0].score + 0.1
    assert comparison.scores[1].randomization_p >= 2 ** (1 - lines)


def test_blank_lines_of_a_further_reference_are_not_references():
    others = ["" if n % 2 else line for n, line in enumerate(REFERENCES)]
    systems = {name: SYSTEMS[name] for name in ("baseline", "similar")}
    [comparison] = compare_systems(systems, [REFERENCES, others], make_metrics(["bleu"]))
    expected = [sacrebleu.corpus_bleu(texts, [REFERENCES]).score for texts in systems.values()]
    assert [score.score for score in comparison.scores] == expected and "nrefs:var" in comparison.signature


@pytest.mark.usefixtures("few_trials")
def test_the_seed_is_that_of_sacrebleu(monkeypatch):
    metrics = make_metrics(["chrf"])
    monkeypatch.setenv("SACREBLEU_SEED", "3")
    [comparison] = compare_systems(SYSTEMS, [REFERENCES], metrics)
    assert "seed:3" in comparison.signature
    for seed in ("three", "0"):  # sacreBLEU seeds from the system if it is 0
        monkeypatch.setenv("SACREBLEU_SEED", seed)
        with pytest.raises(UsageError, match=f"SACREBLEU_SEED={seed}: not a seed; set it to a number"):
            compare_systems(SYSTEMS, [REFERENCES], metrics)


def test_systems_of_another_length_are_errors():
    with pytest.raises(DataError, match="reference 1 has 40 lines but there are 1 translations"):
        compare_systems({"a": REFERENCES, "b": ["x"]}, [REFERENCES], make_metrics(["bleu"]))
