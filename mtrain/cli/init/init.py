"""`mtrain init`."""

import os
import re
import shlex
import sys
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from mtrain.cli.console import terminal
from mtrain.cli.console.output import is_stdout, open_output, print_to_stdout, require_writable
from mtrain.data import COMPRESSION
from mtrain.errors import UsageError
from mtrain.paths import path_of

if TYPE_CHECKING:
    from mtrain.cli.init.answers import Given
    from mtrain.config.new_config import NewConfig
    from mtrain.inspection.corpora import InspectedCorpus
    from mtrain.inspection.file_groups import Roles

contents_option = partial(Option, rich_help_panel="Contents of the files")
config_option = partial(Option, rich_help_panel="Config")


def init(
    files: Annotated[
        list[str],
        Argument(
            metavar="FILE...",
            help="Two text files with one sentence per line, source and target; or TSV, JSONL or Parquet "
            "files with both. May be compressed (.gz, .zst). Files with names such as val.en and test.en, "
            "also beside train.en, are used for validation and test.",
        ),
    ],
    source_lang: Annotated[
        str | None, contents_option(metavar="LANG", help="Source language, such as en or English.")
    ] = None,
    target_lang: Annotated[
        str | None, contents_option(metavar="LANG", help="Target language, such as de or German.")
    ] = None,
    source_column: Annotated[
        str | None,
        contents_option(
            metavar="COLUMN", help="Source column: its number from 0, its name in the header, or a field."
        ),
    ] = None,
    target_column: Annotated[
        str | None, contents_option(metavar="COLUMN", help="Target column: its number, name or field.")
    ] = None,
    validation: Annotated[
        list[str] | None,
        contents_option(metavar="FILE", help="Validation file; repeat it for source and target."),
    ] = None,
    test: Annotated[
        list[str] | None, contents_option(metavar="FILE", help="Test file; repeat it for source and target.")
    ] = None,
    max_minutes: Annotated[
        float | None,
        config_option(min=0, metavar="N", help="Minutes that training may take, 60 by default; 0: no limit."),
    ] = None,
    output: Annotated[
        Path | None,
        config_option(
            "-o",
            "--output",
            metavar="CONFIG",
            help="Config to write; by default named after the languages, such as en-de.yaml.",
        ),
    ] = None,
    force: Annotated[bool, config_option("--force", help="Replace an existing config.")] = False,
    yes: Annotated[bool, config_option("--yes", help="Ask nothing, and accept what is suggested.")] = False,
) -> None:
    """Write a config for your own files.

    Finds the languages, the columns and the number of pairs, and writes a commented config. In a terminal, it
    asks at most three questions. It recognizes languages in the names of files and columns and, with the
    extra `languages`, in the text.

    Examples:
        mtrain init train.en train.de
        mtrain init corpus.tsv --source-lang en --target-lang de -o mine.yaml
        mtrain init 1.jsonl 2.jsonl --validation dev.jsonl --max-minutes 600 --yes
    """
    if max_minutes is not None and not max_minutes <= 1e9:
        raise UsageError(f"--max-minutes {max_minutes}: must be at most 1000000000; 0 means no limit")
    from mtrain.cli.init.answers import Given
    from mtrain.inspection.files import require_files, without_notes
    from mtrain.storage.atomic import free_name

    codes = _code("--source-lang", source_lang), _code("--target-lang", target_lang)
    asks = not yes and sys.stdin.isatty() and sys.stderr.isatty()
    given = Given((source_column, target_column), codes, max_minutes, asks)
    names = [[_file_name(name) for name in group or []] for group in (files, validation, test)]
    names[0] = without_notes(names[0], codes)
    inputs = require_files(name for group in names for name in group)
    if output is not None:
        _require_new(output, force, inputs)
    new = _inspect(names, given)
    default = Path(f"{new.source_lang}-{new.target_lang}.yaml")
    file = output or default
    named = default if is_stdout(file) else file  # in the config
    run_dir = str(free_name(Path("runs") / named.stem))  # so that `fit` starts a new run
    _write(new._replace(file=shlex.quote(str(named)), run_dir=run_dir), file, force, inputs)


def _file_name(name: str) -> str:
    """A typed file name, with `~` expanded. Other names stay as typed, because the config contains them."""
    return terminal.require_unicode(str(path_of(name)) if name.startswith("~") else name)


