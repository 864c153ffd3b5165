"""Which options of `mtrain evaluate` can be combined."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from mtrain.cli.console.output import is_stream, require_writable
from mtrain.cli.evaluate.results import Outputs
from mtrain.cli.evaluate.systems import EvaluationInputs
from mtrain.distributed.launch import require_repeatable
from mtrain.errors import DataError, UsageError


def check_inputs(inputs: EvaluationInputs, outputs: Outputs, comet: bool) -> None:
    """Raise UsageError unless the options name translations to score and what to score them with, and
    DataError if a system to compare is missing."""
    model, hypotheses = inputs.model, inputs.hypotheses
    references, compared = inputs.references, inputs.compared
    if hypotheses is None and model is None:
        raise UsageError("missing MODEL; only --hypotheses can be scored without it")
    if (inputs.source is not None or hypotheses is not None) != bool(references):
        raise UsageError("give --reference with either --source or --hypotheses")
    if inputs.validation and references:
        raise UsageError("--validation has no effect with --reference; leave one of them out")
    if any(inputs.languages) and not references:
        option = "--from" if inputs.languages[0] else "--to"
        reason = "which have their own languages"
        raise UsageError(f"{option} has no effect on the test sets of MODEL, {reason}; leave it out")
    if Path("-") in references:
        raise UsageError("--reference -: reading references from stdin is not supported; give a file")
    if [inputs.source, hypotheses, *compared].count(Path("-")) > 1:
        raise UsageError("stdin (-) was given more than once; give a file")
    for path in compared:
        if inputs.systems.count(path) > 1:
            raise UsageError(f"--compare {path}: given twice; give each system once")
        if str(path) != "-" and not path.exists():
            raise DataError(f"--compare {path}: no such model or file of translations")
    if inputs.augment:
        _check_changes(inputs)
    if outputs.html is not None and not compared:
        raise UsageError("--html has no effect without --compare; add it, or leave --html out")
    if hypotheses is not None:
        _check_sources(inputs, outputs, comet)
    read = (inputs.source, *references, *inputs.systems)
    files = [path for path in read if path != model and path is not None]
    reads_streams = any(str(path) == "-" or path.is_fifo() for path in files)
    require_repeatable(reads_streams, "start it again with files")
    for output in (outputs.sentence_scores, outputs.html):
        require_writable(output, [file for file in files if file.exists()])
    table, page = outputs.sentence_scores, outputs.html
    if table and page and table.resolve() == page.resolve() and not is_stream(page):
        raise UsageError(f"--html {page}: --sentence-scores names the same file; give another one")


def _check_changes(inputs: EvaluationInputs) -> None:
    """Raise UsageError unless copies of the test sets with these changes can be translated by all systems."""
    from mtrain.data.rewriting.augment import CHANGES

    changes = inputs.augment
    for name in changes:
        if name not in CHANGES:
            raise UsageError(f"--augment {name}: choose from {', '.join(CHANGES)}")
    if len(set(changes)) < len(changes):
        raise UsageError(f"--augment {','.join(changes)}: give each name once")
    for path in inputs.systems if inputs.models else ():
        if not inputs.is_model(path):
            raise UsageError(f"--augment needs models to translate with; {path} is a file")


def _check_sources(inputs: EvaluationInputs, outputs: Outputs, comet: bool) -> None:
    """Raise UsageError if something besides --hypotheses needs --source, and it is not given. Otherwise, it
    serves to count problems."""
    needs = [f"--compare {path}" for path in inputs.models]
    needs += ["--metrics comet"] * comet + ["--by-length"] * outputs.by_length
    if inputs.source is None and needs:
        raise UsageError(f"{needs[0]} needs the source sentences; give --source")


def check_metrics(
    names: Sequence[str], bleu_tokenize: str | None, comet: Path | None, comet_model: str | None
) -> None:
    """Raise UsageError if an option has no effect on these metrics."""
    given = {"--bleu-tokenize": bleu_tokenize, "--comet": comet, "--comet-model": comet_model}
    for option, value in given.items():
        metric = "bleu" if option == "--bleu-tokenize" else "comet"
        if value is not None and metric not in names:
            found = f"{option} has no effect on --metrics {','.join(names)}"
            raise UsageError(f"{found}; add {metric}, or leave it out")


def refuse_unused(options: Mapping[str, object], reason: str) -> None:
    """Raise UsageError if one of some options was given, which would have no effect."""
    given = [name.replace("_", "-") for name, value in options.items() if value is not None]
    if given:
        raise UsageError(f"--{given[0]} has no effect with {reason}; leave it out")
