"""`mtrain evaluate`."""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from mtrain.cli import terminal
from mtrain.cli.evaluation_results import Outputs, report_results
from mtrain.cli.evaluation_systems import Evaluated, Inputs, Report, evaluate_files, evaluate_models
from mtrain.cli.options import (
    FILES,
    RESULTS,
    BatchTokens,
    BeamSize,
    Debug,
    Device,
    From,
    Json,
    LengthPenalty,
    Quiet,
    Set,
    To,
    overrides,
)
from mtrain.cli.output import is_stream, require_writable
from mtrain.distributed.launch import read_launch
from mtrain.errors import DataError, UsageError

if TYPE_CHECKING:
    from mtrain.evaluation.evaluate import TestSet

METRICS, COMET = "Metrics", "COMET"  # groups of options


def evaluate(
    model: Annotated[
        Path | None, Argument(metavar="MODEL", help="Run folder or model folder; optional with --hypotheses.")
    ] = None,
    source: Annotated[
        Path | None,
        Option(metavar="FILE", help="Sentences to translate and score; - is stdin.", rich_help_panel=FILES),
    ] = None,
    reference: Annotated[
        list[Path] | None,
        Option(metavar="FILE", help="Reference translations; repeatable.", rich_help_panel=FILES),
    ] = None,
    hypotheses: Annotated[
        Path | None, Option(metavar="FILE", help="Translations to score; - is stdin.", rich_help_panel=FILES)
    ] = None,
    compare: Annotated[
        list[Path] | None,
        Option(
            metavar="MODEL|FILE",
            help="Model or file of translations to compare with MODEL or --hypotheses; repeatable.",
            rich_help_panel=FILES,
        ),
    ] = None,
    metrics: Annotated[
        str,
        Option(
            metavar="NAMES",
            help="Comma-separated list of bleu, chrf, chrf++, ter and comet.",
            rich_help_panel=METRICS,
        ),
    ] = "bleu,chrf,ter",
    lowercase: Annotated[
        bool,
        Option(
            "--lowercase",
            help="Ignore case in BLEU and chrF; TER always ignores it.",
            rich_help_panel=METRICS,
        ),
    ] = False,
    bleu_tokenize: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help="sacreBLEU tokenizer; by default the one for MODEL's target language, or 13a without MODEL.",
            rich_help_panel=METRICS,
        ),
    ] = None,
    augment: Annotated[
        str | None,
        Option(
            metavar="NAMES",
            help="Also score changed copies of the test sets: comma-separated list of uppercase, titlecase, "
            "drop_final_punctuation and typos.",
            rich_help_panel=RESULTS,
        ),
    ] = None,
    by_length: Annotated[
        bool,
        Option(
            "--by-length",
            help="Also score the sentences of each range of source lengths.",
            rich_help_panel=RESULTS,
        ),
    ] = False,
    sentence_scores: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="Write the scores of each sentence to a tab-separated file.",
            rich_help_panel=RESULTS,
        ),
    ] = None,
    html: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="Write a page with the compared sentences side by side.",
            rich_help_panel=RESULTS,
        ),
    ] = None,
    json_: Json = False,
    from_: From = None,
    to: To = None,
    comet: Annotated[
        Path | None,
        Option(
            metavar="FOLDER",
            help="Virtual environment with unbabel-comet. Default: the one that MTRAIN_COMET names.",
            rich_help_panel=COMET,
        ),
    ] = None,
    comet_model: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help="COMET model, by name or checkpoint file. Default: Unbabel/wmt22-comet-da.",
            rich_help_panel=COMET,
        ),
    ] = None,
    setup_comet: Annotated[
        Path | None,
        Option(
            metavar="FOLDER",
            help="Create a virtual environment with unbabel-comet in FOLDER, and do nothing else.",
            rich_help_panel=COMET,
        ),
    ] = None,
    beam_size: BeamSize = None,
    length_penalty: LengthPenalty = None,
    batch_tokens: BatchTokens = None,
    set_: Set = None,
    device: Device = "auto",
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Compute BLEU, chrF and TER with sacreBLEU.

    Translates the test sets of MODEL's run, or --source, and scores the result. With --hypotheses, scores
    existing translations instead. With --compare, tests whether systems differ by more than chance.

    Examples:
        mtrain evaluate runs/mine
        mtrain evaluate runs/mine --compare runs/other --html differences.html
        mtrain evaluate --hypotheses new.de --reference right.de
    """
    terminal.start_logging(quiet, debug)
    if setup_comet is not None:
        if any((model, source, hypotheses, compare)):
            raise UsageError("--setup-comet only makes an environment; leave out MODEL and the files")
        if read_launch().rank == 0:
            _set_up_comet(setup_comet)
        return
    search = {"beam_size": beam_size, "length_penalty": length_penalty, "batch_tokens": batch_tokens}
    changes = [] if augment is None else [name.strip() for name in augment.split(",")]
    inputs = Inputs(model, source, reference or [], hypotheses, compare or [], changes, (from_, to))
    names = [name.strip() for name in metrics.lower().split(",")]
    outputs = Outputs(json_, by_length, sentence_scores, html, summary=bool(changes) and not compare)
    _check_inputs(inputs, outputs, "comet" in names)
    _check_metrics(names, bleu_tokenize, comet, comet_model)
    if by_length and names == ["comet"]:
        raise UsageError("--by-length has no effect on --metrics comet; add bleu, or leave it out")
    translating = bool(inputs.models)
    if not translating:
        unused_device = None if device == "auto" or "comet" in names else device
        unused = {**search, "set": set_ or None, "device": unused_device, "augment": augment}
        unused |= {"from": from_, "to": to}
        _refuse_unused(unused, "--hypotheses, which are scored without translating")
    settings = overrides(set_, "decoding.", **search)
    data_settings = [assignment for assignment in settings if assignment.startswith("data.")]
    if inputs.references and data_settings:
        raise UsageError(f"--set {data_settings[0]} has no effect with --reference; leave it out")
    gpus = "0" if device == "cpu" else "auto"
    report = _reporter(names, lowercase, bleu_tokenize, (comet, comet_model, gpus), outputs)
    if not translating:
        evaluate_files(inputs, report)
        return
    evaluate_models(inputs, settings, beam_size, device, report)
    first = shlex.quote(str(inputs.models[0]))
    terminal.suggest("to translate a file", f"mtrain translate {first} -i FILE -o FILE")


def _reporter(
    names: Sequence[str],
    lowercase: bool,
    bleu_tokenize: str | None,
    comet: tuple[Path | None, str | None, str],
    outputs: Outputs,
) -> Report:
    """What scores translations by the metrics. Raises UsageError if one is unknown or unavailable."""
    from mtrain.evaluation.comet import DEFAULT_MODEL, Comet, CometProcess, comet_python
    from mtrain.evaluation.metrics import make_metrics

    make_metrics(names, None, lowercase, bleu_tokenize, lambda: None)  # an error before any work
    folder, model, gpus = comet
    python = comet_python(folder) if "comet" in names and read_launch().rank == 0 else Path()

    def report(evaluated: Iterable[Evaluated], language: str | None) -> None:
        with CometProcess(python, model or DEFAULT_MODEL, gpus) as process:

            def metrics_for(test: "TestSet") -> dict[str, Any]:
                target = test.direction.target if test.direction else language
                return make_metrics(
                    names, target, lowercase, bleu_tokenize, lambda: Comet(process, test.sources)
                )

            report_results(evaluated, metrics_for, outputs)

    return report


def _check_inputs(inputs: Inputs, outputs: Outputs, comet: bool) -> None:
    """Raise UsageError unless the options name translations to score and what to score them with, and
    DataError if a system to compare is missing."""
    model, source, references, hypotheses, compared, changes, languages = inputs
    if hypotheses is None and model is None:
        raise UsageError("missing MODEL; only --hypotheses can be scored without it")
    if (source is not None or hypotheses is not None) != bool(references):
        raise UsageError("give --reference with either --source or --hypotheses")
    if any(languages) and not references:
        option = "--from" if languages[0] else "--to"
        raise UsageError(
            f"{option} has no effect on the test sets of MODEL, which have languages; leave it out"
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
    _check_changes(changes, [path for path in compared if not inputs.is_model(path)])
    if outputs.html is not None and not compared:
        raise UsageError("--html has no effect without --compare; add it, or leave --html out")
    if hypotheses is not None:
        _check_sources(inputs, outputs, comet)
    files = [path for path in (source, *references, *inputs.systems) if path != model and path is not None]
    for output in (outputs.sentence_scores, outputs.html):
        require_writable(output, [file for file in files if file.exists()])
    table, page = (
        None if file is None else file.resolve() for file in (outputs.sentence_scores, outputs.html)
    )
    if page is not None and page == table and not is_stream(outputs.html):
        raise UsageError(f"--html {outputs.html}: --sentence-scores names the same file; give another one")


def _check_changes(changes: Sequence[str], files: Sequence[Path]) -> None:
    """Raise UsageError unless copies of the test sets with these changes can be translated by all systems."""
    from mtrain.data.augment import CHANGES

    for name in changes:
        if name not in CHANGES:
            raise UsageError(f"--augment {name}: choose from {', '.join(CHANGES)}")
    if len(set(changes)) < len(changes):
        raise UsageError(f"--augment {','.join(changes)}: give each name once")
    if changes and files:
        raise UsageError(f"--augment needs models to translate with; --compare {files[0]} is a file")


def _check_sources(inputs: Inputs, outputs: Outputs, comet: bool) -> None:
    """Raise UsageError unless --source is given exactly if something besides --hypotheses needs it."""
    models = [path for path in inputs.models if path != inputs.model]
    needs = {
        f"--compare {models[0]}" if models else "": bool(models),
        "--metrics comet": comet,
        "--by-length": outputs.by_length,
    }
    if inputs.source is None:
        for option, is_needed in needs.items():
            if is_needed:
                raise UsageError(f"{option} needs the source sentences; give --source")
    elif not any(needs.values()) and outputs.html is None:
        raise UsageError("--source and --hypotheses were both given; give one of them")


def _check_metrics(
    names: Sequence[str], bleu_tokenize: str | None, comet: Path | None, comet_model: str | None
) -> None:
    metrics = ",".join(names)
    if bleu_tokenize is not None and "bleu" not in names:
        raise UsageError(f"--bleu-tokenize has no effect on --metrics {metrics}; add bleu, or leave it out")
    for option, value in {"--comet": comet, "--comet-model": comet_model}.items():
        if value is not None and "comet" not in names:
            raise UsageError(f"{option} has no effect on --metrics {metrics}; add comet, or leave it out")


def _refuse_unused(options: Mapping[str, object], reason: str) -> None:
    given = [name.replace("_", "-") for name, value in options.items() if value is not None]
    if given:
        raise UsageError(f"--{given[0]} has no effect with {reason}; leave it out")


def _set_up_comet(folder: Path) -> None:
    from mtrain.evaluation.comet import VARIABLE, set_up_comet

    set_up_comet(folder)
    print(folder)
    place = shlex.quote(str(folder.resolve()))
    terminal.suggest("to use it", f"export {VARIABLE}={place}; mtrain evaluate MODEL --metrics bleu,comet")
