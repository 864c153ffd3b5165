"""`mtrain demo`."""

import logging
import shlex
from importlib.resources import as_file, files
from pathlib import Path
from typing import Annotated

from typer import Option

from mtrain.cli.console import options, terminal
from mtrain.cli.console.interruption import exit_at_once
from mtrain.cli.console.output import open_stdout
from mtrain.cli.translate.translate import load_translator
from mtrain.errors import MtrainError

log = logging.getLogger(__name__)

CONFIG = "toy-en-fr.yaml"  # packaged beside this file; the same as configs/toy-en-fr.yaml
SENTENCES = ("I like oranges.", "I don't like pineapples and oranges.", "Does she eat red apples?")
EXPECTED = "J'aime les oranges."  # the translation of the first
EXPECTED_BLEU = 97.0


def demo(
    run_dir: Annotated[
        str | None, Option(metavar="FOLDER", help="Run folder. Default: runs/toy-en-fr.")
    ] = None,
    set_: options.Set = None,
    device: options.Device = "auto",
) -> None:
    """Train, use and evaluate a toy model.

    Trains a small English-French model on a bundled corpus, translates a few sentences and computes BLEU.
    Takes about one minute on two CPU cores with bf16, and fails if the model is worse than expected.

    Examples:
        mtrain demo
    """
    from mtrain.runs.results import score_test_sets
    from mtrain.training.fit import fit

    with as_file(files("mtrain.cli") / CONFIG) as file:
        config = options.load_config(file, set_, run_dir)
    fit(config, device=device, on_second_signal=exit_at_once)
    run = Path(config.run_dir)
    translator = load_translator(run, device, ())
    translations = [best.text for best in translator.translate(SENTENCES)]
    [[bleu, *_], *_] = [test.scores for test in score_test_sets(run, translator)]
    with open_stdout() as out:
        for sentence, translation in zip(SENTENCES, translations, strict=True):
            print(f"{sentence}  ->  {translation}", file=out)
        print(f"BLEU on the test set: {bleu.score:.2f}", file=out)
    check_outcome(translations[0], bleu.score, bool(set_))
    folder = shlex.quote(config.run_dir)
    terminal.suggest("next", f"mtrain translate {folder} 'Do they like pears?'", f"mtrain evaluate {folder}")


def check_outcome(translation: str, bleu: float, settings_changed: bool) -> None:
    """Compare the first translation and BLEU with what the default settings reach.

    If they are worse, raises MtrainError, or warns if the settings were changed.
    """
    if translation == EXPECTED and bleu >= EXPECTED_BLEU:
        return
    reason = f'expected "{EXPECTED}" and a BLEU of at least {EXPECTED_BLEU:.0f}'
    if not settings_changed:
        raise MtrainError(f"the demo model is worse than it should be: {reason}; please report this")
    log.warning("with --set the demo model is worse than by default: %s", reason)
