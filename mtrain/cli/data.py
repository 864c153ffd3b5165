"""`mtrain check`, `mtrain clean`, `mtrain tokenize` and `mtrain prepare`."""

import json
import logging
import shlex
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated

from typer import Option

from mtrain.cli.console import options, terminal
from mtrain.cli.console.output import is_on_screen, is_stdout, open_output, print_to_stdout, require_writable
from mtrain.errors import StorageError, UsageError

log = logging.getLogger(__name__)


def check(
    config: options.ConfigFile,
    run_dir: options.RunDir = None,
    json_: options.Json = False,
    set_: options.Set = None,
) -> None:
    """Check the corpora of CONFIG.

    Prints counts, lengths, duplicates, test sentences that occur in the training data, characters that
    tokenizer.normalization changes, and suspicious or unreadable pairs. The exit code is 3 if a set
    has no usable pair. A warning names a package that `mtrain fit` will need but that is not installed.

    Examples:
        mtrain check mine.yaml
    """
    from dataclasses import asdict

    from mtrain.data.preparing.check_report import check_data, format_report, list_warnings, require_usable
    from mtrain.data.preparing.inputs import check_corpora
    from mtrain.data.reading.digests import RawFiles
    from mtrain.data.scanning.scanner import CorpusScanner
    from mtrain.training.setup.prepare_run import require_metrics
    from mtrain.training.setup.resolve import resolve_config
    from mtrain.training.setup.tokenizer import existing_tokenizer, tokenizer_normalizers

    loaded = options.load_config(config, set_, run_dir)
    check_corpora(loaded.data)
    scanner = CorpusScanner(RawFiles(loaded.data), loaded.seed, check=True, strict=False, for_tokenizer=False)
    scanner.normalizers = partial(tokenizer_normalizers, loaded)
    loaded = resolve_config(loaded, scanner, load_weights=False).config
    findings = check_data(loaded.data, existing_tokenizer(loaded), scanner)
    bad_lines = loaded.data.bad_lines
    if json_:
        record = {**asdict(findings), "warnings": list_warnings(findings, bad_lines)}
        print_to_stdout(json.dumps(record, indent=1))
    else:
        print_to_stdout(terminal.wrap(format_report(findings, bad_lines), sys.stdout))
    try:
        require_metrics(loaded)
    except UsageError as error:
        log.warning("mtrain fit will need a package: %s", error)
    require_usable(findings)
    if bad_lines == "skip" or not any(counts.bad for counts in findings.sets.values()):
        terminal.suggest("next", fit_command(config, run_dir, set_))


def tokenize(
    config: options.ConfigFile,
    run_dir: options.RunDir = None,
    force: Annotated[bool, Option("--force", help="Replace an existing tokenizer.")] = False,
    set_: options.Set = None,
) -> None:
    """Learn the subword vocabulary of CONFIG.

    Trains SentencePiece on the training corpora and prints its model files. `mtrain fit` does the same if
    the run folder has no tokenizer yet.

    Examples:
        mtrain tokenize mine.yaml
        mtrain tokenize mine.yaml --force --set tokenizer.vocab_size=8000
    """
    from mtrain.data.preparing.inputs import check_corpora
    from mtrain.training.setup.tokenizer import tokenize as make_tokenizer

    loaded = options.load_config(config, set_, run_dir)
    check_corpora(loaded.data, test_sets=False)
    tokenizer = make_tokenizer(loaded, force)
    print_to_stdout("\n".join(map(str, tokenizer.files)))
    terminal.suggest("tokenizer saved; next", fit_command(config, run_dir, set_))


def prepare(
    config: options.ConfigFile,
    workers: Annotated[
        int | None,
        options.processes(
            help="Number of processes that check and encode, each on one core. By default one for each core, "
            "or, for small corpora (below 64 MiB to check, below 250,000 pairs to encode), a single one that "
            "uses all cores."
        ),
    ] = None,
    run_dir: options.RunDir = None,
    no_check: options.NoCheck = False,
    set_: options.Set = None,
) -> None:
    """Check and encode the corpora of CONFIG.

    Learns the tokenizer if there is none yet, and prints the folder of the encoded pairs. `mtrain fit` does
    the same before training. The same command resumes an interrupted encoding. With `data.folder`, several
    runs share the encoded pairs.

    Examples:
        mtrain prepare mine.yaml
        mtrain prepare mine.yaml --workers 8 --set data.folder=data/encoded
    """
    from mtrain.training.setup.prepare_run import prepare_only

    folder = prepare_only(options.load_config(config, set_, run_dir, no_check), workers)
    print_to_stdout(folder)
    terminal.suggest("data saved; next", fit_command(config, run_dir, set_))


def clean(
    config: options.ConfigFile,
    output: options.OutputFile = None,
    rejected: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="File for the rejected pairs, each after the reason; replaced and compressed like -o.",
        ),
    ] = None,
    workers: Annotated[
        int | None,
        options.processes(
            help="Number of processes that filter; by default one for each core, or one below 64 MiB."
        ),
    ] = None,
    set_: options.Set = None,
) -> None:
    """Write the training pairs of CONFIG that data.filters keeps.

    The output is one tab-separated file: source, target, and the further columns of tab-separated corpora.
    The log says how many pairs were rejected for each reason, with examples. `mtrain prepare` and `mtrain
    fit` apply the same filters.

    Examples:
        mtrain clean mine.yaml -o clean.tsv.gz --rejected rejected.tsv
        mtrain clean mine.yaml -o clean.tsv --set data.filters.max_ratio=2.5
    """
    from mtrain.data.clean import clean as clean_data
    from mtrain.data.preparing.inputs import check_corpora
    from mtrain.data.reading.files import input_files

    data = options.load_config(config, set_).data
    check_corpora(data, test_sets=False)
    inputs = [config, *input_files(data)]
    for file in (output, rejected):
        require_writable(file, inputs)
    shown = rejected is not None and is_stdout(rejected) and (output is None or is_stdout(output))
    if shown or (output and rejected and output.resolve() == rejected.resolve()):
        raise UsageError(f"{rejected}: -o and --rejected would write to the same place; give two files")
    with ExitStack() as stack:
        out = stack.enter_context(open_output(output))
        other = None if rejected is None else stack.enter_context(open_output(rejected))
        try:
            clean_data(data, out, other, workers, shows_progress=not is_on_screen(output))
        except BrokenPipeError:  # of stdout; the file must neither be missing nor incomplete without an error
            if file := next((file for file in (output, rejected) if file and not is_stdout(file)), None):
                terminal.discard_output()
                raise StorageError(f"{file}: not written, because the reader of stdout has exited") from None
            raise
    terminal.suggest("next", fit_command(config, None, set_))


def fit_command(config: Path, run_dir: str | None, set_: list[str] | None) -> str:
    """The command that trains with the same config."""
    same_run = [] if run_dir is None else ["--run-dir", run_dir]
    same_keys = [word for assignment in set_ or [] for word in ("--set", assignment)]
    return shlex.join(["mtrain", "fit", str(config), *same_run, *same_keys])
