"""`mtrain score` and `mtrain rerank`."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from mtrain.cli.console import options, terminal
from mtrain.cli.console.output import is_on_screen, open_output, require_writable, write_lines
from mtrain.cli.translate.translate import load_translator
from mtrain.cli.translate.translation_output import count_lines
from mtrain.errors import DataError, UsageError


def score(
    model: options.ModelFolder,
    source: Annotated[
        Path | None, options.file("-i", "--input", metavar="FILE", help="Source sentences, one per line.")
    ] = None,
    target: Annotated[
        Path | None, options.path(help="Translations of the lines of -i, one per line.")
    ] = None,
    tsv: Annotated[
        Path | None,
        options.path(
            help="Tab-separated file with source and target in its first two columns, in place of -i and "
            "--target. It is printed with the score as a further column."
        ),
    ] = None,
    quotes: Annotated[bool, Option("--quotes", help="Fields of --tsv may be in double quotes.")] = False,
    reverse: Annotated[
        Path | None,
        Option(
            metavar="MODEL",
            help="Model of the reverse direction, for the dual conditional cross-entropy; with --tsv.",
        ),
    ] = None,
    classifier: Annotated[
        bool,
        Option("--classifier", help="MODEL is a pair classifier: print the probability that a pair is good."),
    ] = False,
    output: options.OutputFile = None,
    from_: options.From = None,
    to: options.To = None,
    ensemble: options.FurtherModels = None,
    batch_tokens: options.BatchTokens = None,
    json_: Annotated[
        bool, Option("--json", help="Print one JSON object per line, which also has the tokens.")
    ] = False,
    set_: options.Set = None,
    device: options.Device = "auto",
) -> None:
    """Score given translations with MODEL.

    Prints, for each pair of lines, the log-probability in nats, the number of tokens, and the log-probability
    of each token, separated by tabs. With --tsv, each line is printed with one more column, by which
    data.filters.min_score can filter: the mean log-probability of a token or, with --reverse, a number
    between 0 and 1. It is nan if a side is longer than the model's maximum length.

    With --classifier, prints the probability that the pair is good, or appends it as a column.

    Examples:
        mtrain score runs/mine -i new.en --target new.de
        mtrain score runs/en-de --tsv pairs.tsv --reverse runs/de-en -o scored.tsv
        mtrain score runs/classifier --classifier --tsv pairs.tsv -o scored.tsv
    """
    inputs = _require_inputs(source, target, tsv)
    if tsv is None and (quotes or reverse is not None):
        raise UsageError(f"{'--quotes' if quotes else '--reverse'} needs --tsv")
    if tsv is not None and json_:
        raise UsageError("--json and --tsv exclude each other")
    others = {"--reverse": reverse, "--from": from_, "--to": to, "--ensemble": ensemble, "--json": json_}
    if classifier and (given := [name for name, value in others.items() if value]):
        raise UsageError(f"--classifier and {given[0]} exclude each other")
    require_writable(output, inputs)
    counts = [count_lines(file) for file in inputs]
    if len({*counts} - {None}) > 1:
        found = f"{inputs[0]} has {counts[0]} lines but {inputs[1]} has {counts[1]} lines"
        raise DataError(f"{found}; the pairs would be misaligned")
    settings = options.overrides(set_, "decoding.", batch_tokens=batch_tokens)
    from mtrain.decoding.scoring.score import filter_scores, score_pairs, with_column
    from mtrain.progress_bar import ProgressBar

    numbers: Callable[..., Iterator[float]]
    if classifier:
        from mtrain.checkpoint.model_folder import load_classifier
        from mtrain.decoding.scoring.classify import classify_pairs
        from mtrain.device import let_cuda_memory_grow, resolve_device

        let_cuda_memory_grow()
        numbers = partial(classify_pairs, load_classifier(model, settings), resolve_device(device))
    else:
        translator = load_translator(model, device, settings, ensemble).between(from_, to)
        other = None
        if reverse is not None:
            source_lang, target_lang = translator.direction
            other = load_translator(reverse, device, settings).between(target_lang, source_lang)
        numbers = partial(filter_scores, translator, other)
    models = 1 if reverse is None else 2  # each of which scores each pair
    total = None if counts[0] is None else counts[0] * models
    with ProgressBar("scored", "pairs", total, is_on_screen(output)) as progress, open_output(output) as out:
        if tsv is not None:
            values = partial(numbers, progress=progress.add)
            out.writelines(with_column(terminal.read_lines(tsv), str(tsv), values, quotes))
        elif classifier:
            out.writelines(f"{value:.6f}\n" for value in numbers(_read_pairs(inputs), progress.add))
        else:
            for scored in score_pairs(translator, _read_pairs(inputs), progress.add):
                out.write(scored.as_json() if json_ else scored.line())


def _require_inputs(source: Path | None, target: Path | None, tsv: Path | None) -> list[Path]:
    """The files to read. Raises UsageError unless they are two files of lines or one of columns; DataError if
    one is missing."""
    given = [file for file in (source, target, tsv) if file is not None]
    if len(given) != (1 if tsv else 2):
        raise UsageError("give both -i and --target, or --tsv alone")
    terminal.require_files(given, "score")
    return given


def _read_pairs(inputs: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """The pairs of lines of two files."""
    from mtrain.config.sections.corpora import TextCorpus
    from mtrain.data.reading.blocks import read_corpus
    from mtrain.data.reading.lines import raise_errors

    source, target = map(str, inputs)
    return raise_errors(read_corpus(TextCorpus(source=source, target=target)))


def rerank(
    model: Annotated[
        Path,
        Argument(metavar="MODEL", help="Run folder, model folder or checkpoint of the opposite direction."),
    ],
    n_best: Annotated[
        Path, Argument(metavar="N_BEST", help="Output of mtrain translate --json --n-best N, N at least 2.")
    ],
    source: Annotated[
        Path, Option("-i", "--input", metavar="FILE", help="Sentences that were translated, one per line.")
    ],
    output_file: options.OutputFile = None,
    from_: options.From = None,
    to: options.To = None,
    weight: Annotated[
        float, Option(metavar="WEIGHT", help="Weight of MODEL's score, relative to the score in N_BEST.")
    ] = 0.07,
    batch_tokens: options.BatchTokens = None,
    set_: options.Set = None,
    device: options.Device = "auto",
) -> None:
    """Choose translations with a reverse model.

    MODEL translates in the opposite direction. For each sentence, prints the translation in N_BEST with the
    highest value: its score plus WEIGHT times the mean log-probability (nats per token) that MODEL gives the
    source (noisy-channel reranking; Yee et al., EMNLP 2019). Choose WEIGHT on a validation set.

    Examples:
        mtrain translate runs/en-de -i new.en --json --n-best 16 -o n-best.jsonl
        mtrain rerank runs/de-en n-best.jsonl -i new.en -o new.de
    """
    if not 0 <= weight <= 1e9:
        raise UsageError(f"--weight {weight}: must be a number from 0 to 1000000000")
    terminal.require_files((source, n_best), "rerank")
    require_writable(output_file, (source, n_best))
    from mtrain.decoding.scoring.rerank import read_n_best
    from mtrain.decoding.scoring.rerank import rerank as best_of
    from mtrain.progress_bar import with_progress

    settings = options.overrides(set_, "decoding.", batch_tokens=batch_tokens)
    translator = load_translator(model, device, settings).between(from_, to)
    texts = best_of(translator, read_n_best(source, n_best), weight)
    if not is_on_screen(output_file):
        texts = with_progress(texts, "reranked", "lines", count_lines(source))
    with open_output(output_file) as out:
        write_lines((f"{text}\n" for text in texts), out)
