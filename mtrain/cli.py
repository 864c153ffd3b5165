"""The command line: parse, call one function, print. Heavy imports live inside the commands."""

import logging
import os
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Annotated, Any, NoReturn

import typer

from mtrain import __version__
from mtrain.errors import MtrainError, StorageError, UsageError

# ClickException, of click or of the copy that newer versions of Typer bring along.
_CommandLineError: Any = typer.BadParameter.__mro__[2]

app = typer.Typer(
    help="Train translation models: tokenize, fit, translate, evaluate.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a key of the config; repeatable."),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print warnings and errors only.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks and debug messages.")]
ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file.", show_default=False)]
ModelFolder = Annotated[
    Path, typer.Argument(metavar="MODEL", help="A run or model folder.", show_default=False)
]
RunDir = Annotated[str | None, typer.Option("--run-dir", metavar="DIR", help="Use this run folder.")]
BeamSize = Annotated[
    int | None, typer.Option(min=1, max=128, help="Hypotheses kept at each step; 1: greedy.")
]
LengthPenalty = Annotated[
    float | None, typer.Option(min=-10, max=10, help="Scores are log-probability / length ** this.")
]
BatchTokens = Annotated[int | None, typer.Option(min=1, help="Padded source tokens x beams of a batch.")]


@app.command()
def tokenize(
    config: ConfigFile,
    run_dir: RunDir = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a tokenizer that is there.")] = False,
    set_: Set = None,
    device: Device = "auto",
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Learn the subword vocabulary of CONFIG (SentencePiece)."""
    _start(quiet, debug)
    from mtrain.config import load_config
    from mtrain.data.encode import check_corpora
    from mtrain.device import resolve_device
    from mtrain.training.run import prepare_tokenizer

    loaded = load_config(config, _with_run_dir(set_, run_dir))
    resolve_device(device)  # learning a vocabulary needs no GPU, but a wrong name is still a mistake
    check_corpora(loaded.data)
    tokenizer = prepare_tokenizer(loaded, force)
    for file in tokenizer.files:
        print(file)


@app.command()
def fit(
    config: ConfigFile,
    run_dir: RunDir = None,
    resume: Annotated[
        str, typer.Option(metavar="auto|never|CHECKPOINT", help="Continue an earlier run, or refuse to.")
    ] = "auto",
    set_: Set = None,
    device: Device = "auto",
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Train a Transformer on the corpora of CONFIG. Run again, it goes on where it stopped."""
    _start(quiet, debug)
    from mtrain.config import load_config

    loaded = load_config(config, _with_run_dir(set_, run_dir))
    from mtrain.training.loop import fit as fit_model

    fit_model(loaded, resume, device, quiet)


@app.command()
def translate(
    model: ModelFolder,
    text: Annotated[
        list[str] | None, typer.Argument(help="Sentences to translate.", show_default=False)
    ] = None,
    input_file: Annotated[
        Path | None, typer.Option("-i", "--input", metavar="FILE|-", help="Translate the lines of a file.")
    ] = None,
    output_file: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write here, not to stdout.")
    ] = None,
    beam_size: BeamSize = None,
    n_best: Annotated[
        int, typer.Option(min=1, max=128, help="Print this many translations of each line.")
    ] = 1,
    length_penalty: LengthPenalty = None,
    batch_tokens: BatchTokens = None,
    set_: Set = None,
    device: Device = "auto",
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Translate arguments, a file, a pipe, or what is typed at a prompt: a line out for each line in."""
    _start(quiet, debug)
    if text and input_file:
        raise UsageError("TEXT and --input were both given; give one of them")
    if input_file is not None and str(input_file) != "-":
        _require_file(input_file)
    from mtrain.decoding.translate import WINDOW, Translator

    overrides = _decoding_overrides(set_, beam_size, length_penalty, batch_tokens)
    translator = Translator.load(model, device, overrides)
    if n_best > translator.decoding.beam_size:
        raise UsageError(f"--n-best {n_best} needs a --beam-size of {n_best} or more")
    prompting = not text and input_file is None and sys.stdin.isatty()
    lines = text or (_prompt() if prompting else _input_lines(input_file))
    with _output(output_file) as out:
        for best in translator.translate_lines(lines, window=1 if prompting else WINDOW):
            texts = [translation.text for translation in best[:n_best]]
            out.write("".join(f"{text}\n" for text in texts + [""] * (n_best - len(texts))))
            if prompting:
                out.flush()


@app.command()
def evaluate(
    model: ModelFolder,
    source: Annotated[Path | None, typer.Option(metavar="FILE", help="Source lines to translate.")] = None,
    reference: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Reference translations; repeatable.")
    ] = None,
    hypotheses: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Score these translations instead of the model's.")
    ] = None,
    metrics: Annotated[str, typer.Option(help="Any of bleu, chrf, ter, with commas.")] = "bleu,chrf,ter",
    lowercase: Annotated[bool, typer.Option("--lowercase", help="Ignore case.")] = False,
    bleu_tokenize: Annotated[
        str | None, typer.Option(help="sacreBLEU tokenizer; by default the target language's.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    beam_size: BeamSize = None,
    length_penalty: LengthPenalty = None,
    batch_tokens: BatchTokens = None,
    set_: Set = None,
    device: Device = "auto",
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Score MODEL on its config's test sets, or on given files, by sacreBLEU: BLEU, chrF, TER."""
    _start(quiet, debug)
    if (source is not None or hypotheses is not None) != bool(reference) or (source and hypotheses):
        raise UsageError("give --reference with either --source or --hypotheses, or none of them")
    for file in (source, hypotheses, *(reference or [])):
        if file is not None:
            _require_file(file)
    import json
    from dataclasses import asdict

    from mtrain.decoding.translate import Translator
    from mtrain.evaluate import configured_test_sets, evaluate_set, make_metrics, test_set_from_files

    overrides = _decoding_overrides(set_, beam_size, length_penalty, batch_tokens)
    translator = Translator.load(model, device, overrides)
    scorers = make_metrics(metrics.lower().split(","), translator.target_lang, lowercase, bleu_tokenize)
    tests = [test_set_from_files(source, reference, hypotheses)] if reference else configured_test_sets(model)
    results = {}
    for test in tests:
        scores = evaluate_set(test, translator, scorers)
        results[test.name] = {"sentences": len(test.references[0]), "scores": [asdict(s) for s in scores]}
        if not json_:
            print(f"{test.name} ({len(test.references[0])} sentences)")
            for result in scores:
                print(f"  {result.detail}", flush=True)
    if json_:
        print(json.dumps(results, indent=1))


def _with_run_dir(overrides: list[str] | None, run_dir: str | None) -> list[str]:
    import json

    return [*(overrides or []), *([] if run_dir is None else [f"run_dir={json.dumps(run_dir)}"])]


def _decoding_overrides(
    overrides: list[str] | None, beam_size: int | None, length_penalty: float | None, batch_tokens: int | None
) -> list[str]:
    given = {"beam_size": beam_size, "length_penalty": length_penalty, "batch_tokens": batch_tokens}
    options = [f"decoding.{key}={value}" for key, value in given.items() if value is not None]
    return [*(overrides or []), *options]


def _require_file(path: Path) -> None:
    from mtrain.errors import DataError

    if not path.is_file():
        raise DataError(f"{path}: {'not a file' if path.exists() else 'no such file'}")


def _input_lines(path: Path | None) -> Iterator[str]:
    from mtrain.data.corpus import clean_lines, decode_lines, read_lines

    if path is None or str(path) == "-":
        return clean_lines(decode_lines(sys.stdin.buffer, "<stdin>"))
    return clean_lines(read_lines(path))


def _prompt() -> Iterator[str]:
    import readline  # noqa: F401  (line editing and history for input())

    print("Type a sentence and Enter; Ctrl-D ends.", file=sys.stderr)
    while True:
        try:
            yield input("> ")
        except EOFError:
            print(file=sys.stderr)
            return


@contextmanager
def _output(path: Path | None) -> Iterator[IO[str]]:
    """stdout, or a file that takes its name only when it is complete."""
    if path is None:
        try:
            yield sys.stdout
            sys.stdout.flush()
        except (
            BrokenPipeError
        ):  # whoever read our output has gone: no failure, but Python must not flush at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", newline="\n") as stream:
            yield stream
        temporary.replace(path)
    except OSError as error:
        raise StorageError(f"{path}: cannot write: {error.strerror}") from None
    finally:
        temporary.unlink(missing_ok=True)


_debugging = False


def _start(quiet: bool, debug: bool) -> None:
    """Send log messages to stderr, around any progress bar."""
    global _debugging
    _debugging = debug
    from tqdm import tqdm

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            prefix = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
            tqdm.write(prefix + _visible(self.format(record)), file=sys.stderr)

    logger = logging.getLogger("mtrain")
    logger.handlers = [Handler()]
    logger.setLevel(logging.DEBUG if debug else logging.WARNING if quiet else logging.INFO)
    if quiet or not sys.stderr.isatty():
        os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"


def _visible(text: str) -> str:
    """Text from files may hold control characters; a terminal must not obey them."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def _version(value: bool) -> None:
    if value:
        print(f"mtrain {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def _exit(message: str, code: int) -> NoReturn:
    if _debugging:
        traceback.print_exc()
    print(f"{'' if code > 128 else 'error: '}{_visible(message)}", file=sys.stderr)
    sys.exit(code)


def main(arguments: Iterable[str] | None = None) -> NoReturn:
    """Run a command; every failure becomes one line on stderr and an exit code (see `mtrain.errors`)."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace")  # type: ignore[union-attr]
    try:
        code: Any = app(list(arguments) if arguments is not None else None, standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except MtrainError as error:
        _exit(str(error), error.exit_code)
    except _CommandLineError as error:
        _exit(error.format_message(), 2)
    except (KeyboardInterrupt, typer.Abort):
        _exit("stopped by SIGINT", 130)
    except OSError as error:
        _exit(f"{error.filename or 'output'}: {error.strerror or error}", StorageError.exit_code)
    except Exception as error:
        if not _debugging:
            _exit(f"bug in mtrain: {type(error).__name__}: {error}; --debug shows where", 1)
        _exit("bug in mtrain", 1)
