"""Scores of translations, by sacreBLEU's own functions, each with the signature that makes it comparable."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.metrics.ter import TER

from mtrain.config import load_config
from mtrain.data.corpus import clean, read_corpus, read_text
from mtrain.decoding.translate import Translator
from mtrain.errors import DataError, UsageError

# Languages written without spaces between words: 13a would count sentences as words.
_TOKENIZERS = {"zh": "zh", "ja": "ja-mecab", "ko": "ko-mecab"}


class Score(NamedTuple):
    """One metric of one test set."""

    metric: str
    score: float  # percent; higher is better, but for ter
    signature: str
    detail: str  # as sacreBLEU prints it


def bleu_tokenizer(target_lang: str) -> str:
    """The sacreBLEU tokenizer for a language code such as `de`, `zh` or `zh-TW`."""
    return _TOKENIZERS.get(target_lang.lower().replace("_", "-").partition("-")[0], "13a")


def make_metrics(
    names: Sequence[str], target_lang: str, lowercase: bool = False, tokenize: str | None = None
) -> dict[str, Any]:
    """sacreBLEU metrics by name. Raises UsageError for an unknown name or a tokenizer not installed."""
    tokenizer = tokenize or bleu_tokenizer(target_lang)
    makers: dict[str, Callable[[], Any]] = {
        "bleu": lambda: BLEU(lowercase=lowercase, tokenize=tokenizer),
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


class TestSet(NamedTuple):
    """Sources, the references to hold their translations against, and translations if they are given."""

    name: str
    sources: list[str]
    references: list[list[str]]
    hypotheses: list[str] | None = None


def configured_test_sets(run_dir: Path, overrides: Sequence[str] = ()) -> list[TestSet]:
    """The `data.test` sets of a run. Raises UsageError if there are none, DataError if one cannot be read."""
    file = run_dir / "config.yaml"
    is_run = (run_dir / "checkpoints").is_dir() and file.exists()
    tests = load_config(file, overrides).data.test if is_run else {}
    if not tests:
        raise UsageError(f"{run_dir}: no test sets are configured here; give --source and --reference")
    sets = []
    for name, corpus in tests.items():
        pairs = list(clean(read_corpus(corpus)))
        sets.append(TestSet(name, [pair.source for pair in pairs], [[pair.target for pair in pairs]]))
    return sets


def test_set_from_files(source: Path | None, references: Sequence[Path], hypotheses: Path | None) -> TestSet:
    """A test set of plain-text files, of which either `source` or `hypotheses` is given.

    Raises DataError if a file is missing or malformed, or if their line counts differ.
    """
    scored = source or hypotheses or Path()
    lines, *others = [read_text(file) for file in (scored, *references)]
    for reference, other in zip(references, others, strict=True):
        if len(other) != len(lines):
            raise DataError(f"{scored} has {len(lines)} lines but {reference} has {len(other)}")
    return TestSet(scored.name, lines, others, None if source else lines)


def evaluate_set(test: TestSet, translator: Translator, metrics: dict[str, Any]) -> list[Score]:
    """Translate a test set, unless its translations are given, and score it."""
    hypotheses = test.hypotheses or [translation.text for translation in translator.translate(test.sources)]
    return score(hypotheses, test.references, metrics)
