"""How `mtrain evaluate` prints and writes scores."""

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from mtrain.cli.console.output import open_output, print_to_stdout
from mtrain.cli.console.tables import format_scores, format_table, wrap_signature

if TYPE_CHECKING:
    from mtrain.evaluation.compare import MetricComparison, PairedScore
    from mtrain.evaluation.evaluate import Output, TestSet
    from mtrain.evaluation.lengths import LengthBucket
    from mtrain.evaluation.metrics import MetricScore


log = logging.getLogger(__name__)


class Outputs(NamedTuple):
    """What to print and write."""

    json: bool
    by_length: bool
    sentence_scores: Path | None
    html: Path | None
    summary: bool  # of the scores of all test sets, in one table


class Metrics(NamedTuple):
    """The metrics to compute."""

    names: Sequence[str]
    lowercase: bool
    bleu_tokenize: str | None  # None: the tokenizer for the language
    comet_model: str
    gpus: str  # that COMET uses
    comet: Path = Path()  # Python in the environment of COMET

    def make(self, language: str | None, comet: Callable[[], Any] = lambda: None) -> dict[str, Any]:
        """The metrics for a language of the translations, if it is known. `comet` makes COMET. Raises
        UsageError for an unknown metric or tokenizer, or one that is not installed."""
        from mtrain.evaluation.metrics import make_metrics

        return make_metrics(self.names, language, self.lowercase, self.bleu_tokenize, comet)


class Evaluated(NamedTuple):
    """The translations of a test set by each system. The first system is the baseline."""

    test: "TestSet"
    outputs: "dict[str, Output]"

    @property
    def systems(self) -> dict[str, list[str]]:
        """The translations by each system."""
        return {name: output.texts for name, output in self.outputs.items()}


class _Result(NamedTuple):
    """The scores of the systems on a test set."""

    evaluated: Evaluated
    scores: "list[MetricScore]"  # of the baseline
    comparisons: "list[MetricComparison]"  # none unless there are several systems
    by_length: "dict[str, list[LengthBucket]]"  # by system
    sentences: dict[str, dict[str, list[float]]]  # by system and metric, if something needs them

    def as_json(self) -> dict[str, Any]:
        test, outputs = self.evaluated.test, self.evaluated.outputs
        record: dict[str, Any] = {
            "sentences": len(test.references[0]),
            "scores": [score._asdict() for score in self.scores],
        }
        if test.direction:
            record["direction"] = str(test.direction)
        if known := {name: each.problems for name, each in outputs.items() if each.problems is not None}:
            record["problems"] = known
        if self.comparisons:
            record["baseline"] = next(iter(outputs))
            record["comparisons"] = [
                {**comparison._asdict(), "scores": [score._asdict() for score in comparison.scores]}
                for comparison in self.comparisons
            ]
        if self.by_length:
            record["by_length"] = {name: [*map(_record, buckets)] for name, buckets in self.by_length.items()}
        return record


def _record(bucket: "LengthBucket") -> dict[str, Any]:
    """The scores of sentences of similar lengths as JSON has them."""
    return {**bucket._asdict(), "scores": {score.metric: score.score for score in bucket.scores}}


def report_results(
    evaluated: Iterable[Evaluated], language: str | None, metrics: Metrics, outputs: Outputs
) -> None:
    """Score translations into a language, if it is known, print the scores of each test set as soon as they
    are known, and write the files."""
    from mtrain.evaluation.comet import Comet, CometProcess
    from mtrain.evaluation.metrics import counts_sentences, explain_tokenizer
    from mtrain.progress_bar import waiting_for

    report, results, explained = {}, [], set[str]()
    with ExitStack() as stack:
        process = stack.enter_context(CometProcess(metrics.comet, metrics.comet_model, metrics.gpus))
        table = None
        if outputs.sentence_scores is not None:
            table = stack.enter_context(open_output(outputs.sentence_scores))
        rows = []
        for each in evaluated:
            comet = partial(Comet, process, each.test.sources)
            target_lang = each.test.target_lang(language)
            with waiting_for(f"{each.test.name}: scoring"):
                result = _score(each, metrics.make(target_lang, comet), outputs)
            explanation = explain_tokenizer(metrics.bleu_tokenize, target_lang, each.test.references[0])
            if "bleu" in metrics.names and explanation not in explained:
                explained.add(explanation)
                log.info("BLEU tokenizer: %s", explanation)
            if "ter" in metrics.names and counts_sentences(target_lang, each.test.references[0]):
                message = "%s: TER counts text without spaces as one word; rely on chrF"
                log.warning(message, each.test.name)
            report[each.test.name] = result.as_json()
            scores = (f"{score.score:.{_digits(score.metric)}f}" for score in result.scores)
            rows.append([each.test.name, *scores])
            if not outputs.json:
                # Each time anew, so that files are complete even if the reader of stdout exits.
                print_to_stdout("\n".join(_lines_of(result)))
            if table is not None:
                _write_sentences(result, table, header=len(report) == 1)
            if outputs.html is not None:
                results.append(result)
        if outputs.summary and not outputs.json and rows:
            header = ["test set", *(score.metric for score in result.scores)]
            print_to_stdout("\n".join(format_table(rows, header)))
    if outputs.json:
        print_to_stdout(json.dumps(report, indent=1))
    if outputs.html is not None:
        _write_html(results, outputs.html)


