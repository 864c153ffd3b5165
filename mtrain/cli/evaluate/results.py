"""How `mtrain evaluate` prints and writes scores."""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from mtrain.cli.console.output import open_output, print_to_stdout
from mtrain.cli.console.tables import format_scores, format_table, wrap_signature

if TYPE_CHECKING:
    from mtrain.evaluation.comet import CometProcess
    from mtrain.evaluation.compare import MetricComparison
    from mtrain.evaluation.evaluate import Output, TestSet
    from mtrain.evaluation.results import SetResult

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
    comet: "CometProcess"  # started only if COMET is among the metrics

    def make(self, language: str | None, sources: Sequence[str] = ()) -> dict[str, Any]:
        """The metrics for translations into a language, None if it is unknown. COMET also needs the sources.
        Raises UsageError for an unknown metric or tokenizer, or one that is not installed."""
        from mtrain.evaluation.comet import Comet
        from mtrain.evaluation.metrics import make_metrics

        comet = partial(Comet, self.comet, sources)
        return make_metrics(self.names, language, self.lowercase, self.bleu_tokenize, comet)


def report_results(
    translated: "Iterable[tuple[TestSet, Mapping[str, Output]]]",
    language: str | None,
    metrics: Metrics,
    outputs: Outputs,
) -> None:
    """Score the translations of test sets by each system. `language` is the target language, None if it is
    unknown. Print the scores of each test set as soon as they are known, and write the files. The first
    system is the baseline."""
    from mtrain.evaluation.metrics import counts_sentences, explain_tokenizer
    from mtrain.evaluation.results import score_systems
    from mtrain.progress_bar import waiting_for

    results: list[SetResult] = []
    explained: set[str] = set()
    by_sentence = outputs.sentence_scores is not None or outputs.html is not None
    with ExitStack() as stack:
        stack.enter_context(metrics.comet)
        table = None
        if outputs.sentence_scores is not None:
            table = stack.enter_context(open_output(outputs.sentence_scores))
        for test, systems in translated:
            target_lang = test.target_lang(language)
            with waiting_for(f"{test.name}: scoring"):
                made = metrics.make(target_lang, test.sources)
                result = score_systems(test, systems, made, outputs.by_length, by_sentence)
            explanation = explain_tokenizer(metrics.bleu_tokenize, target_lang, test.references[0])
            if "bleu" in metrics.names and explanation not in explained:
                explained.add(explanation)
                log.info("BLEU tokenizer: %s", explanation)
            if "ter" in metrics.names and counts_sentences(target_lang, test.references[0]):
                message = "%s: TER counts text without spaces as one word; rely on chrF"
                log.warning(message, test.name)
            if not outputs.json:
                # Each time anew, so that files are complete even if the reader of stdout exits.
                print_to_stdout("\n".join(_lines_of(result)))
            if table is not None:
                _write_sentences(result, table, header=not results)
            results.append(result)
        if outputs.summary and not outputs.json:
            print_to_stdout("\n".join(_summary(results)))
    if outputs.json:
        print_to_stdout(json.dumps({each.test.name: each.as_json() for each in results}, indent=1))
    if outputs.html is not None:
        from mtrain.report.comparison import comparison_page

        with open_output(outputs.html) as out:
            out.write(comparison_page(results, language))


def _summary(results: "Sequence[SetResult]") -> Iterable[str]:
    """One table of the scores of all test sets."""
    rows = [[each.test.name, *(score.rounded for score in each.scores)] for each in results]
    return format_table(rows, ["test set", *(score.metric for score in results[0].scores)])


def _lines_of(result: "SetResult") -> Iterable[str]:
    from mtrain.evaluation.compare import SIGNIFICANT

    test, systems = result.test, result.outputs
    direction = f"{test.direction}, " if test.direction else ""
    yield f"{test.name} ({direction}{len(test.references[0])} sentences)"
    if not result.comparisons:
        yield from format_scores(result.scores)
    for comparison in result.comparisons:
        yield from _lines_of_comparison(comparison)
    if result.comparisons:
        yield f"    * p < {SIGNIFICANT}: a difference from the baseline is unlikely to be due to chance"
    for system, output in systems.items():
        if output.problems is not None:
            shown = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in output.problems.items())
            yield f"  problems: {shown}" + (f"; {system}" if len(systems) > 1 else "")
    for system, buckets in result.by_length.items():
        yield "  by words of the source" + (f", {system}" if len(systems) > 1 else "")
        rows = [
            [bucket.name, str(bucket.sentences), *(score.rounded for score in bucket.scores)]
            for bucket in buckets
        ]
        header = ["words", "sentences", *(score.metric for score in buckets[0].scores)]
        yield from format_table(rows, header, indent=4)


def _lines_of_comparison(comparison: "MetricComparison") -> Iterable[str]:
    from mtrain.evaluation.metrics import named_signature

    header = ["", "score", "mean", "95%\ninterval", "p\n(bootstrap)", "p\n(randomization)"]
    rows = [*comparison.rows()]
    rows[0][0] += " (baseline)"
    signature = wrap_signature(named_signature(comparison.metric, comparison.signature), 2)
    yield from (f"  {line}" for line in signature.split("\n"))
    yield from format_table(rows, header, indent=4)


def _write_sentences(result: "SetResult", out: IO[str], header: bool) -> None:
    """Write one tab-separated line for each sentence of each system."""
    for system, scores in result.sentences.items():
        if header:
            print("\t".join(["test", "system", "line", *scores]), file=out)
            header = False
        words = [" ".join(text.split()) for text in (result.test.name, system)]
        names = [text.encode("utf-8", "replace").decode() for text in words]  # a file name may not be UTF-8
        for line, row in enumerate(zip(*scores.values(), strict=True), start=1):
            fields = [*names, str(line), *(f"{score:.4f}" for score in row)]
            print("\t".join(fields), file=out)
