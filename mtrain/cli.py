"""The command line: parse, call one function, print. Heavy imports live inside the commands."""

import sys
import traceback
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from mtrain import __version__
from mtrain.errors import MtrainError, StorageError, UsageError
from mtrain.terminal import (
    input_lines,
    log_to_stderr,
    make_streams_usable,
    output,
    prompt,
    require_file,
    require_unicode,
    visible,
)

# ClickException, of click or of the copy that newer versions of Typer bring along.
_CommandLineError: Any = typer.BadParameter.__mro__[2]

app = typer.Typer(
    help="Train translation models: tokenize, fit, translate, evaluate.",
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file.")]
ModelFolder = Annotated[Path, typer.Argument(metavar="MODEL", help="A run or model folder.")]
Texts = Annotated[list[str] | None, typer.Argument(help="Sentences to translate.", show_default=False)]
RunDir = Annotated[str | None, typer.Option(metavar="DIR", help="Use this run folder.")]
Force = Annotated[bool, typer.Option("--force", help="Replace a tokenizer that is there.")]
Resume = Annotated[str, typer.Option(metavar="auto|never|CHECKPOINT", help="Go on with a run, or not.")]
Input = Annotated[Path | None, typer.Option("-i", "--input", metavar="FILE|-", help="Lines to translate.")]
Output = Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write to a file.")]
NBest = Annotated[int, typer.Option(min=1, max=128, help="Translations printed for each line.")]
BeamSize = Annotated[int | None, typer.Option(min=1, max=128, help="Hypotheses kept each step; 1: greedy.")]
LengthPenalty = Annotated[float | None, typer.Option(help="Scores are log-probability / length ** this.")]
BatchTokens = Annotated[int | None, typer.Option(min=1, help="Padded source tokens x beams of a batch.")]
Source = Annotated[Path | None, typer.Option(metavar="FILE", help="Lines to translate and score.")]
Reference = Annotated[list[Path] | None, typer.Option(metavar="FILE", help="References; repeatable.")]
Hypotheses = Annotated[Path | None, typer.Option(metavar="FILE", help="Score these, not the model's.")]
Metrics = Annotated[str, typer.Option(help="Any of bleu, chrf, ter, with commas.")]
Lowercase = Annotated[bool, typer.Option("--lowercase", help="Ignore case.")]
BleuTokenize = Annotated[str | None, typer.Option(help="sacreBLEU tokenizer, if not the target language's.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a key.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print warnings and errors only.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks and debug messages.")]


@app.command()
def tokenize(
    config: ConfigFile,
    run_dir: RunDir = None,
    force: Force = False,
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
    from mtrain.training.run import tokenize as make_tokenizer

    loaded = load_config(config, _with_run_dir(set_, run_dir))
    resolve_device(device)  # learning a vocabulary needs no GPU, but a wrong name is still a mistake
    check_corpora(loaded.data)
    tokenizer = make_tokenizer(loaded, force)
    with output(None) as out:
        out.writelines(f"{file}\n" for file in tokenizer.files)


@app.command()
def fit(
    config: ConfigFile,
    run_dir: RunDir = None,
    resume: Resume = "auto",
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
    text: Texts = None,
    input_file: Input = None,
    output_file: Output = None,
    beam_size: BeamSize = None,
    n_best: NBest = 1,
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
        require_file(input_file)
    for typed in text or []:
        require_unicode(typed)
    from mtrain.decoding.translate import WINDOW, Translator

    overrides = _decoding_overrides(set_, beam_size, length_penalty, batch_tokens)
    with output(output_file) as out:  # opened first: a place that cannot be written shows before any work
        translator = Translator.load(model, device, overrides)
        if n_best > translator.decoding.beam_size:
            raise UsageError(f"--n-best {n_best} needs a --beam-size of {n_best} or more")
        prompting = not text and input_file is None and sys.stdin.isatty()
        lines = text or (prompt() if prompting else input_lines(input_file))
        for best in translator.translate_lines(lines, window=1 if prompting else WINDOW):
            texts = [translation.text for translation in best[:n_best]]
            out.write("".join(f"{text}\n" for text in texts + [""] * (n_best - len(texts))))
            if prompting:
                out.flush()


@app.command()
def evaluate(
    model: ModelFolder,
    source: Source = None,
    reference: Reference = None,
    hypotheses: Hypotheses = None,
    metrics: Metrics = "bleu,chrf,ter",
    lowercase: Lowercase = False,
    bleu_tokenize: BleuTokenize = None,
    json_: Json = False,
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
            require_file(file)
    import json
    from dataclasses import asdict

    from mtrain.decoding.translate import Translator
    from mtrain.evaluate import configured_test_sets, evaluate_set, make_metrics, test_set_from_files

    of_tests = [assignment for assignment in set_ or [] if assignment.startswith("data.")]
    of_search = [assignment for assignment in set_ or [] if not assignment.startswith("data.")]
    overrides = _decoding_overrides(of_search, beam_size, length_penalty, batch_tokens)
    translator = Translator.load(model, device, overrides)
    scorers = make_metrics(metrics.lower().split(","), translator.target_lang, lowercase, bleu_tokenize)
    tests = (
        [test_set_from_files(source, reference, hypotheses)]
        if reference
        else configured_test_sets(model, of_tests)
    )
    results = {}
    with output(None) as out:
        for test in tests:
            scores, sentences = evaluate_set(test, translator, scorers), len(test.references[0])
            results[test.name] = {"sentences": sentences, "scores": [asdict(s) for s in scores]}
            if not json_:
                print(
                    f"{test.name} ({sentences} sentences)",
                    *(f"  {s.detail}" for s in scores),
                    sep="\n",
                    file=out,
                )
        if json_:
            print(json.dumps(results, indent=1), file=out)


def _with_run_dir(overrides: list[str] | None, run_dir: str | None) -> list[str]:
    import json

    return [
        *(overrides or []),
        *([] if run_dir is None else [f"run_dir={json.dumps(run_dir, ensure_ascii=False)}"]),
    ]


def _decoding_overrides(
    overrides: list[str] | None, beam_size: int | None, length_penalty: float | None, batch_tokens: int | None
) -> list[str]:
    given = {"beam_size": beam_size, "length_penalty": length_penalty, "batch_tokens": batch_tokens}
    options = [f"decoding.{key}={value}" for key, value in given.items() if value is not None]
    return [*(overrides or []), *options]


_debugging = False


def _start(quiet: bool, debug: bool) -> None:
    global _debugging
    _debugging = debug
    log_to_stderr(quiet, debug)


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
    with suppress(OSError):
        print(f"{'' if code > 128 else 'error: '}{visible(' '.join(message.split()))}", file=sys.stderr)
    sys.exit(code)


def main(arguments: Iterable[str] | None = None) -> NoReturn:
    """Run a command; every failure becomes one line on stderr and an exit code (see `mtrain.errors`)."""
    make_streams_usable()
    try:
        code: Any = app(
            list(sys.argv[1:] if arguments is None else arguments) or ["--help"], standalone_mode=False
        )
        if code == 130:  # Typer makes an exit code of Ctrl-C
            raise KeyboardInterrupt
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
        if (
            isinstance(error, MemoryError)
            or "OutOfMemory" in type(error).__name__
            or "can't allocate" in str(error)
        ):
            _exit("out of memory; lower training.micro_batch_tokens or decoding.batch_tokens", 8)
        if not _debugging:
            _exit(f"bug in mtrain: {type(error).__name__}: {error}; --debug shows where", 1)
        _exit("bug in mtrain", 1)