def _digits(metric: str) -> int:
    """The number of decimals of a score; COMET is at most about 1."""
    return 4 if metric == "comet" else 2


def _score(evaluated: Evaluated, metrics: dict[str, Any], outputs: Outputs) -> _Result:
    from mtrain.evaluation.compare import compare_systems
    from mtrain.evaluation.lengths import score_by_length
    from mtrain.evaluation.metrics import score, score_sentences

    systems, references = evaluated.systems, evaluated.test.references
    scores = score(next(iter(systems.values())), references, metrics)
    comparisons = compare_systems(systems, references, metrics) if len(systems) > 1 else []
    buckets, sentences = {}, {}
    for name, texts in systems.items():
        if outputs.by_length:
            of_sacrebleu = {key: metric for key, metric in metrics.items() if key != "comet"}
            buckets[name] = score_by_length(evaluated.test.sources, texts, references, of_sacrebleu)
        if outputs.sentence_scores is not None or outputs.html is not None:
            sentences[name] = score_sentences(texts, references, metrics)
    return _Result(evaluated, scores, comparisons, buckets, sentences)


def _lines_of(result: _Result) -> Iterable[str]:
    from mtrain.evaluation.compare import SIGNIFICANT

    test, systems = result.evaluated.test, result.evaluated.systems
    direction = f"{test.direction}, " if test.direction else ""
    yield f"{test.name} ({direction}{len(test.references[0])} sentences)"
    if not result.comparisons:
        yield from format_scores(result.scores)
    for comparison in result.comparisons:
        yield from _lines_of_comparison(comparison)
    if result.comparisons:
        yield f"    * p < {SIGNIFICANT}: a difference from the baseline is unlikely to be due to chance"
    for system, output in result.evaluated.outputs.items():
        if output.problems is not None:
            shown = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in output.problems.items())
            yield f"  problems: {shown}" + (f"; {system}" if len(systems) > 1 else "")
    for system, buckets in result.by_length.items():
        yield "  by words of the source" + (f", {system}" if len(systems) > 1 else "")
        rows = [
            [bucket.name, str(bucket.sentences), *(f"{score.score:.2f}" for score in bucket.scores)]
            for bucket in buckets
        ]
        header = ["words", "sentences", *(score.metric for score in buckets[0].scores)]
        yield from format_table(rows, header, indent=4)


def _lines_of_comparison(comparison: "MetricComparison") -> Iterable[str]:
    from mtrain.evaluation.metrics import named_signature

    def p(value: float | None, score: "PairedScore") -> str:
        mark = "*" if score.is_significant(value, comparison.scores[0]) else " "
        return "" if value is None else f"{value:.4f}{mark}"

    digits = _digits(comparison.metric)
    header = ["", "score", "mean", "95%\ninterval", "p\n(bootstrap)", "p\n(randomization)"]
    rows = []
    for each in comparison.scores:
        row = [each.system, f"{each.score:.{digits}f}", f"{each.mean:.{digits}f}"]
        row += [f"± {each.confidence:.{digits}f}", p(each.bootstrap_p, each), p(each.randomization_p, each)]
        rows.append(row)
    rows[0][0] += " (baseline)"
    signature = wrap_signature(named_signature(comparison.metric, comparison.signature), 2)
    yield from (f"  {line}" for line in signature.split("\n"))
    yield from format_table(rows, header, indent=4)


def _write_sentences(result: _Result, out: IO[str], header: bool) -> None:
    """Write one tab-separated line for each sentence of each system."""
    for system, scores in result.sentences.items():
        if header:
            print("\t".join(["test", "system", "line", *scores]), file=out)
            header = False
        words = [" ".join(text.split()) for text in (result.evaluated.test.name, system)]
        names = [text.encode("utf-8", "replace").decode() for text in words]  # a file name may not be UTF-8
        for line, row in enumerate(zip(*scores.values(), strict=True), start=1):
            fields = [*names, str(line), *(f"{score:.4f}" for score in row)]
            print("\t".join(fields), file=out)


def _write_html(results: Sequence[_Result], path: Path) -> None:
    from mtrain.report.comparison import ComparedSet, comparison_page

    sets = [
        ComparedSet(each.evaluated.test, each.evaluated.systems, each.comparisons, each.sentences)
        for each in results
    ]
    with open_output(path) as out:
        out.write(comparison_page(sets))
