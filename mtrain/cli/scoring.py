"""`mtrain score`."""

from pathlib import Path
from typing import Annotated

from typer import Option

from mtrain.cli import terminal
from mtrain.cli.options import BatchTokens, Debug, Device, Ensemble, ModelFolder, Quiet, Set, overrides
from mtrain.cli.output import is_on_screen, open_stdout
from mtrain.cli.translation import load_translator
from mtrain.cli.translation_output import count_lines
from mtrain.errors import UsageError


def score(
    model: ModelFolder,
    source: Annotated[Path, Option("-i", "--input", metavar="FILE", help="Source sentences, one per line.")],
    target: Annotated[Path, Option(metavar="FILE", help="Their translations, one per line.")],
    ensemble: Ensemble = None,
    batch_tokens: BatchTokens = None,
    json_: Annotated[
        bool, Option("--json", help="Print one JSON object per line, which also has the tokens.")
    ] = False,
    set_: Set = None,
    device: Device = "auto",
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Score given translations with MODEL.

    Prints, for each pair of lines, the log-probability in nats, the number of tokens, and the log-probability
    of each token, separated by tabs.

    Examples:
        mtrain score runs/mine -i new.en --target new.de
    """
    terminal.start_logging(quiet, debug)
    for file in (source, target):
        if str(file) == "-":
            raise UsageError("score cannot read from stdin; give files")
        terminal.require_file(file)
    from mtrain.config.corpora import TextCorpus
    from mtrain.data.corpus import read_corpus
    from mtrain.data.lines import raise_errors
    from mtrain.decoding.score import score_pairs
    from mtrain.progress_bar import ProgressBar

    settings = overrides(set_, "decoding.", batch_tokens=batch_tokens)
    translator = load_translator(model, device, settings, ensemble)
    pairs = raise_errors(read_corpus(TextCorpus(source=str(source), target=str(target))))
    hidden = is_on_screen(None)
    with ProgressBar("scored", "pairs", count_lines(source), hidden) as progress, open_stdout() as out:
        for scored in score_pairs(translator, pairs, progress.add):
            out.write(scored.as_json() if json_ else scored.line())