def _code(option: str, language: str | None) -> str | None:
    """The code of a language that an option gives. It need not be a known one, but must look like one."""
    from mtrain.config.language_names import find_language

    code = language if language is None else find_language(language) or language
    if code is not None and not re.fullmatch(r"[A-Za-z]{2,3}([-_][^\W_]+)*", code):
        raise UsageError(f"{option} {code}: give a code such as en, or the English name of a language")
    return code


def _require_new(file: Path, force: bool, inputs: Sequence[Path]) -> None:
    """Raise UsageError if a config exists and must not be replaced, or cannot be at its path."""
    if not str(file).isprintable():
        problem = "the name of a config must be printable Unicode text"
        raise UsageError(f"{file}: {problem}; give another one with -o")
    if file.suffix.lower() in COMPRESSION:
        raise UsageError(f"{file}: a config cannot be compressed; give another name with -o")
    require_writable(file, inputs)
    if os.path.lexists(file) and not is_stdout(file) and not (force and file.is_file()):
        problem = "not a regular file; give another one with -o"
        if file.is_file():
            problem = "already exists; give another file with -o, or replace it with --force"
        raise UsageError(f"{file}: {problem}")


def _inspect(names: Sequence[Sequence[str]], given: "Given") -> "NewConfig":
    """Inspect the files for training, validation and test, and ask what they do not tell. The result has no
    file name and run folder yet."""
    from mtrain.cli.init.answers import settle_languages, settle_minutes, settle_sides, show_corpora
    from mtrain.config.new_config import NewConfig
    from mtrain.inspection.corpora import inspect_corpora, spec_of
    from mtrain.inspection.file_groups import find_siblings, names_of_test_sets
    from mtrain.inspection.files import sides_of

    roles = _roles(names, given.languages)
    if roles.train[0].kind == "text" and any(given.columns):
        raise UsageError("--source-column and --target-column need a TSV, JSONL or Parquet file first")
    sides = settle_sides(sides_of(roles.train[0], given.columns, given.languages), given)
    found = inspect_corpora(roles, find_siblings(roles.train[0]), sides)
    show_corpora(found, sides)
    (source, target), are_exchanged = settle_languages(sides, given)
    minutes = settle_minutes(given)

    def sized(corpora: "Sequence[InspectedCorpus]") -> list[tuple[dict[str, Any], int]]:
        return [(spec_of(each.group, each.sides.exchanged_if(are_exchanged)), each.pairs) for each in corpora]

    tests = zip(names_of_test_sets([corpus.group for corpus in found.test]), sized(found.test), strict=True)
    # Test sets must be readable; `check` warns about them.
    problems = (corpus.problem for corpus in (*found.train, *found.validation) if corpus.problem)
    return NewConfig(
        file="",
        run_dir="",
        source_lang=source,
        target_lang=target,
        train=sized(found.train),
        validation=sized(found.validation),
        test=dict(tests),
        max_minutes=minutes,
        skipped=" ".join(next(problems, "").split()),  # a file name may have line breaks
    )


def _roles(names: Sequence[Sequence[str]], languages: Collection[str | None]) -> "Roles":
    """What the files are for: as the options say, or else as their names say. Raises UsageError if some would
    not be used."""
    from mtrain.inspection.file_groups import Roles, divide_by_role
    from mtrain.inspection.files import groups_of

    train, validation, test = (groups_of(files, languages) for files in names)
    own = divide_by_role(train)
    for role, given, found in (("validation", validation, own.validation), ("test", test, own.test)):
        if given and found:
            unused = ", ".join(name for group in found for name in group.files)
            reason = f"the names say {role} and --{role} gives other files"
            cure = f"give these with --{role} as well, or leave them out"
            raise UsageError(f"{unused}: not used, because {reason}; {cure}")
    return Roles(own.train, validation or own.validation, test or own.test)


def _write(new: "NewConfig", file: Path, force: bool, inputs: Sequence[Path]) -> None:
    """Validate a config as other commands do, write it, and log what to do next. Raises UsageError if it
    would replace one of the `inputs`, a file found beside the inputs, or, unless `force`, another file."""
    from mtrain.config.load import validate
    from mtrain.config.new_config import new_config_text
    from mtrain.config.schema import Config
    from mtrain.config.yaml_io import parse_yaml
    from mtrain.data.reading.files import input_files

    text = new_config_text(new)
    data = validate(Config, parse_yaml(text), str(file)).data
    _require_new(file, force, [*inputs, *input_files(data)])
    with open_output(file) as config:
        config.write(text)
    if not is_stdout(file):
        print_to_stdout(file)
        terminal.suggest("next", f"mtrain check {new.file}", f"mtrain fit {new.file}")
