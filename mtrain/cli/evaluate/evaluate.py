"""`mtrain evaluate`."""

import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from mtrain.cli.console import options, terminal
from mtrain.cli.console.output import is_stream, print_to_stdout, require_writable
from mtrain.cli.evaluate.results import Metrics, Outputs
from mtrain.cli.evaluate.systems import EvaluationInputs, evaluate_files, evaluate_models
from mtrain.distributed.launch import read_launch, require_repeatable
from mtrain.errors import DataError, UsageError
from mtrain.paths import path_of

metric_option = partial(Option, rich_help_panel="Metrics")
comet_option = partial(Option, rich_help_panel="COMET")


def evaluate(
    model: Annotated[
        Path | None,
        Argument(metavar="MODEL", help="Run folder, model folder or checkpoint; optional with --hypotheses."),
    ] = None,
    source: Annotated[Path | None, options.path(help="Sentences to translate and score; - is stdin.")] = None,
    reference: Annotated[list[Path] | None, options.path(help="Reference translations; repeatable.")] = None,
    hypotheses: Annotated[Path | None, options.path(help="Translations to score; - is stdin.")] = None,
    compare: Annotated[
        list[Path] | None,
        options.file(
            metavar="MODEL|FILE",
            help="Model or file of translations to compare with MODEL or --hypotheses; repeatable.",
        ),
    ] = None,
    validation: Annotated[
        bool,
        options.file(
            "--validation",
            help="Score the validation set of MODEL's run instead of its test sets, to choose settings.",
        ),
    ] = False,
    metrics: Annotated[
        str, metric_option(metavar="NAMES", help="Comma-separated list of bleu, chrf, chrf++, ter and comet.")
    ] = "bleu,chrf,ter",
    lowercase: Annotated[
        bool, metric_option("--lowercase", help="Ignore case in BLEU and chrF; TER always ignores it.")
    ] = False,
    bleu_tokenize: Annotated[
        str | None,
        metric_option(
            metavar="NAME",
            help="sacreBLEU tokenizer; by default the one for the target language, or 13a if it is unknown.",
        ),
    ] = None,
    augment: Annotated[
        str | None,
        options.result(
            metavar="NAMES",
            help="Also score changed copies of the test sets: comma-separated list of uppercase, titlecase, "
            "drop_final_punctuation and typos.",
        ),
    ] = None,
    by_length: Annotated[
        bool, options.result("--by-length", help="Also score the sentences of each range of source lengths.")
    ] = False,
    sentence_scores: Annotated[
        Path | None,
        options.result(metavar="FILE", help="Write the scores of each sentence to a tab-separated file."),
    ] = None,
    html: Annotated[
        Path | None,
        options.result(metavar="FILE", help="Write a page with the compared sentences side by side."),
    ] = None,
    json_: options.Json = False,
    from_: options.From = None,
    to: options.To = None,
    comet: Annotated[
        Path | None,
        comet_option(
            metavar="FOLDER",
            help="Virtual environment with unbabel-comet. Default: the one that MTRAIN_COMET names.",
        ),
    ] = None,
    comet_model: Annotated[
        str | None,
        comet_option(
            metavar="NAME", help="COMET model, by name or checkpoint file. Default: Unbabel/wmt22-comet-da."
        ),
    ] = None,
    setup_comet: Annotated[
        Path | None,
        comet_option(
            metavar="FOLDER",
            help="Create a virtual environment with unbabel-comet in FOLDER, and do nothing else.",
        ),
    ] = None,
    beam_size: options.BeamSize = None,
    length_penalty: options.LengthPenalty = None,
    batch_tokens: options.BatchTokens = None,
    set_: options.Set = None,
    device: options.Device = "auto",
) -> None:
    """Compute BLEU, chrF and TER with sacreBLEU.

    Translates the test sets of MODEL's run, or --source, and scores the result. With --hypotheses, scores
    existing translations instead. With --compare, tests whether systems differ by more than chance.

    Examples:
        mtrain evaluate runs/mine
        mtrain evaluate runs/mine --compare runs/other --html differences.html
        mtrain evaluate --hypotheses new.de --reference right.de
    """
    if setup_comet is not None:
        if any((model, source, reference, hypotheses, compare, sentence_scores, html)):
            raise UsageError("--setup-comet only makes an environment; leave out MODEL and the files")
        if read_launch().rank == 0:
            _set_up_comet(setup_comet)
        return
    search = {"beam_size": beam_size, "length_penalty": length_penalty, "batch_tokens": batch_tokens}
    changes = [] if augment is None else [name.strip() for name in augment.split(",")]
    inputs = EvaluationInputs(
        model=model,
        source=source,
        references=reference or [],
        hypotheses=hypotheses,
        compared=compare or [],
        augment=changes,
        languages=(from_, to),
        validation=validation,
    )
    names = [name.strip() for name in metrics.lower().split(",")]
    outputs = Outputs(json_, by_length, sentence_scores, html, summary=bool(changes) and not compare)
    _check_inputs(inputs, outputs, "comet" in names)
    of_metrics = {"--bleu-tokenize": bleu_tokenize, "--comet": comet, "--comet-model": comet_model}
    _check_metrics(names, lowercase, of_metrics)
    if by_length and {*names} == {"comet"}:
        raise UsageError("--by-length has no effect on --metrics comet; add bleu, or leave it out")
    translating = bool(inputs.models)
    if not translating:
        unused_device = None if device == "auto" or "comet" in names else device
        unused = {**search, "set": set_ or None, "device": unused_device, "augment": augment, "from": from_}
        if given := [name.replace("_", "-") for name, value in unused.items() if value is not None]:
            reason = "with --hypotheses, which are scored without translating"
            raise UsageError(f"--{given[0]} has no effect {reason}; leave it out")
    settings = options.overrides(set_, "decoding.", **search)
    data_settings = [assignment for assignment in settings if assignment.startswith("data.")]
    decoding_settings = [assignment for assignment in settings if assignment not in data_settings]
    if inputs.references and data_settings:
        raise UsageError(f"--set {data_settings[0]} has no effect with --reference; leave it out")
    from mtrain.evaluation.comet import DEFAULT_MODEL, CometProcess, comet_python
    from mtrain.evaluation.evaluate import data_files_of

    if model is not None and (sentence_scores or html):
        own = data_files_of(model, data_settings)
        for output in (sentence_scores, html):
            require_writable(output, own)
    python = comet_python(comet) if "comet" in names and read_launch().rank == 0 else Path()
    used_model = str(path_of(comet_model or DEFAULT_MODEL))
    process = CometProcess(python, used_model, device)
    wanted = Metrics(names, lowercase, bleu_tokenize, process)
    wanted.make(None)  # an error before any work
    if inputs.compared:
        from mtrain.evaluation.compare import require_seed

        require_seed()
    if not translating:
        evaluate_files(inputs, wanted, outputs)
        return
    evaluate_models(inputs, decoding_settings, data_settings, beam_size, device, wanted, outputs)
    words = [str(inputs.models[0])]
    words += [f"{option}={code}" for option, code in (("--from", from_), ("--to", to)) if code]
    terminal.suggest("to translate a file", f"mtrain translate {shlex.join(words)} -i FILE -o FILE")


