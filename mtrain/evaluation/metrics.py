"""Scores of translations, by sacreBLEU's own functions, each with the signature that makes it comparable."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.metrics.ter import TER

from mtrain.config.languages import bleu_tokenizer
from mtrain.errors import DataError, UsageError


class Score(NamedTuple):
    """One metric of one test set."""

    metric: str
    score: float  # percent; higher is better, but for ter
    signature: str
    detail: str  # as sacreBLEU prints it


def make_metrics(
    names: Sequence[str],
    target_lang: str,
    lowercase: bool = False,
    tokenize: str | None = None,
    sentences: bool = False,
) -> dict[str, Any]:
    """sacreBLEU metrics by name, of whole test sets or of single `sentences`.

    Raises UsageError for an unknown name or a tokenizer that is not installed.
    """
    tokenizer = tokenize or bleu_tokenizer(target_lang)
    makers: dict[str, Callable[[], Any]] = {
        "bleu": lambda: BLEU(lowercase=lowercase, tokenize=tokenizer, effective_order=sentences),
        "chrf": lambda: CHRF(lowercase=lowercase),
        "ter": TER,  # ignores case by itself, as on sacreBLEU's command line
    }
    if not names or not set(names) <= makers.keys():
        raise UsageError(f"--metrics {','.join(names)}: choose from {', '.join(makers)}")
    if tokenizer not in BLEU.TOKENIZERS:
        raise UsageError(f"--bleu-tokenize {tokenize}: choose from {', '.join(BLEU.TOKENIZERS)}")
    try:
        return {name: makers[name]() for name in names}
    except (ImportError, RuntimeError, OSError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"BLEU's tokenizer {tokenizer} is not installed: {reason}") from None


def score(
    hypotheses: Sequence[str], references: Sequence[Sequence[str]], metrics: dict[str, Any]
) -> list[Score]:
    """Score detokenized hypotheses against one or more lists of references, all of one length.

    Raises DataError if the counts differ or there is nothing to score.
    """
    if not hypotheses:
        raise DataError("nothing to score: there are no translations")
    count = len(hypotheses)
    for number, reference in enumerate(references, start=1):
        if len(reference) != count:
            raise DataError(f"reference {number} has {len(reference)} lines, not {count} as the translations")
    scores = []
    for name, metric in metrics.items():
        result = metric.corpus_score(hypotheses, references)
        signature = str(metric.get_signature())
        scores.append(Score(name, result.score, signature, result.format(signature=signature)))
    return scores
