"""The command line: parse, call one function, print. Heavy imports live inside the commands."""

import json
import logging
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer
from typer import Argument, Option

from mtrain import __version__
from mtrain.cli import terminal
from mtrain.errors import MtrainError, StorageError, UsageError, is_out_of_memory

# ClickException, of click or of the copy that newer versions of Typer bring along.
_CommandLineError: Any = typer.BadParameter.__mro__[2]

HELP = {"help_option_names": ["-h", "--help"]}
app = typer.Typer(add_completion=False, rich_markup_mode=None, context_settings=HELP)

# What several commands take.
File = Path | None
ConfigFile = Annotated[Path, Argument(metavar="CONFIG", help="A YAML file.")]
ModelFolder = Annotated[Path, Argument(metavar="MODEL", help="A run or model folder.")]
RunDir = Annotated[str | None, Option(metavar="DIR", help="Use this run folder.")]
BeamSize = Annotated[int | None, Option(min=1, max=128, help="Hypotheses kept each step; 1: greedy.")]
LengthPenalty = Annotated[float | None, Option(help="Scores are log-probability / length ** this.")]
BatchTokens = Annotated[int | None, Option(min=1, help="Padded source tokens x beams of a batch.")]
Set = Annotated[list[str] | None, Option("--set", metavar="SECTION.KEY=VALUE", help="Override a key.")]
Device = Annotated[str, Option(help="auto, cpu, cuda or cuda:N.")]
Quiet = Annotated[bool, Option("--quiet", help="Print warnings and errors only.")]
ExportFormat = Literal["marian", "ctranslate2"]
Quantization = Literal["int8", "int8_float32", "float16", "bfloat16"]
Debug = Annotated[bool, Option("--debug", help="Show tracebacks and debug messages.")]


