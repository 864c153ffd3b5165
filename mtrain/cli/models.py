"""Commands that combine models: `mtrain average` and `mtrain rerank`."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from mtrain.cli.console import options, terminal
from mtrain.cli.console.output import is_on_screen, open_output, require_writable, write_lines
from mtrain.cli.translate.translate import load_translator
from mtrain.cli.translate.translation_output import count_lines
from mtrain.errors import UsageError


def average(
    models: Annotated[
        list[Path], Argument(metavar="MODEL", help="Run folders, model folders or checkpoints.")
    ],
    output: Annotated[Path, Option("-o", "--output", metavar="FOLDER", help="Model folder to create.")],
    set_: options.Set = None,
) -> None:
    """Average the weights of several models.

    The average translates as fast as a single model. The models need the same vocabulary and architecture and
    a common ancestor: for example, a model and others fine-tuned from it with training.init_from (Wortsman
    et al., "Model soups", ICML 2022). Decoding settings come from the first model.

    Examples:
        mtrain average runs/base runs/tuned -o models/average
    """
    if len(models) < 2:
        raise UsageError("average needs two models or more")
    from mtrain.checkpoint.average import average_models

    averaged = average_models(models, output, options.overrides(set_))
    use = terminal.use_command(str(output), averaged.model.is_classifier, averaged.example)
    terminal.suggest("model saved; next", use)


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
