"""BLEU, chrF and TER, computed by sacreBLEU, each with the signature that makes scores comparable."""

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.metrics.ter import TER

from mtrain.config.languages import bleu_tokenizer, has_spaces, make_bleu, scripts_of_language
from mtrain.data.text.writing_systems import main_script
from mtrain.errors import DataError, UsageError

TITLES = {"bleu": "BLEU", "chrf": "chrF", "chrf++": "chrF++", "ter": "TER", "comet": "COMET", "auc": "AUC"}

References = Sequence[Sequence[str | None]]  # one or more lists of lines; None where a list has no reference


def named_signature(metric: str, signature: str) -> str:
    """A signature after the name that sacreBLEU gives the metric, as in `chrF2|nrefs:1|...`, to be quoted."""
    names = TITLES | {"chrf": "chrF2", "chrf++": "chrF2++"}
    return f"{names.get(metric, metric)}|{signature}"


def decimals(metric: str) -> int:
    """The number of decimals of a score; COMET is at most about 1."""
    return 4 if metric == "comet" else 2


class MetricScore(NamedTuple):
    """The score of one metric on one test set."""

    metric: str
    score: float  # in percent, except for COMET; higher is better, except for TER
    signature: str
    detail: str  # as sacreBLEU formats it

    @property
    def rounded(self) -> str:
        """The score as text."""
        return f"{self.score:.{decimals(self.metric)}f}"


def make_metrics(
    names: Sequence[str],
    target_lang: str | None = None,
    lowercase: bool = False,
    tokenize: str | None = None,
    comet: Callable[[], Any] | None = None,
) -> dict[str, Any]:
    """The metrics with the given names: sacreBLEU's corpus metrics `bleu`, `chrf`, `chrf++` and `ter`, and
    `comet`, which the argument `comet` makes and which is unknown without it.

    BLEU uses the tokenizer `tokenize`; by default the one for the target language, or 13a, which is also
    sacreBLEU's default. TER counts each Chinese character and Japanese kanji as a word if the target language
    is written in them. Raises UsageError if there are no names, for an unknown metric or tokenizer, and for a
    tokenizer that is not installed.
    """
    tokenizer = tokenize or bleu_tokenizer(target_lang or "")
    is_cjk = "CJK" in scripts_of_language(target_lang or "")
    makers: dict[str, Callable[[], Any]] = {
        "bleu": lambda: make_bleu(tokenizer, lowercase=lowercase),
        "chrf": lambda: CHRF(lowercase=lowercase),
        "chrf++": lambda: CHRF(lowercase=lowercase, word_order=2),
        # Always ignores case, as on sacreBLEU's command line. `asian_support` only acts on normalized text.
        "ter": lambda: TER(normalized=is_cjk, asian_support=is_cjk),
    }
    if comet is not None:
        makers["comet"] = comet
    if not names or not set(names) <= makers.keys():
        raise UsageError(f"--metrics {','.join(names)}: choose from {', '.join(makers)}")
    if tokenizer not in BLEU.TOKENIZERS:
        raise UsageError(f"--bleu-tokenize {tokenize}: choose from {', '.join(BLEU.TOKENIZERS)}")
    return {name: makers[name]() for name in names}


def explain_tokenizer(tokenize: str | None, target_lang: str | None, references: Sequence[str]) -> str:
    """The tokenizer that BLEU uses, and why: see `make_metrics`. The script of the references decides whether
    their words are separated by spaces if the target language does not."""
    if tokenize is not None:
        return f"{tokenize} (--bleu-tokenize)"
    name = bleu_tokenizer(target_lang or "")
    reason = f"target language {target_lang}" if target_lang else "the target language is not known"
    if name in ("13a", "char") and not has_spaces(target_lang or "", main_script(references)):
        reason += "; words are not separated by spaces, so rely on chrF"
    return f"{name} ({reason})"


def counts_sentences(target_lang: str | None, references: Sequence[str]) -> bool:
    """Whether TER counts whole sentences as words, because neither spaces separate the words nor sacreBLEU
    the characters."""
    scripts = scripts_of_language(target_lang or "")
    return "CJK" not in scripts and not has_spaces(target_lang or "", main_script(references))


def without_blank(references: Sequence[Sequence[str]]) -> list[list[str | None]]:
    """Replace blank references by None, which sacreBLEU ignores, if another list has a reference for the same
    line. If all references of a line are blank, they remain: the translation should be empty.
    """
    rows: list[Sequence[str | None]] = []
    for row in zip(*references, strict=True):
        present = [text if text.strip() else None for text in row]
        rows.append(present if any(present) else row)
    return [list(column) for column in zip(*rows, strict=True)]


def score(
    hypotheses: Sequence[str], references: Sequence[Sequence[str]], metrics: dict[str, Any]
) -> list[MetricScore]:
    """Score detokenized hypotheses against one or more lists of references; see `without_blank`.

    Raises DataError if there are no hypotheses or the numbers of lines differ.
    """
    require_equal_counts(hypotheses, references)
    present, scores = without_blank(references), []
    for name, metric in metrics.items():
        result = metric.corpus_score(hypotheses, present)
        signature = str(metric.get_signature())
        detail = result.format(decimals(name), signature=signature)
        scores.append(MetricScore(name, result.score, signature, detail))
    return scores


def score_sentences(
    hypotheses: Sequence[str], references: Sequence[Sequence[str]], metrics: dict[str, Any]
) -> dict[str, list[float]]:
    """The scores of single sentences by metric, as `sacrebleu --sentence-level` computes them: BLEU uses the
    effective n-gram order, because most sentences share no 4-gram with their reference."""
    present = without_blank(references)
    scores = {}
    for name, metric in metrics.items():
        if hasattr(metric, "sentence_scores"):  # COMET, which scores many sentences at a time
            scores[name] = metric.sentence_scores(hypotheses, present)
            continue
        sentence_metric = copy.copy(metric)
        if isinstance(metric, BLEU):
            sentence_metric.effective_order = True
        scores[name] = [
            sentence_metric.sentence_score(hypothesis, [text for text in others if text is not None]).score
            for hypothesis, *others in zip(hypotheses, *present, strict=True)
        ]
    return scores


def require_equal_counts(hypotheses: Sequence[str], references: References) -> None:
    """Raise DataError if there are no hypotheses or a list of references has another length."""
    if not hypotheses:
        raise DataError("nothing to score: there are no translations")
    count = len(hypotheses)
    for number, reference in enumerate(references, start=1):
        if len(reference) != count:
            lines = f"reference {number} has {len(reference)} lines"
            raise DataError(f"{lines} but there are {count} translations")