@app.command()
def tokenize(
    config: ConfigFile,
    run_dir: RunDir = None,
    force: Annotated[bool, Option("--force", help="Replace a tokenizer that is there.")] = False,
    set_: Set = None,
    device: Device = "auto",
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Learn the subword vocabulary of CONFIG (SentencePiece)."""
    terminal.log_to_stderr(quiet, debug)
    from mtrain.config.load import load_config
    from mtrain.data.encode import check_corpora
    from mtrain.device import resolve_device
    from mtrain.training.run_folder import tokenize as make_tokenizer

    loaded = load_config(config, _overrides(set_, run_dir=run_dir))
    resolve_device(device)  # learning a vocabulary needs no GPU, but a wrong name is still a mistake
    check_corpora(loaded.data)
    tokenizer = make_tokenizer(loaded, force)
    with terminal.output() as out:
        out.writelines(f"{file}\n" for file in tokenizer.files)


@app.command()
def check(
    config: ConfigFile,
    run_dir: RunDir = None,
    json_: Annotated[bool, Option("--json", help="Print JSON.")] = False,
    set_: Set = None,
    device: Device = "auto",
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Look at the data of CONFIG before training: counts, leaks, duplicates, suspicious pairs, a verdict."""
    terminal.log_to_stderr(quiet, debug)
    from dataclasses import asdict

    from mtrain.config.load import load_config
    from mtrain.data.check import check_data
    from mtrain.data.check_report import report_of, warnings_of
    from mtrain.data.encode import check_corpora
    from mtrain.device import resolve_device
    from mtrain.training.init_from import resolved
    from mtrain.training.run_folder import existing_tokenizer

    loaded, _ = resolved(load_config(config, _overrides(set_, run_dir=run_dir)))
    resolve_device(device)  # no work for it, but a wrong name is a mistake here too
    check_corpora(loaded.data)
    findings = check_data(loaded.data, existing_tokenizer(loaded))
    with terminal.output() as out:
        if json_:
            print(json.dumps({**asdict(findings), "warnings": warnings_of(findings)}, indent=1), file=out)
        else:
            print(terminal.visible(report_of(findings)), file=out)


@app.command()
def fit(
    config: ConfigFile,
    run_dir: RunDir = None,
    resume: Annotated[str, Option(metavar="auto|never|CHECKPOINT", help="Where to go on.")] = "auto",
    allow_data_change: Annotated[
        bool, Option("--allow-data-change", help="Go on although the corpus is another.")
    ] = False,
    set_: Set = None,
    device: Device = "auto",
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Train a Transformer on the corpora of CONFIG. Run again, it goes on where it stopped."""
    terminal.log_to_stderr(quiet, debug)
    from mtrain.config.load import load_config

    loaded = load_config(config, _overrides(set_, run_dir=run_dir))
    from mtrain.training.loop import fit as fit_model

    fit_model(loaded, resume, device, quiet, allow_data_change)


@app.command()
def translate(
    model: ModelFolder,
    text: Annotated[list[str] | None, Argument(help="Sentences to translate.", show_default=False)] = None,
    input_file: Annotated[File, Option("-i", "--input", metavar="FILE|-", help="Lines to translate.")] = None,
    output_file: Annotated[File, Option("-o", "--output", metavar="FILE", help="Write to a file.")] = None,
    go_on: Annotated[bool, Option("--continue", help="Go on with what -o began.")] = False,
    beam_size: BeamSize = None,
    n_best: Annotated[int, Option(min=1, max=1024, help="Translations printed for each line.")] = 1,
    length_penalty: LengthPenalty = None,
    batch_tokens: BatchTokens = None,
    ensemble: Annotated[list[str] | None, Option(metavar="MODEL", help="Decode with this too.")] = None,
    prefix: Annotated[File, Option(metavar="FILE", help="What each line's translation begins with.")] = None,
    sample: Annotated[bool, Option("--sample", help="Draw at random instead of searching.")] = False,
    temperature: Annotated[float | None, Option(help="Below 1 the likely grow likelier.")] = None,
    top_k: Annotated[int | None, Option(min=0, help="Draw from so many likeliest tokens.")] = None,
    top_p: Annotated[float | None, Option(help="Draw from tokens of so much probability.")] = None,
    seed: Annotated[int | None, Option(min=0, help="Of what is drawn.")] = None,
    scores: Annotated[bool, Option("--scores", help="Add the score, after a tab.")] = False,
    alignments: Annotated[bool, Option("--alignments", help="Add word alignments i-j.")] = False,
    json_: Annotated[bool, Option("--json", help="Print a JSON object a line.")] = False,
    set_: Set = None,
    device: Device = "auto",
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Translate arguments, a file, a pipe, or what is typed at a prompt: a line out for each line in."""
    terminal.log_to_stderr(quiet, debug)
    if text and input_file:
        raise UsageError("TEXT and --input were both given; give one of them")
    if go_on and output_file is None:
        raise UsageError("--continue needs the -o FILE that it goes on with")
    for file in (input_file, prefix):
        if file is not None:
            terminal.require_file(file)
    if prefix == Path("-"):
        raise UsageError("--prefix -: give a file")
    if output_file is not None:
        terminal.require_folder_of(output_file)
        terminal.require_other_file(output_file, (input_file, prefix))
    if go_on and prefix is not None and not prefix.is_file():
        raise UsageError("--continue needs a --prefix that can be read again: a file, no pipe")
    prompted = not text and input_file is None and sys.stdin.isatty()
    if prompted and (output_file or prefix or scores or alignments or json_):
        raise UsageError("nothing to translate; give TEXT, --input, or a pipe")
    typed = [terminal.require_unicode(sentence) for sentence in text or []]
    drawn = any(assignment.startswith("decoding.samples=") for assignment in set_ or [])
    given = {
        "samples": n_best if sample and not drawn else None,
        "beam_size": beam_size,
        "length_penalty": length_penalty,
        "batch_tokens": batch_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
    }
    from mtrain.cli.output import answer_lines
    from mtrain.decoding.translate import Translator
    from mtrain.storage.atomic import sha256

    overrides = _overrides(set_, "decoding.", **given)
    translator = Translator.load(model, device, overrides, ensemble or ())
    if prompted:
        from mtrain.cli.prompt import Prompt

        Prompt(translator, n_best).run()
        return
    lines = iter(typed) if typed else terminal.input_lines(input_file or Path("-"))
    prefixes = terminal.input_lines(prefix) if prefix else None

    def answers(rest: Iterable[str], start: int = 0) -> Iterator[str]:
        begins = None if prefixes is None else islice(prefixes, start, None)
        for best in translator.stream(rest, n_best, alignments, begins, start, scored=scores or json_):
            yield best.as_json() if json_ else best.answer(n_best, scores, alignments)

    job = {
        "model": translator.fingerprint,
        "decoding": translator.decoding.model_dump(mode="json", exclude={"batch_tokens", "workers"}),
        "prefix": None if prefix is None else sha256(prefix) if prefix.is_file() else "a pipe",
        "form": [n_best, scores, alignments, json_],
        "lines_each": 1 if json_ else n_best,
    }
    answer_lines(lines, answers, output_file, job, go_on)


@app.command()
def score(
    model: ModelFolder,
    source: Annotated[Path, Option("-i", "--input", metavar="FILE", help="Source lines.")],
    target: Annotated[Path, Option(metavar="FILE", help="Their translations.")],
    ensemble: Annotated[list[str] | None, Option(metavar="MODEL", help="Score with this too.")] = None,
    batch_tokens: BatchTokens = None,
    json_: Annotated[bool, Option("--json", help="Print a JSON object a line, with the tokens.")] = False,
    set_: Set = None,
    device: Device = "auto",
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Score given translations: log-probability (nats), tokens, and the log-probability of each token."""
    terminal.log_to_stderr(quiet, debug)
    for file in (source, target):
        if str(file) == "-":
            raise UsageError("score reads files, not stdin")
        terminal.require_file(file)
    from mtrain.config.corpora import TextCorpus
    from mtrain.data.corpus import clean, read_corpus
    from mtrain.decoding.score import score_pairs
    from mtrain.decoding.translate import Translator

    translator = Translator.load(
        model, device, _overrides(set_, "decoding.", batch_tokens=batch_tokens), ensemble or ()
    )
    pairs = clean(read_corpus(TextCorpus(source=str(source), target=str(target))))
    with terminal.output() as out:
        for scored in score_pairs(translator, pairs):
            out.write(scored.as_json() if json_ else scored.line())


@app.command()
def evaluate(
    model: ModelFolder,
    source: Annotated[File, Option(metavar="FILE", help="Lines to translate and score.")] = None,
    reference: Annotated[list[Path] | None, Option(metavar="FILE", help="References; repeatable.")] = None,
    hypotheses: Annotated[File, Option(metavar="FILE", help="Score these, not the model's.")] = None,
    metrics: Annotated[str, Option(help="Any of bleu, chrf, ter, with commas.")] = "bleu,chrf,ter",
    lowercase: Annotated[bool, Option("--lowercase", help="Ignore case.")] = False,
    bleu_tokenize: Annotated[str | None, Option(help="Another sacreBLEU tokenizer than the default.")] = None,
    json_: Annotated[bool, Option("--json", help="Print JSON.")] = False,
    beam_size: BeamSize = None,
    length_penalty: LengthPenalty = None,
    batch_tokens: BatchTokens = None,
    set_: Set = None,
    device: Device = "auto",
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Score MODEL on its config's test sets, or on given files, by sacreBLEU: BLEU, chrF, TER."""
    terminal.log_to_stderr(quiet, debug)
    if (source is not None or hypotheses is not None) != bool(reference) or (source and hypotheses):
        raise UsageError("give --reference with either --source or --hypotheses, or none of them")
    from mtrain.decoding.translate import Translator
    from mtrain.evaluation.evaluate import configured_test_sets, evaluate_set, test_set_from_files
    from mtrain.evaluation.metrics import make_metrics

    of_tests = [assignment for assignment in set_ or [] if assignment.startswith("data.")]
    if reference and of_tests:
        raise UsageError(f"--set {of_tests[0]}: files were given, so no test set of the config is read")
    given = [test_set_from_files(source, reference, hypotheses)] if reference else None
    of_search = [assignment for assignment in set_ or [] if not assignment.startswith("data.")]
    search = {"beam_size": beam_size, "length_penalty": length_penalty, "batch_tokens": batch_tokens}
    translator = Translator.load(model, device, _overrides(of_search, "decoding.", **search))
    scorers = make_metrics(metrics.lower().split(","), translator.target_lang, lowercase, bleu_tokenize)
    results = {}
    with terminal.output() as out:
        for test in given or configured_test_sets(model, of_tests):
            scores, sentences = evaluate_set(test, translator, scorers), len(test.references[0])
            results[test.name] = {"sentences": sentences, "scores": [score._asdict() for score in scores]}
            if not json_:
                print(f"{test.name} ({sentences} sentences)", file=out)
                out.writelines(f"  {score.detail}\n" for score in scores)
        if json_:
            print(json.dumps(results, indent=1), file=out)


@app.command("import")
def import_(
    source: Annotated[
        str, Argument(metavar="SOURCE", help="A MarianMT model: a folder, or a name on the hub.")
    ],
    out: Annotated[Path, Argument(metavar="MODEL", help="The model folder to make.")],
    set_: Set = None,
    device: Device = "auto",
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Make a model folder of a MarianMT model of Hugging Face's, to translate with or to train on."""
    terminal.log_to_stderr(quiet, debug)
    from mtrain.device import resolve_device
    from mtrain.interop.marian import import_marian

    resolve_device(device)  # no work for it, but a wrong name is a mistake here too
    import_marian(source, out, set_ or ())


@app.command()
def export(
    model: ModelFolder,
    out: Annotated[Path, Argument(metavar="OUT", help="The folder to make.")],
    format: Annotated[ExportFormat, Option(help="The program that is to load it.")],
    quantization: Annotated[Quantization | None, Option(help="Of CTranslate2's weights.")] = None,
    input_file: Annotated[
        File, Option("-i", "--input", metavar="FILE|-", help="Lines to compare by.")
    ] = None,
    set_: Set = None,
    device: Device = "auto",
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Write MODEL for Hugging Face's MarianMTModel or for CTranslate2, and compare what both say."""
    terminal.log_to_stderr(quiet, debug)
    if quantization is not None and format != "ctranslate2":
        raise UsageError("--quantization is for --format ctranslate2")
    if input_file is not None:
        terminal.require_file(input_file)
    from mtrain.device import resolve_device
    from mtrain.interop.export import export_model

    resolve_device(device)
    texts = list(terminal.input_lines(input_file)) if input_file else []
    lines = export_model(model, out, format, quantization, texts, set_ or ())
    with terminal.output() as out_stream:
        out_stream.writelines(f"{terminal.visible(line)}\n" for line in lines)


def _overrides(set_: list[str] | None, section: str = "", **options: object) -> list[str]:
    """What --set gives, and after it the options that stand for a --set of their own."""
    given = {key: value for key, value in options.items() if value is not None}
    return [
        *(set_ or []),
        *(f"{section}{key}={json.dumps(value, ensure_ascii=False)}" for key, value in given.items()),
    ]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"mtrain {__version__}")
        raise typer.Exit


Version = Annotated[bool, Option("--version", callback=_version, is_eager=True, help="Print the version.")]


@app.callback()
def _root(version: Version = False) -> None:
    """Train translation models: tokenize, fit, translate, evaluate."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command; every failure becomes one line on stderr and an exit code (see `mtrain.errors`)."""
    try:
        with failures_as_exits():
            given = sys.argv[1:] if arguments is None else arguments
            code: Any = app(list(given) or ["--help"], standalone_mode=False)
            if code == 130:  # Typer makes an exit code of Ctrl-C
                raise KeyboardInterrupt
            sys.exit(code if isinstance(code, int) else 0)
    except _CommandLineError as error:
        _exit(error.format_message(), 2)
    except Exception as error:
        _exit(f"bug in mtrain: {type(error).__name__}: {error}; --debug shows where", 1)


@contextmanager
def failures_as_exits() -> Iterator[None]:
    """Turn a failure that is no bug into a line on stderr and SystemExit with its exit code; write UTF-8."""
    terminal.make_streams_usable()
    try:
        yield
    except MtrainError as error:
        _exit(str(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        _exit("stopped by SIGINT", 130)
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):  # who read the help has gone: no failure
            sys.exit(0)
        raise
    except OSError as error:
        _exit(f"{error.filename or 'output'}: {error.strerror or error}", StorageError.exit_code)
    except Exception as error:
        if is_out_of_memory(error):
            _exit("out of memory; lower training.micro_batch_tokens or decoding.batch_tokens", 8)
        raise


def _exit(message: str, code: int) -> NoReturn:
    if logging.getLogger("mtrain").isEnabledFor(logging.DEBUG):
        traceback.print_exc()
    with suppress(OSError):
        line = terminal.visible(" ".join(message.split()))
        print(line if code > 128 else f"error: {line}", file=sys.stderr)
    sys.exit(code)
