"""The help of each command: groups, examples, width and style."""

import re
import shlex
from typing import Any

import pytest
import typer.main

from mtrain.cli.app import app

PROGRAM: Any = typer.main.get_command(app)
COMMANDS = PROGRAM.commands


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_are_shown_and_can_be_parsed(mtrain, name):
    examples = COMMANDS[name].epilog.splitlines()
    assert any(example.startswith(f"mtrain {name} ") or example == f"mtrain {name}" for example in examples)
    _, shown, _ = mtrain(name, "--help")
    assert shown.endswith("\nExamples:\n" + "".join(f"  {example}\n" for example in examples))
    for example in examples:
        words = shlex.split(example.split("mtrain ", 1)[1])
        COMMANDS[words[0]].make_context(words[0], words[1:])  # raises if they are wrong


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_fits_the_terminal_and_is_complete(mtrain, monkeypatch, name, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    _, shown, _ = mtrain(*[name] * bool(name), "--help")
    assert max(map(len, shown.splitlines())) <= columns
    without_spaces = "".join(shown.split())
    for help_ in [p.help for p in COMMANDS[name].params] if name else ["Split text into", "or join them."]:
        assert "".join(help_.split()) in without_spaces, help_


def test_commands_and_the_options_of_long_commands_are_grouped(mtrain):
    _, shown, _ = mtrain("--help")
    assert re.search(r"\nTrain:\n  plan .*\n  fit .*\n", shown) and "\nTranslate:\n  translate" in shown
    _, shown, _ = mtrain("translate", "--help")
    groups = re.findall(r"^(\w.*):$", shown, re.MULTILINE)
    expected = ["Arguments", "Files", "Languages", "Search", "Results", "Speed", "Sampling"]
    expected += ["General options", "Examples"]
    assert groups == expected
    _, shown, _ = mtrain("average", "--help")  # few options
    assert re.findall(r"^(\w.*):$", shown, re.MULTILINE) == ["Arguments", "Options", *expected[-2:]]


def test_headings_are_bold_only_where_color_is_wanted(mtrain, monkeypatch):
    heading = "\x1b[1mGeneral options"
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    assert "\x1b" not in mtrain("fit", "--help")[1]
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert heading in mtrain("fit", "--help")[1]
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in mtrain("fit", "--help")[1]
