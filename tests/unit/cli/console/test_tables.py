"""Tables of results and wrapped messages, on terminals of several widths and in pipes."""

import sys

import pytest

from mtrain.cli.console.tables import format_scores, format_table, wrap_signature
from mtrain.cli.console.terminal import wrap
from mtrain.evaluation.metrics import make_metrics, score

HEADER = ("", "score", "p\n(bootstrap)")
ROWS = [["runs/baseline", "39.83", ""], ["runs/a-run-with-quite-a-long-name/model", "40.1", "0.0100*"]]
RECIPE = "  training.batch_tokens        1024  0.706 million target tokens in all, which is a long reason"


@pytest.fixture
def use_terminal(monkeypatch):
    """Make stdout a terminal of some width."""

    def use(columns: int) -> None:
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setenv("TERM", "xterm")
        for name in ("NO_COLOR", "FORCE_COLOR"):
            monkeypatch.delenv(name, raising=False)

    return use


def test_a_table_in_a_pipe_is_plain_and_aligned():
    assert list(format_table(ROWS, HEADER)) == [
        "                                           score  p (bootstrap)",
        "  runs/baseline                            39.83",
        "  runs/a-run-with-quite-a-long-name/model   40.1        0.0100*",
    ]


@pytest.mark.parametrize("columns", [40, 80])
def test_a_table_on_a_terminal_fits_and_keeps_every_character(use_terminal, monkeypatch, columns):
    use_terminal(columns)
    monkeypatch.setenv("FORCE_COLOR", "1")
    lines = list(format_table(ROWS, HEADER))
    assert max(map(len, lines)) <= columns and not any("\x1b" in line or "…" in line for line in lines)
    assert any(line.endswith("39.83") for line in lines) and any(line.endswith("0.0100*") for line in lines)
    names = "".join(lines).replace("0.0100*", "").replace("40.1", "").replace(" ", "")
    assert names.endswith(ROWS[1][0])


def test_scores_are_a_table_on_a_terminal_and_lines_of_sacrebleu_elsewhere(use_terminal, monkeypatch):
    text = ["The cat sits on the mat today."]
    scores = score(text, [text], make_metrics(("bleu", "ter")))
    assert list(format_scores(scores)) == [f"  {each.detail}" for each in scores]
    use_terminal(60)
    monkeypatch.setenv("NO_COLOR", "1")
    lines = list(format_scores(scores))
    assert lines[0].split()[:2] == ["BLEU", "100.00"] and lines[0].endswith("|") and max(map(len, lines)) < 60
    assert "(BP = 1.000" in " ".join(lines) and scores[1].signature in "".join(map(str.strip, lines))


def test_signatures_are_wrapped_between_fields(use_terminal):
    signature = "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.6.0"
    assert wrap_signature(signature, 8) == signature
    use_terminal(40)
    assert wrap_signature(signature, 8).split("\n") == [
        "nrefs:1|case:mixed|eff:no|",
        "tok:13a|smooth:exp|",
        "version:2.6.0",
    ]


def test_messages_are_wrapped_between_words_on_terminals_only(use_terminal):
    text = "warning: the corpus has changed since the tokenizer was learned\n" + RECIPE
    assert wrap(text, sys.stdout) == text
    use_terminal(61)
    assert wrap(text, sys.stdout).split("\n") == [
        "warning: the corpus has changed since the tokenizer was",
        "  learned",
        "  training.batch_tokens        1024  0.706 million target",
        "                                     tokens in all, which is",
        "                                     a long reason",
    ]
    path = "x" * 100
    assert wrap(f"writing {path}", sys.stdout) == f"writing\n  {path}"
