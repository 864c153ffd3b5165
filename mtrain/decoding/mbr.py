"""Minimum Bayes risk: of several translations the one that is most like the others.

Kumar and Byrne, "Minimum Bayes-Risk Decoding for Statistical Machine Translation" (NAACL 2004); with samples:
Eikema and Aziz, "Is MAP Decoding All You Need?" (COLING 2020).
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from mtrain.config.languages import bleu_tokenizer


def sentence_metric(name: str, target_lang: str) -> Any:
    """The sacreBLEU metric, `bleu` or `chrf`, that compares single sentences."""
    if name == "chrf":
        return CHRF()
    return BLEU(tokenize=bleu_tokenizer(target_lang), effective_order=True)


def rank(texts: Sequence[str], metric: Any) -> list[int]:
    """Indices of the texts, best first, by their mean score (of sacreBLEU's `metric`, for sentences) with
    each of the texts as the reference; equal texts are scored once, and vote as often as they occur."""
    votes = Counter(texts)
    if len(votes) == 1:
        return list(range(len(texts)))
    gain = {
        text: sum(count * metric.sentence_score(text, [other]).score for other, count in votes.items())
        for text in votes
    }
    return sorted(range(len(texts)), key=lambda i: -gain[texts[i]])
