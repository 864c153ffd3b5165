"""Scores of sentences of similar length."""

import pytest
import sacrebleu

from mtrain.evaluation.lengths import score_by_length
from mtrain.evaluation.metrics import make_metrics

REFERENCES = [f"The reference number {n} has eight words." for n in range(4)]
HYPOTHESES = [REFERENCES[0], REFERENCES[1].replace("eight", "nine"), REFERENCES[2], "Other words."]


def test_each_sentence_is_scored_in_the_range_of_its_source():
    sources = ["one two, three.", "w " * 11, "w " * 51, "w " * 500]
    buckets = score_by_length(sources, HYPOTHESES, [REFERENCES], make_metrics(["bleu", "ter"]))
    assert [(bucket.name, bucket.sentences) for bucket in buckets] == [("0-10", 1), ("11-20", 1), ("51+", 2)]
    assert buckets[0].scores[0].score == pytest.approx(100)
    expected = sacrebleu.corpus_bleu(HYPOTHESES[2:], [REFERENCES[2:]]).score
    assert [score.metric for score in buckets[2].scores] == ["bleu", "ter"]
    assert buckets[2].scores[0].score == pytest.approx(expected)


def test_languages_without_spaces_are_counted_by_characters():
    [bucket] = score_by_length(["我喜欢吃橙子我喜欢吃橙子。"], ["x"], [["x"]], make_metrics(["chrf"]))
    assert bucket.name == "11-20"
