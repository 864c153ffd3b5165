"""`mtrain evaluate`."""

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from mtrain.cli import terminal
from mtrain.cli.options import (
    BatchTokens,
    BeamSize,
    Debug,
    Device,
    Json,
    LengthPenalty,
    Quiet,
    Set,
    overrides,
)
from mtrain.cli.output import open_stdout
from mtrain.cli.translation import load_translator, refuse_beam_size_of_sampling
from mtrain.distributed.launch import read_launch
from mtrain.errors import UsageError

if TYPE_CHECKING:
    from mtrain.evaluation.metrics import Score

Scores = tuple[str, int, "list[Score]"]  # name of the test set, number of sentences, scores


def evaluate(
    model: Annotated[
        Path | None, Argument(metavar="MODEL", help="Run folder or model folder; optional with --hypotheses.")
    ] = None,
    source: Annotated[
        Path | None, Option(metavar="FILE", help="Sentences to translate and score; - is stdin.")
    ] = None,
    reference: Annotated[
        list[Path] | None, Option(metavar="FILE", help="Reference translations; repeatable.")
    ] = None,
    hypotheses: Annotated[
        Path | None, Option(metavar="FILE", help="Translations to score; - is stdin.")
    ] = None,
    metrics: Annotated[
        str, Option(metavar="NAMES", help="Comma-separated list of bleu, chrf and ter.")
    ] = "bleu,chrf,ter",
    lowercase: Annotated[bool, Option("--lowercase", help="Ignore case.")] = False,
    bleu_tokenize: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help="sacreBLEU tokenizer; by default the one for MODEL's target language, or 13a without MODEL.",
        ),
    ] = None,
    json_: Json = False,
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
    existing translations instead.
    """
    terminal.start_logging(quiet, debug)
    search = {"beam_size": beam_size, "length_penalty": length_penalty, "batch_tokens": batch_tokens}
    _check_files(source, reference, hypotheses)
    if hypotheses is not None:
        unused = {**search, "set": set_ or None, "device": None if device == "auto" else device}
        _refuse_unused(unused, "--hypotheses, which are scored without translating")
    elif model is None:
        raise UsageError("missing MODEL; only --hypotheses can be scored without it")
    names = metrics.lower().split(",")
    if bleu_tokenize is not None and "bleu" not in names:
        raise UsageError(f"--bleu-tokenize has no effect on --metrics {metrics}; add bleu, or leave it out")
    metric_options = (names, lowercase, bleu_tokenize)
    if hypotheses is not None:
        if read_launch().rank == 0:
            _print_scores(_score_hypotheses(model, hypotheses, reference or [], *metric_options), json_)
    else:
        assert model is not None
        settings = overrides(set_, "decoding.", **search)
        others = (settings, beam_size, device, *metric_options, json_)
        _score_model(model, source, reference or [], *others)
        terminal.suggest(f"to translate a file: mtrain translate {shlex.quote(str(model))} -i FILE -o FILE")


def _check_files(source: Path | None, reference: Sequence[Path] | None, hypotheses: Path | None) -> None:
    if source is not None and hypotheses is not None:
        raise UsageError("--source and --hypotheses were both given; give one of them")
    if (source is not None or hypotheses is not None) != bool(reference):
        raise UsageError("give --reference with either --source or --hypotheses")
    if Path("-") in (reference or ()):
        raise UsageError("--reference -: reading references from stdin is not supported; give a file")


def _refuse_unused(options: Mapping[str, object], reason: str) -> None:
    given = [name.replace("_", "-") for name, value in options.items() if value is not None]
    if given:
        raise UsageError(f"--{given[0]} has no effect with {reason}; leave it out")


def _score_hypotheses(
    model: Path | None,
    hypotheses: Path,
    references: Sequence[Path],
    names: Sequence[str],
    lowercase: bool,
    bleu_tokenize: str | None,
) -> Iterator[Scores]:
    """The scores of existing translations. MODEL is used only for its target language."""
    from mtrain.checkpoint.model_folder import load_model
    from mtrain.evaluation.evaluate import read_references
    from mtrain.evaluation.metrics import make_metrics, score

    name, translations = _read(hypotheses)
    others = read_references(references, name, len(translations))
    language = None if model is None else load_model(model).config.target_lang
    metrics = make_metrics(names, language, lowercase, bleu_tokenize)
    yield Path(name).name, len(translations), score(translations, others, metrics)


def _read(file: Path) -> tuple[str, list[str]]:
    """The name of a file in messages, and its lines; `-` is stdin."""
    return "<stdin>" if str(file) == "-" else str(file), list(terminal.read_lines(file))


def _score_model(
    model: Path,
    source: Path | None,
    references: Sequence[Path],
    settings: Sequence[str],
    beam_size: int | None,
    device: str,
    names: Sequence[str],
    lowercase: bool,
    bleu_tokenize: str | None,
    json_: bool,
) -> None:
    """Print the scores of a model on the test set in the given files, or on the test sets of its run. If
    there are several ranks, they share the translation, and the first alone reads and prints."""
    from mtrain.distributed.many_ranks import joined_ranks
    from mtrain.evaluation.evaluate import TestSet, configured_test_sets, evaluate_set, read_references
    from mtrain.evaluation.metrics import make_metrics

    data_settings = [assignment for assignment in settings if assignment.startswith("data.")]
    if references and data_settings:
        raise UsageError(f"--set {data_settings[0]} has no effect with --reference; leave it out")
    given = None
    if source is not None and read_launch().rank == 0:
        name, sources = _read(source)
        others = read_references(references, name, len(sources))
        given = [TestSet(Path(name).name, sources, others)]
    decoding_settings = [assignment for assignment in settings if not assignment.startswith("data.")]
    with joined_ranks(device) as ranks, terminal.cleaning_up_after_sigterm():
        translator = load_translator(model, str(ranks.device), decoding_settings)
        refuse_beam_size_of_sampling(translator, beam_size)

        def results() -> Iterator[Scores]:
            metrics = make_metrics(names, translator.target_lang, lowercase, bleu_tokenize)
            for test in given or configured_test_sets(model, data_settings):
                yield test.name, len(test.references[0]), evaluate_set(test, translator, metrics)

        translator.lead(ranks, lambda: _print_scores(results(), json_))


def _print_scores(results: Iterable[Scores], json_: bool) -> None:
    report = {}
    with open_stdout() as out:
        for name, sentences, scores in results:
            report[name] = {"sentences": sentences, "scores": [score._asdict() for score in scores]}
            if not json_:
                print(f"{name} ({sentences} sentences)", file=out)
                out.writelines(f"  {score.detail}\n" for score in scores)
        if json_:
            print(json.dumps(report, indent=1), file=out)
