"""The help texts: commands and options in groups, and examples at the end.

Typer's own help with rich takes 0.1 s longer and needs most of 80 columns for borders and empty columns.
"""

import inspect
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import IO, Any

import typer
from typer.core import TyperCommand, TyperGroup

from mtrain.errors import UsageError

GENERAL = "General options"
_WIDEST_NAME = 30  # columns; the help of an option with a longer name starts on the next line
_FILES = {"FILE", "FOLDER", "MODEL"}  # the metavar of an option for a file, which is given once
_FEW = 8  # up to so many options of a command are not divided into groups
_EXAMPLES = "\n\nExamples:\n"  # what follows in the docstring of a command
_Row = tuple[str, str]  # a name and its help


def uses_color(stream: IO[str]) -> bool:
    """Whether to write styled text to a stream: if it is a terminal and TERM is not dumb, or if FORCE_COLOR
    is set; never if NO_COLOR is."""
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or (stream.isatty() and os.environ.get("TERM") != "dumb")


def add_command(app: typer.Typer, group: str, function: Callable[..., None]) -> None:
    """Add a command whose docstring is its help. The lines below `Examples:` are its examples."""
    name = function.__name__.rstrip("_")
    help_, _, examples = inspect.cleandoc(function.__doc__ or "").partition(_EXAMPLES)
    epilog = inspect.cleandoc(examples)
    app.command(name, cls=Command, help=help_, epilog=epilog, rich_help_panel=group)(function)


class _Help:
    """Writes usage, options and examples of a command or of the whole program."""

    def get_help(self, context: Any) -> str:
        context.color = uses_color(sys.stdout)  # how Click then prints the returned text
        return super().get_help(context)  # type: ignore[misc, no-any-return]

    def format_options(self, context: Any, formatter: Any) -> None:
        arguments, options = [], []
        for parameter in self.get_params(context):  # type: ignore[attr-defined]
            if parameter.param_type_name == "argument":
                arguments.append((parameter.metavar, parameter.help or ""))
            else:
                name, help_ = parameter.get_help_record(context)
                group = getattr(parameter, "rich_help_panel", None)  # --help has none
                is_help = parameter.name == "help" and isinstance(self, TyperCommand)
                options.append((group or (GENERAL if is_help else "Options"), (name, help_)))
        _write_groups(formatter, {"Arguments": arguments, **grouped(options)})

    def format_epilog(self, _: Any, formatter: Any) -> None:
        if examples := self.epilog:  # type: ignore[attr-defined]
            with formatter.section(typer.style("Examples", bold=True)):
                for line in examples.splitlines():
                    formatter.write(f"{'':{formatter.current_indent}}{line}\n")


class Command(_Help, TyperCommand):
    """A command whose help has its options in groups and its examples. A file can be given only once where
    one is expected: the last one would be used."""

    def parse_args(self, context: Any, args: list[str]) -> list[str]:
        _, _, order = self.make_parser(context).parse_args(list(args))
        for option, count in Counter(order).items() if not context.resilient_parsing else ():
            if count > 1 and option.metavar in _FILES and not getattr(option, "multiple", True):
                raise UsageError(f"{option.opts[-1]}: given {count} times; give it once")
        return super().parse_args(context, args)

    def collect_usage_pieces(self, context: Any) -> list[str]:
        arguments: list[Any] = [p for p in self.get_params(context) if p.param_type_name == "argument"]
        shown = [name if p.required else f"[{name}]" for p in arguments if (name := p.metavar)]
        repeated = ["..." if p.nargs != 1 and not p.metavar.endswith("...") else "" for p in arguments]
        return ["[OPTIONS]", *map("".join, zip(shown, repeated, strict=True))]


class Program(_Help, TyperGroup):
    """All commands. Their list is grouped as well."""

    def resolve_command(self, context: Any, args: list[str]) -> Any:
        """As in Typer, but the error also says what to do without a similar name."""
        name = args[0]
        if name in self.commands or name.startswith("-") or context.resilient_parsing:
            return super().resolve_command(context, args)
        near = get_close_matches(name, self.commands, n=1)
        advice = f"did you mean {near[0]}?" if near else "mtrain --help lists the commands"
        raise UsageError(f"{name}: no such command; {advice}")

    def format_options(self, context: Any, formatter: Any) -> None:
        groups: dict[str, list[_Row]] = {}
        command: Any
        for name, command in self.commands.items():
            purpose = command.get_short_help_str(limit=1000)
            groups.setdefault(command.rich_help_panel, []).append((name, purpose))
        _write_groups(formatter, groups)
        super().format_options(context, formatter)


def grouped(options: Sequence[tuple[str, _Row]]) -> dict[str, list[_Row]]:
    """The names and helps of options by their groups, the general ones last. A few options form one group."""
    count = sum(group != GENERAL for group, _ in options)
    groups: dict[str, list[_Row]] = {}
    for group, row in sorted(options, key=lambda option: option[0] == GENERAL):
        groups.setdefault("Options" if group != GENERAL and count <= _FEW else group, []).append(row)
    return groups


def _write_groups(formatter: Any, groups: dict[str, list[_Row]]) -> None:
    """Write lists of names and their help, all aligned at the same column."""
    names = [name for rows in groups.values() for name, _ in rows]
    width = max(len(name) for name in names if len(name) <= _WIDEST_NAME)
    for group, rows in groups.items():
        if rows:
            with formatter.section(typer.style(group, bold=True)):
                aligned = [(name.ljust(width), _in_words(help_)) for name, help_ in rows]
                formatter.write_dl(aligned, _WIDEST_NAME)


def _in_words(help_: str) -> str:
    """The help of an option with its range in words, and without the escapes of some versions of Typer."""
    help_ = help_.replace("\\[", "[")
    help_ = re.sub(r"(\d+)<=x<=(\d+)", r"\1 to \2", help_)
    return re.sub(r"x>=(\d+)", r"at least \1", help_)
