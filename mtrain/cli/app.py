"""All commands in one application, and the exit code of each kind of failure."""

import errno
import logging
import sys
import traceback
import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any

import typer

from mtrain.cli import data, demo, info, interop, report, scoring, segmentation, serving, training
from mtrain.cli.console import terminal
from mtrain.cli.console.help import Program, add_command
from mtrain.cli.console.message_start import clear_bars, rank_prefix
from mtrain.cli.console.options import expand_home_in_paths, with_logging
from mtrain.cli.console.output import print_to_stdout
from mtrain.cli.evaluate import evaluate
from mtrain.cli.init import init
from mtrain.cli.translate import translate
from mtrain.distributed.launch import read_launch
from mtrain.errors import MtrainError, StorageError, UsageError, is_out_of_memory
from mtrain.invisible_characters import escape_control_characters
from mtrain.version import __version__

app = typer.Typer(
    cls=Program,
    rich_markup_mode=None,
    subcommand_metavar="COMMAND [ARGUMENTS]...",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
COMMANDS = {
    "Get started": (demo.demo, init.init),
    "Prepare data": (data.check, data.clean, data.tokenize, data.prepare),
    "Train": (training.plan, training.fit, training.average),
    "Translate": (
        translate.translate,
        serving.serve,
        serving.web,
        scoring.rerank,
        scoring.score,
        segmentation.segment,
    ),
    "Evaluate": (evaluate.evaluate, report.report, info.info),
    "Work with other programs": (interop.import_, interop.export),
}
FOR_RANKS = ("fit", "translate", "evaluate")  # the commands that torchrun can start
for group, functions in COMMANDS.items():
    for function in functions:
        expand_home_in_paths(function)
        add_command(app, group, with_logging(function))


def _print_version(requested: bool) -> None:
    if requested:
        print_to_stdout(f"mtrain {__version__}")
        raise typer.Exit


_Version = Annotated[
    bool,
    typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
]


@app.callback()
def _root(context: typer.Context, version: _Version = False) -> None:
    """Train translation models from parallel text, translate with them and evaluate them.

    `mtrain COMMAND --help` shows the options of a command and examples.
    """
    name = context.invoked_subcommand
    if read_launch().size > 1 and name not in FOR_RANKS:
        raise UsageError(f"mtrain {name} does not share its work among processes; run it without torchrun")


_commands: Any = typer.main.get_command(app)  # built once: a program may run several commands


def run(arguments: Sequence[str]) -> int:
    """Run a command and return its exit code. A failure is reported in one line on stderr.

    Raises KeyboardInterrupt after a stop signal, unless the command handled it.
    """
    terminal.make_streams_usable()
    try:
        with warnings.catch_warnings():
            if not sys.warnoptions:
                warnings.simplefilter("ignore")  # what libraries say to developers
            code: Any = _commands(list(arguments) or ["--help"], prog_name="mtrain", standalone_mode=False)
        if code == 130:  # how Typer returns a KeyboardInterrupt
            raise KeyboardInterrupt
        return code if isinstance(code, int) else 0
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):  # the reader of the help text has exited
            return 0
        raise
    except Exception as error:
        try:
            sys.stdout.flush()  # the results before the error
        except OSError:
            terminal.discard_output()
        message, exit_code = _describe(error)
        return _report(message, exit_code)


def _describe(error: Exception) -> tuple[str, int]:
    """The message and the exit code for an exception."""
    if isinstance(error, MtrainError):
        return str(error), error.exit_code
    if hasattr(error, "format_message"):  # a ClickException, of Click or of Typer's copy of it
        return _describe_usage(error), 2
    encoding = sys.getfilesystemencoding()
    if isinstance(error, UnicodeEncodeError) and error.encoding == encoding != "utf-8":
        return f"{error.object}: the locale's encoding cannot represent this path; set PYTHONUTF8=1", 6
    cause = error.__context__
    if isinstance(error, RuntimeError) and isinstance(cause, OSError) and cause.errno == errno.ELOOP:
        error = cause  # as `Path.resolve` reports links in a circle
    if isinstance(error, typer.Abort) and isinstance(cause, EOFError):
        error = cause
    if is_out_of_memory(error):
        return "out of memory; lower data.max_length in a new run, or decoding.batch_tokens to translate", 8
    if isinstance(error, OSError):
        return f"{error.filename or 'output'}: {error.strerror or error}", StorageError.exit_code
    return f"bug in mtrain: {type(error).__name__}: {error}; run again with --debug for the traceback", 1


def _describe_usage(error: Any) -> str:
    """The message for an error of Click. An unknown option is described as other unknown names are."""
    if hasattr(error, "possibilities"):
        near = f"did you mean {error.possibilities[0]}?" if error.possibilities else ""
        advice = near or f"{error.ctx.command_path} --help lists them"
        arguments = (each for each in error.ctx.command.params if each.param_type_name == "argument")
        if any(argument.metavar == "TEXT" for argument in arguments):
            advice += "; put -- before TEXT that begins with a hyphen"
        return f"{error.option_name}: no such option; {advice}"
    message: str = error.format_message()
    return message.replace("Value error, ", "")


def _report(message: str, code: int) -> int:
    if logging.getLogger("mtrain").isEnabledFor(logging.DEBUG):
        print(escape_control_characters(traceback.format_exc()), end="", file=sys.stderr)
    with suppress(OSError):
        line = escape_control_characters(" ".join(message.split()))
        kind = "" if code > 128 else "error: "  # above 128: stopped by a signal
        text = terminal.wrap(f"{rank_prefix()}{kind}{line}", sys.stderr)
        print(f"{clear_bars()}{text}", file=sys.stderr)
    return code
