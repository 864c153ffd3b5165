"""Arguments and options that several commands share."""

import inspect
import json
import shlex
from collections.abc import Callable
from functools import partial, wraps
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_type_hints

from typer import Argument, BadParameter, Option

from mtrain.cli.console.help import GENERAL
from mtrain.cli.console.terminal import require_unicode, start_logging
from mtrain.errors import UsageError
from mtrain.paths import path_of

if TYPE_CHECKING:
    from mtrain.config.schema import Config

# Options of long commands, by group.
file = partial(Option, rich_help_panel="Files")
path = partial(file, metavar="FILE")
search = partial(Option, rich_help_panel="Search")
sampling = partial(Option, rich_help_panel="Sampling")
speed = partial(Option, rich_help_panel="Speed")
result = partial(Option, rich_help_panel="Results")
language = partial(Option, rich_help_panel="Languages", metavar="LANG")
general = partial(Option, rich_help_panel=GENERAL)

processes = partial(Option, min=1, max=1024, metavar="N")

ConfigFile = Annotated[Path, Argument(metavar="CONFIG", help="Configuration file (YAML).")]
ModelFolder = Annotated[Path, Argument(metavar="MODEL", help="Run folder, model folder or checkpoint.")]
RunDir = Annotated[
    str | None, Option(metavar="FOLDER", help="Run folder to use instead of run_dir in CONFIG.")
]
InputFile = Annotated[
    Path | None, path("-i", "--input", help="Input file, one sentence per line; - is stdin.")
]
OutputFile = Annotated[
    Path | None,
    path(
        "-o",
        "--output",
        help="Output file, replaced once it is complete; compressed if it ends in .gz or .zst.",
    ),
]
FurtherModels = Annotated[
    list[str] | None, search(metavar="MODEL", help="Further model of an ensemble; repeatable.")
]
BeamSize = Annotated[
    int | None, search(min=1, max=128, metavar="N", help="Number of beams; 1 is greedy search.")
]
LengthPenalty = Annotated[
    float | None,
    search(min=-10, max=10, metavar="ALPHA", help="Scores are log-probabilities divided by length ** ALPHA."),
]


def number_or_auto(text: str, largest: int = 10**15) -> int | str:
    """The value of an option that is a number from 1 to `largest`, or `auto`."""
    if text == "auto":
        return text
    if text.isdecimal() and len(text) <= len(str(largest)) and 1 <= int(text) <= largest:
        return int(text)
    raise BadParameter(f"{text[:40]}: expected a number from 1 to {largest}, or auto")


BatchTokens = Annotated[
    str | None,
    speed(
        parser=number_or_auto,
        metavar="N|auto",
        help="Maximum batch size in padded source tokens times beams or samples.",
    ),
]
Engine = Annotated[Literal["mtrain", "ctranslate2"], speed(help="Library that runs the search.")]
From = Annotated[
    str | None, language("--from", help="Language of the source, for models with language tags.")
]
To = Annotated[
    str | None, language("--to", help="Language to translate into, for models with language tags.")
]
Json = Annotated[bool, result("--json", help="Print JSON.")]
Set = Annotated[
    list[str] | None,
    general(
        "--set",
        metavar="SECTION.KEY=VALUE",
        help="Override a config key or, for a trained MODEL, a decoding key; repeatable.",
    ),
]
Device = Annotated[
    str, general(metavar="DEVICE", help="Device to compute on: auto, cpu, cuda, cuda:N, mps, xpu or xpu:N.")
]
NoCheck = Annotated[
    bool, Option("--no-check", help="Do not check the corpora before encoding them (data.check).")
]
_Quiet = Annotated[bool, general("--quiet", help="Print only warnings and errors.")]
_Debug = Annotated[bool, general("--debug", help="Print debug messages and tracebacks.")]


def with_logging(function: Callable[..., None]) -> Callable[..., None]:
    """A command with the options that all commands have, --quiet and --debug, which starts logging."""

    @wraps(function)
    def command(*, quiet: bool, debug: bool, **given: Any) -> None:
        start_logging(quiet, debug)
        function(**given)

    added = {"quiet": _Quiet, "debug": _Debug}
    signature = inspect.signature(function)
    parameters = [*signature.parameters.values()]
    for name, annotation in added.items():
        parameters.append(Parameter(name, Parameter.KEYWORD_ONLY, default=False, annotation=annotation))
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {**function.__annotations__, **added}
    return command


def expand_home_in_paths(function: Callable[..., None]) -> None:
    """Expand `~` in all path arguments and options of a command. A shell expands it only at the beginning
    of a word, not in `--output=~/x`."""
    for annotation in get_type_hints(function, include_extras=True).values():
        type_, info = get_args(annotation)[:2] or (None, None)
        item_types = [each for part in (type_, *get_args(type_)) for each in (part, *get_args(part))]
        if info is not None and Path in item_types:
            info.parser = _typed_path


def _typed_path(value: Any) -> Path:
    # Click takes everything after a short option as its value: `=x` for `-o=x`.
    return path_of(value.removeprefix("=") if isinstance(value, str) else value)


def overrides(set_: list[str] | None, section: str = "", **options: object) -> list[str]:
    """The assignments of --set, followed by one for each option that was given."""
    given = {key: value for key, value in options.items() if value is not None}
    own = (f"{section}{key}={json.dumps(value, ensure_ascii=False)}" for key, value in given.items())
    return [require_unicode(assignment) for assignment in (*(set_ or []), *own)]


def load_config(
    config: Path, set_: list[str] | None, run_dir: str | None = None, no_check: bool = False
) -> "Config":
    """The config that a command was given, with the values of its options. Raises UsageError for the config
    of a run that was moved, which would begin again in its old place."""
    from mtrain.checkpoint.model_info import has_run_config
    from mtrain.config.load import load_config as load

    assignments = [*overrides(set_, run_dir=run_dir), *["data.check=false"] * no_check]
    loaded = load(config, assignments)
    folder, is_chosen = config.parent, any(each.startswith("run_dir=") for each in assignments)
    is_of_run = config.name == "config.yaml" and has_run_config(folder)
    if is_of_run and not is_chosen and path_of(loaded.run_dir).resolve() != folder.resolve():
        cure = f"if it was moved, add {shlex.join(['--set', f'run_dir={folder}'])}"
        raise UsageError(f"{config}: belongs to a run that began in {loaded.run_dir}; {cure}")
    return loaded
