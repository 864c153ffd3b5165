"""The prompt: translations go to stdout, everything else to stderr, and a mistake does not end it."""

from dataclasses import replace

import numpy as np
import pytest

from mtrain import Translator
from mtrain.cli.translate.prompt import Prompt, draw_attention


@pytest.fixture
def prompt(run_dir, monkeypatch, capsys):
    """Type lines at a prompt; returns stdout and stderr."""

    def run(*lines: str, n_best: int = 1) -> tuple[str, str]:
        typed = iter(lines)

        def read(_: str) -> str:
            try:
                return next(typed)
            except StopIteration:
                raise EOFError from None

        monkeypatch.setattr("builtins.input", read)
        Prompt(Translator.load(run_dir, "cpu"), n_best).run()
        return capsys.readouterr()

    return run


def test_a_translation_its_score_and_its_time(prompt):
    out, err = prompt("It rains.", "")
    assert out == "Es regnet.\n\n"
    assert "score -0." in err and "nats" in err and " ms\n" in err and ":attention" in err


def test_pasted_lines_are_translated_one_by_one(prompt):
    """A terminal may paste them as one line of input."""
    assert prompt("It rains.\n\nThe sun shines.")[0] == "Es regnet.\n\nDie Sonne scheint.\n"


def test_n_and_beam(prompt):
    out, _ = prompt("It rains.", n_best=3)
    assert len(out.splitlines()) == 3 and out.startswith("Es regnet.\n")
    out, err = prompt(":n 7", "It rains.", ":beam 2", "It rains.")
    assert len(out.splitlines()) == 7 + 2 and "7 beams" in err and "2 beams" in err


def test_sampling_is_kept_until_beams_are_requested(prompt, run_dir, monkeypatch, capsys):
    typed = iter([":n 4", "It rains.", ":beam 2", "It rains.", ":quit"])
    monkeypatch.setattr("builtins.input", lambda _: next(typed))
    Prompt(Translator.load(run_dir, "cpu").with_settings(samples=1, temperature=3.0)).run()
    out, err = capsys.readouterr()
    assert out.count("\n") == 4 + 2 and "error" not in err


def test_attention_is_drawn_for_the_last_translation(prompt):
    _, err = prompt("The sun shines.", ":attention")
    assert "1:\u2581" in err and "</s>" in err and any(shade in err for shade in "▒▓█")


def test_mistakes_are_reported_and_do_not_end_the_prompt(prompt):
    out, err = prompt(
        ":attention", ":n", ":n 0", ":beam many", ":nonsense", "caf\udce9", ":help", "It rains."
    )
    assert out == "Es regnet.\n"
    for message in (
        "error: :attention: translate a sentence first",
        "error: :n: give a number from 1 to 128",
        "error: :n 0: give a number",
        "error: :beam many: give a number",
        "error: :nonsense: no such command; use :n, :beam, :attention, :help or :quit",
        "not valid UTF-8",
    ):
        assert message in err


def test_quit_ends(prompt):
    assert prompt(":quit", "It rains.")[0] == ""


def test_attention_has_a_row_for_each_target_token_and_a_shade_for_each_weight():
    weights = np.array([[0.9, 0.1], [0.5, 0.45]])
    picture = draw_attention(["\u2581a", "b\x1b"], ["\u2581x", "</s>"], weights).split("\n")
    assert picture == ["1:\u2581a 2:b\\x1b", "      1  2", "  \u2581x ██   ", "</s> ▒▒ ▒▒"]


@pytest.mark.parametrize(
    ("piece", "label"),
    [
        ("\u00a0", "U+00A0"),
        ("\u2581\u200b", "\u2581 U+200B"),
        ("\ufe0f", "U+FE0F"),
        ("\x1b", "U+001B"),
        ("\u2581", "\u2581"),
        ("می\u200c", "می\u200c"),
    ],
)
def test_attention_shows_the_code_points_of_pieces_that_cannot_be_seen(piece, label):
    picture = draw_attention([piece], ["a", piece], np.zeros((2, 1))).split("\n")
    assert picture[0] == f"1:{label}" and picture[3].startswith(label)


def test_attention_is_aligned_and_right_to_left_tokens_are_isolated_on_a_terminal(monkeypatch):
    weights = np.array([[0.9, 0.1], [0.5, 0.45], [0, 0]])
    pieces = ["\u2581ال", "</s>"], ["漢字", "ที่", "abcdef"]
    plain = draw_attention(*pieces, weights).split("\n")
    assert plain == ["1:\u2581ال 2:</s>", "        1  2", "  漢字 ██   ", "     ที่ ▒▒ ▒▒", "abcdef      "]
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert draw_attention(*pieces, weights).split("\n") == ["1:\u2068\u2581ال\u2069 2:</s>", *plain[1:]]


def test_control_characters_of_a_translation_are_escaped_at_a_terminal(run_dir, monkeypatch, capsys):
    translator = Translator.load(run_dir, "cpu")
    [known] = translator.translate(["It rains."])
    monkeypatch.setattr(translator, "translate", lambda *_, **__: [replace(known, text="a\x1b[2Jb")])
    for terminal, shown in ((True, "a\\x1b[2Jb\n"), (False, "a\x1b[2Jb\n")):
        typed = iter(["It rains.", ":quit"])
        monkeypatch.setattr("builtins.input", lambda _, typed=typed: next(typed))
        monkeypatch.setattr("sys.stdout.isatty", lambda terminal=terminal: terminal)
        Prompt(translator).run()
        assert capsys.readouterr().out == shown
