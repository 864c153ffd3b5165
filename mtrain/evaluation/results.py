"""All scores of the translations of a test set by one or more systems."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from mtrain.evaluation.compare import MetricComparison, compare_systems
from mtrain.evaluation.evaluate import Output, TestSet
from mtrain.evaluation.lengths import LengthBucket, score_by_length
from mtrain.evaluation.metrics import MetricScore, score, score_sentences


class SetResult(NamedTuple):
    """The translations of a test set by each system, and their scores. The first system is the baseline."""

    test: TestSet
    outputs: Mapping[str, Output]  # by system
    scores: list[MetricScore]  # of the baseline
    comparisons: list[MetricComparison]  # none unless there are several systems
    by_length: dict[str, list[LengthBucket]]  # by system, if requested
    sentences: dict[str, dict[str, list[float]]]  # by system and metric, if requested

    def as_json(self) -> dict[str, Any]:
        """All but the translations and the scores of sentences."""
        scores = [score._asdict() for score in self.scores]
        record: dict[str, Any] = {"sentences": len(self.test.references[0]), "scores": scores}
        if self.test.direction:
            record["direction"] = str(self.test.direction)
        if known := {name: each.problems for name, each in self.outputs.items() if each.problems is not None}:
            record["problems"] = known
        if self.comparisons:
            record["baseline"] = next(iter(self.outputs))
            record["comparisons"] = [
                {**comparison._asdict(), "scores": [score._asdict() for score in comparison.scores]}
                for comparison in self.comparisons
            ]
        if self.by_length:
            record["by_length"] = {name: [*map(_record, buckets)] for name, buckets in self.by_length.items()}
        return record


def _record(bucket: LengthBucket) -> dict[str, Any]:
    """The scores of sentences of similar lengths, as an object of JSON."""
    return {**bucket._asdict(), "scores": {score.metric: score.score for score in bucket.scores}}


def score_systems(
    test: TestSet, outputs: Mapping[str, Output], metrics: dict[str, Any], by_length: bool, by_sentence: bool
) -> SetResult:
    """Score the translations of a test set by each system, and compare the systems with the first one. With
    `by_length`, also score the sentences of each range of source lengths, without COMET. With
    `by_sentence`, also score each sentence."""
    systems, references = {name: output.texts for name, output in outputs.items()}, test.references
    scores = score(next(iter(systems.values())), references, metrics)
    comparisons = compare_systems(systems, references, metrics) if len(systems) > 1 else []
    buckets, sentences = {}, {}
    for name, texts in systems.items():
        if by_length:
            of_sacrebleu = {key: metric for key, metric in metrics.items() if key != "comet"}
            buckets[name] = score_by_length(test.sources, texts, references, of_sacrebleu)
        if by_sentence:
            sentences[name] = score_sentences(texts, references, metrics)
    return SetResult(test, outputs, scores, comparisons, buckets, sentences)
