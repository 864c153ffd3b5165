"""Scores of translations, by sacreBLEU's own functions, each with the signature that makes it comparable."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.metrics.ter import TER

from mtrain.config import load_config
from mtrain.data.corpus import clean, read_corpus, read_text
from mtrain.decoding.translate import Translator
from mtrain.errors import DataError, UsageError

METRICS = ("bleu", "chrf", "ter")
# Languages written without spaces between words: 13a would count sentences as words.
_TOKENIZERS = {"zh": "zh", "ja": "ja-mecab", "ko": "ko-mecab"}


@dataclass(frozen=True)
class Score:
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
    unknown = [name for name in names if name not in METRICS]
    if unknown or not names:
        raise UsageError(f"--metrics {','.join(names)}: choose from {', '.join(METRICS)}")
    makers = {
        "bleu": lambda: BLEU(lowercase=lowercase, tokenize=tokenize or bleu_tokenizer(target_lang)),
        "chrf": lambda: CHRF(lowercase=lowercase),
        "ter": lambda: TER(),  # ignores case by itself, as sacreBLEU's command line does
    }
    if tokenize is not None and tokenize not in BLEU.TOKENIZERS:
        raise UsageError(f"--bleu-tokenize {tokenize}: choose from {', '.join(BLEU.TOKENIZERS)}")
    try:
        return {name: makers[name]() for name in dict.fromkeys(names)}  # type: ignore[no-untyped-call]
    except (ImportError, RuntimeError, OSError) as error:
        reason = " ".join(str(error).split())
        name = tokenize or bleu_tokenizer(target_lang)
        raise UsageError(f"BLEU's tokenizer {name} is not installed: {reason}") from None


def score(
    hypotheses: Sequence[str], references: Sequence[Sequence[str]], metrics: dict[str, Any]
) -> list[Score]:
    """Score detokenized hypotheses against one or more lists of references, all of one length.

    Raises DataError if the counts differ or there is nothing to score.
    """
    if not hypotheses:
        raise DataError("nothing to score: there are no translations")
    for number, reference in enumerate(references, start=1):
        if len(reference) != len(hypotheses):
            raise DataError(
                f"reference {number} has {len(reference)} lines, not {len(hypotheses)} as the translations"
            )
    results = []
    for name, metric in metrics.items():
        result = metric.corpus_score(list(hypotheses), [list(reference) for reference in references])
        detail = result.format(signature=str(metric.get_signature()))
        results.append(Score(name, result.score, str(metric.get_signature()), detail))
    return results


@dataclass(frozen=True)
class TestSet:
    """Sources to translate, or translations to score, and the references to hold them against."""

    name: str
    sources: list[str] | None
    hypotheses: list[str] | None
    references: list[list[str]]


def configured_test_sets(run_dir: Path, overrides: Sequence[str] = ()) -> list[TestSet]:
    """The `data.test` sets of a run. Raises UsageError if there are none, DataError if one cannot be read."""
    file = run_dir / "config.yaml"
    tests = (
        load_config(file, list(overrides)).data.test
        if (run_dir / "checkpoints").is_dir() and file.exists()
        else {}
    )
    if not tests:
        raise UsageError(f"{run_dir}: no test sets are configured here; give --source and --reference")
    sets = []
    for name, corpus in tests.items():
        pairs = list(clean(read_corpus(corpus)))
        sets.append(TestSet(name, [pair.source for pair in pairs], None, [[pair.target for pair in pairs]]))
    return sets


def test_set_from_files(source: Path | None, references: Sequence[Path], hypotheses: Path | None) -> TestSet:
    """A test set of plain-text files, of which either `source` or `hypotheses` is given.

    Raises DataError if a file is missing or malformed, or if their line counts differ.
    """
    files = [file for file in (source, hypotheses, *references) if file is not None]
    texts = {file: read_text(file) for file in files}
    for file in files[1:]:
        if len(texts[file]) != len(texts[files[0]]):
            raise DataError(f"{files[0]} has {len(texts[files[0]])} lines but {file} has {len(texts[file])}")
    return TestSet(
        (source or hypotheses or Path()).name,
        texts[source] if source else None,
        texts[hypotheses] if hypotheses else None,
        [texts[reference] for reference in references],
    )


def evaluate_set(test: TestSet, translator: Translator | None, metrics: dict[str, Any]) -> list[Score]:
    """Translate a test set, unless its translations are given, and score it."""
    hypotheses = test.hypotheses
    if hypotheses is None:
        assert translator is not None and test.sources is not None
        hypotheses = [translation.text for translation in translator.translate(test.sources)]
    return score(hypotheses, test.references, metrics)
