"""Which options of `mtrain evaluate` can be combined."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from mtrain.cli.evaluation_results import Outputs
from mtrain.cli.evaluation_systems import Inputs
from mtrain.cli.output import is_stream, require_writable
from mtrain.distributed.launch import require_repeatable
from mtrain.errors import DataError, UsageError


def check_inputs(inputs: Inputs, outputs: Outputs, comet: bool) -> None:
    """Raise UsageError unless the options name translations to score and what to score them with, and
    DataError if a system to compare is missing."""
    model, source, references, hypotheses, compared, changes, languages, validation = inputs
    if hypotheses is None and model is None:
        raise UsageError("missing MODEL; only --hypotheses can be scored without it")
    if (source is not None or hypotheses is not None) != bool(references):
        raise UsageError("give --reference with either --source or --hypotheses")
    if validation and references:
        raise UsageError("--validation has no effect with --reference; leave one of them out")
    if any(languages) and not references:
        option = "--from" if languages[0] else "--to"
        raise UsageError(
            f"{option} has no effect on the test sets of MODEL, which have their own languages; leave it out"
        )
    if Path("-") in references:
        raise UsageError("--reference -: reading references from stdin is not supported; give a file")
    if [source, hypotheses, *compared].count(Path("-")) > 1:
        raise UsageError("stdin (-) was given more than once; give a file")
    for path in compared:
        if inputs.systems.count(path) > 1:
            raise UsageError(f"--compare {path}: given twice; give each system once")
        if str(path) != "-" and not path.exists():
            raise DataError(f"--compare {path}: no such model or file of translations")
    files = [path for path in inputs.systems if not inputs.is_model(path)] if inputs.models else []
    _check_changes(changes, files)
    if outputs.html is not None and not compared:
        raise UsageError("--html has no effect without --compare; add it, or leave --html out")
    if hypotheses is not None:
        _check_sources(inputs, outputs, comet)
    files = [path for path in (source, *references, *inputs.systems) if path != model and path is not None]
    reads_streams = any(str(path) == "-" or path.is_fifo() for path in files)
    require_repeatable(reads_streams, "start it again with files")
    for output in (outputs.sentence_scores, outputs.html):
        require_writable(output, [file for file in files if file.exists()])
    table, page = (
        None if file is None else file.resolve() for file in (outputs.sentence_scores, outputs.html)
    )
    if page is not None and page == table and not is_stream(outputs.html):
        raise UsageError(f"--html {outputs.html}: --sentence-scores names the same file; give another one")


def _check_changes(changes: Sequence[str], files: Sequence[Path]) -> None:
    """Raise UsageError unless copies of the test sets with these changes can be translated by all systems."""
    from mtrain.data.rewriting.augment import CHANGES

    for name in changes:
        if name not in CHANGES:
            raise UsageError(f"--augment {name}: choose from {', '.join(CHANGES)}")
    if len(set(changes)) < len(changes):
        raise UsageError(f"--augment {','.join(changes)}: give each name once")
    if changes and files:
        raise UsageError(f"--augment needs models to translate with; {files[0]} is a file")


def _check_sources(inputs: Inputs, outputs: Outputs, comet: bool) -> None:
    """Raise UsageError if something besides --hypotheses needs --source, and it is not given. Otherwise, it
    serves to count problems."""
    models = inputs.models
    needs = {
        f"--compare {models[0]}" if models else "": bool(models),
        "--metrics comet": comet,
        "--by-length": outputs.by_length,
    }
    if inputs.source is None:
        for option, is_needed in needs.items():
            if is_needed:
                raise UsageError(f"{option} needs the source sentences; give --source")


def check_metrics(
    names: Sequence[str], bleu_tokenize: str | None, comet: Path | None, comet_model: str | None
) -> None:
    """Raise UsageError if an option has no effect on these metrics."""
    metrics = ",".join(names)
    if bleu_tokenize is not None and "bleu" not in names:
        raise UsageError(f"--bleu-tokenize has no effect on --metrics {metrics}; add bleu, or leave it out")
    for option, value in {"--comet": comet, "--comet-model": comet_model}.items():
        if value is not None and "comet" not in names:
            raise UsageError(f"{option} has no effect on --metrics {metrics}; add comet, or leave it out")


def refuse_unused(options: Mapping[str, object], reason: str) -> None:
    """Raise UsageError if one of some options was given, which would have no effect."""
    given = [name.replace("_", "-") for name, value in options.items() if value is not None]
    if given:
        raise UsageError(f"--{given[0]} has no effect with {reason}; leave it out")