def _check_inputs(inputs: EvaluationInputs, outputs: Outputs, comet: bool) -> None:
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
        if model is not None and model not in compared and (inputs.models or inputs.languages[1]):
            problem = "has no effect, because --to or --compare gives the language of --hypotheses"
            raise UsageError(f"MODEL {model} {problem}; leave it out, or give it with --compare")
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
    """Raise UsageError if `--augment` names an unknown change, or one twice, or if a system is a file, which
    cannot translate the changed test sets."""
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
    """Raise UsageError if an option needs the sources and --source is missing. With --hypotheses alone,
    --source is optional, and only serves to count problems."""
    needs = [f"--compare {path}" for path in inputs.models]
    needs += ["--metrics comet"] * comet + ["--by-length"] * outputs.by_length
    if inputs.source is None and needs:
        raise UsageError(f"{needs[0]} needs the source sentences; give --source")


def _check_metrics(names: Sequence[str], lowercase: bool, given: Mapping[str, object]) -> None:
    """Raise UsageError if --lowercase, or an option that was `given` a value, has no effect on these
    metrics."""
    for option, value in given.items():
        metric = "bleu" if option == "--bleu-tokenize" else "comet"
        if value is not None and metric not in names:
            found = f"{option} has no effect on --metrics {','.join(names)}"
            raise UsageError(f"{found}; add {metric}, or leave it out")
    if lowercase and {*names} <= {"ter", "comet"}:
        found = f"--lowercase has no effect on --metrics {','.join(names)}"
        raise UsageError(f"{found}; add bleu or chrf, or leave it out")


def _set_up_comet(folder: Path) -> None:
    from mtrain.evaluation.comet import VARIABLE, set_up_comet

    set_up_comet(folder)
    print_to_stdout(folder)
    place = shlex.quote(str(folder.resolve()))
    terminal.suggest("to use it", f"export {VARIABLE}={place}; mtrain evaluate MODEL --metrics bleu,comet")
