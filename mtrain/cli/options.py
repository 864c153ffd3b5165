"""Arguments and options that several commands share."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

from typer import Argument, Option

from mtrain.cli.help import GENERAL
from mtrain.cli.terminal import restore_utf8
from mtrain.paths import path_of

# Groups of the options of long commands.
FILES, SEARCH, SAMPLING, SPEED, RESULTS = "Files", "Search", "Sampling", "Speed", "Results"
LANGUAGES = "Languages"

ConfigFile = Annotated[Path, Argument(metavar="CONFIG", help="Configuration file (YAML).")]
ModelFolder = Annotated[Path, Argument(metavar="MODEL", help="Run folder, model folder or checkpoint.")]
RunDir = Annotated[
    str | None, Option(metavar="FOLDER", help="Run folder to use instead of run_dir in CONFIG.")
]
InputFile = Annotated[
    Path | None,
    Option(
        "-i",
        "--input",
        metavar="FILE",
        help="Input file, one sentence per line; - is stdin.",
        rich_help_panel=FILES,
    ),
]
OutputFile = Annotated[
    Path | None,
    Option(
        "-o",
        "--output",
        metavar="FILE",
        help="Output file, replaced once it is complete; compressed if it ends in .gz or .zst.",
        rich_help_panel=FILES,
    ),
]
Ensemble = Annotated[
    list[str] | None,
    Option(metavar="MODEL", help="Further model of an ensemble; repeatable.", rich_help_panel=SEARCH),
]
BeamSize = Annotated[
    int | None,
    Option(min=1, max=128, metavar="N", help="Number of beams; 1 is greedy search.", rich_help_panel=SEARCH),
]
LengthPenalty = Annotated[
    float | None,
    Option(
        metavar="ALPHA",
        help="Scores are log-probabilities divided by length ** ALPHA.",
        rich_help_panel=SEARCH,
    ),
]
BatchTokens = Annotated[
    int | None,
    Option(
        min=1,
        metavar="N",
        help="Maximum batch size in padded source tokens times beams or samples.",
        rich_help_panel=SPEED,
    ),
]
From = Annotated[
    str | None,
    Option(
        "--from",
        metavar="LANG",
        help="Language of the source, for models with language tags.",
        rich_help_panel=LANGUAGES,
    ),
]
To = Annotated[
    str | None,
    Option(
        "--to",
        metavar="LANG",
        help="Language to translate into, for models with language tags.",
        rich_help_panel=LANGUAGES,
    ),
]
Json = Annotated[bool, Option("--json", help="Print JSON.", rich_help_panel=RESULTS)]
Set = Annotated[
    list[str] | None,
    Option(
        "--set",
        metavar="SECTION.KEY=VALUE",
        help="Override a config key or, for a trained MODEL, a decoding key; repeatable.",
        rich_help_panel=GENERAL,
    ),
]
Device = Annotated[
    str,
    Option(
        metavar="DEVICE",
        help="Device to compute on: auto, cpu, cuda, cuda:N, mps or xpu.",
        rich_help_panel=GENERAL,
    ),
]
NoCheck = Annotated[
    bool, Option("--no-check", help="Do not check the corpora before encoding them (data.check).")
]
Quiet = Annotated[bool, Option("--quiet", help="Print only warnings and errors.", rich_help_panel=GENERAL)]
Debug = Annotated[
    bool, Option("--debug", help="Print debug messages and tracebacks.", rich_help_panel=GENERAL)
]


def expand_home_in_paths(function: Callable[..., None]) -> None:
    """Expand `~` in all path arguments and options of a command. A shell expands it only at the beginning
    of a word, not in `--output=~/x`."""
    for annotation in get_type_hints(function, include_extras=True).values():
        type_, info, *_ = (*get_args(annotation), None, None)
        item_types = [each for part in (type_, *get_args(type_)) for each in (part, *get_args(part))]
        if info is not None and Path in item_types:
            info.parser = _typed_path


def _typed_path(value: Any) -> Path:
    # Click takes everything after a short option as its value: `=~/x` for `-o=~/x`.
    return path_of(value.removeprefix("=") if str(value).startswith("=~") else value)


def overrides(set_: list[str] | None, section: str = "", **options: object) -> list[str]:
    """The assignments of --set, followed by one for each option that was given."""
    given = {key: value for key, value in options.items() if value is not None}
    assignments = [
        *(set_ or []),
        *(f"{section}{key}={json.dumps(value, ensure_ascii=False)}" for key, value in given.items()),
    ]
    return [restore_utf8(assignment) for assignment in assignments]
