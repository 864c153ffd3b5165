"""`mtrain plan`, `mtrain fit` and `mtrain average`."""

import json
import logging
import shlex
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from mtrain.cli.console import options, terminal
from mtrain.cli.console.interruption import exit_at_once
from mtrain.cli.console.output import open_stdout, print_to_stdout
from mtrain.cli.console.tables import format_scores, format_table
from mtrain.cli.data import fit_command
from mtrain.distributed.launch import read_launch
from mtrain.errors import DataError, ModelError, UsageError

log = logging.getLogger(__name__)


def fit(
    config: options.ConfigFile,
    run_dir: options.RunDir = None,
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
    no_check: options.NoCheck = False,
    set_: options.Set = None,
    device: options.Device = "auto",
) -> None:
    """Train a model on the corpora of CONFIG.

    The same command resumes an interrupted run. The best model is saved in the run folder, in model/. At the
    end, prints its scores on the test sets.

    Examples:
        mtrain fit mine.yaml
        mtrain fit mine.yaml --run-dir runs/seed2 --set seed=2
        torchrun --nproc-per-node 8 -m mtrain fit mine.yaml
    """
    loaded = options.load_config(config, set_, run_dir, no_check)
    from mtrain.checkpoint.model_info import read_model_config
    from mtrain.training.fit import fit as fit_model

    fit_model(loaded, resume, device, allow_data_change, exit_at_once)
    if loaded.data.test and read_launch().rank == 0 and not loaded.model.is_classifier:
        try:
            _print_test_scores(Path(loaded.run_dir), device)
        except DataError as error:  # the model is trained; the test sets may be on another machine
            log.warning("the test sets were not scored: %s", error)
    example = None
    with suppress(ModelError):  # the file may not have reached other machines yet
        example = read_model_config(Path(loaded.run_dir) / "model").example
    use = terminal.use_command(loaded.run_dir, loaded.model.is_classifier, example)
    terminal.suggest("model saved; next", use, f"mtrain report {shlex.quote(loaded.run_dir)}")


def _print_test_scores(run_dir: Path, device: str) -> None:
    """Print the scores of the best model on the configured test sets."""
    from mtrain.decoding.translate import Translator
    from mtrain.runs.results import score_test_sets

    with Translator.load(run_dir, device) as translator, open_stdout() as out:
        for test in score_test_sets(run_dir, translator):
            print(f"{test.name} ({test.sentences} sentences)", file=out)
            out.writelines(f"{line}\n" for line in format_scores(test.scores))


def plan(
    config: options.ConfigFile,
    hardware: Annotated[
        Literal["a100", "h100", "h200", "cpu", "measured"],
        Option(
            help="GPU to predict for; cpu: this machine's cores, at an assumed speed; measured: time some "
            "steps on this machine."
        ),
    ] = "measured",
    devices: Annotated[int, Option(min=1, max=100_000, metavar="N", help="Number of devices.")] = 1,
    price: Annotated[
        float | None, Option(metavar="PER_HOUR", help="Price of one device per hour, to compute the cost.")
    ] = None,
    run_dir: options.RunDir = None,
    json_: options.Json = False,
    set_: options.Set = None,
) -> None:
    """Predict memory, FLOPs, hours and cost of a run.

    Prints the parameters, the FLOPs of a step, the memory of a device, the steps of an epoch, the
    communication between several devices, and what to change if the memory does not suffice. Writes nothing.
    Reads the text of CONFIG unless it is encoded already.

    Examples:
        mtrain plan mine.yaml
        mtrain plan mine.yaml --hardware h100 --devices 8 --price 2.50
    """
    if price is not None and not 0 <= price <= 1e9:
        raise UsageError(f"--price {price}: must be a number from 0 to 1000000000")
    loaded = options.load_config(config, set_, run_dir)
    from dataclasses import asdict

    from mtrain.planning.plan import plan as make_plan
    from mtrain.planning.plan_report import plan_notes, plan_rows

    found = make_plan(loaded, hardware, devices, price)
    if json_:
        print_to_stdout(json.dumps(asdict(found), indent=1))
    else:
        lines = [*format_table(list(plan_rows(found)), left=(0, 2), indent=0)]
        lines += (terminal.wrap(note, sys.stdout) for note in plan_notes(found))
        print_to_stdout("\n".join(lines))
    terminal.suggest("next", fit_command(config, run_dir, set_))


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
