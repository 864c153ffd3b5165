"""`mtrain fit`."""

import shlex
from typing import Annotated

from typer import Option

from mtrain.cli import terminal
from mtrain.cli.options import ConfigFile, Debug, Device, NoCheck, Quiet, RunDir, Set, overrides


def fit(
    config: ConfigFile,
    run_dir: RunDir = None,
    resume: Annotated[
        str,
        Option(
            metavar="auto|never|CHECKPOINT",
            help="auto: resume from the newest valid checkpoint, if any; never: exit with an error if there "
            "is a checkpoint; CHECKPOINT: resume from this checkpoint folder.",
        ),
    ] = "auto",
    allow_data_change: Annotated[
        bool, Option("--allow-data-change", help="Resume even though the corpus has changed.")
    ] = False,
    no_check: NoCheck = False,
    set_: Set = None,
    device: Device = "auto",
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Train a model on the corpora of CONFIG.

    The same command resumes an interrupted run. The best model is saved in the run folder, in model/.
    """
    terminal.start_logging(quiet, debug)
    from mtrain.config.load import load_config

    given = [*(set_ or []), *["data.check=false"] * no_check]
    loaded = load_config(config, overrides(given, run_dir=run_dir))
    from mtrain.training.fit import fit as fit_model

    fit_model(loaded, resume, device, quiet, allow_data_change)
    terminal.suggest(f"model saved; try: mtrain translate {shlex.quote(loaded.run_dir)} 'Hello.'")
