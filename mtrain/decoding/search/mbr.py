"""Minimum Bayes risk decoding: choose the translation that is most similar to the others.

Kumar and Byrne, "Minimum Bayes-Risk Decoding for Statistical Machine Translation" (NAACL 2004); with samples:
Eikema and Aziz, "Is MAP Decoding All You Need?" (COLING 2020).
"""

from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

from sacrebleu.metrics.chrf import CHRF

from mtrain.config.languages import bleu_tokenizer, make_bleu


@cache
def sentence_metric(name: str, target_lang: str) -> Any:
    """sacreBLEU's sentence-level `bleu` or `chrf`. Raises UsageError if BLEU's tokenizer for the language is
    not installed."""
    return CHRF() if name == "chrf" else make_bleu(bleu_tokenizer(target_lang), effective_order=True)


def rank(texts: Sequence[str], metric: Any) -> list[int]:
    """Indices of the texts, best first, by their mean score with each of the texts as the reference.

    `metric` is a sentence-level metric of sacreBLEU. Equal texts are scored once and counted as often as they
    occur.
    """
    counts = Counter(texts)
    utility = {
        text: sum(count * metric.sentence_score(text, [other]).score for other, count in counts.items())
        for text in counts
    }
    return sorted(range(len(texts)), key=lambda i: -utility[texts[i]])
