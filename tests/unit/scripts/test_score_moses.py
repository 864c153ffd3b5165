"""scripts/score_moses.py: BLEU on lowercased and tokenized text."""

import sys
from importlib.util import find_spec

import pytest
import score_moses

pytestmark = pytest.mark.skipif(find_spec("sacremoses") is None, reason="needs sacremoses")


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Score hypotheses, or a missing file if they are None; returns what was printed."""

    def run(hypotheses: str | None, references: str) -> str:
        for name, text in (("hyp", hypotheses), ("ref", references)):
            if text is not None:
                (tmp_path / name).write_text(text, encoding="utf-8")
        arguments = ["--lang", "de", str(tmp_path / "hyp"), str(tmp_path / "ref")]
        monkeypatch.setattr(sys, "argv", ["score_moses.py", *arguments])
        score_moses.main()
        return capsys.readouterr().out

    return run


def test_case_quotes_and_spacing_do_not_count_and_words_do(run):
    reference = "Ein Mann sagt: „Das ist mein Hund“, und lacht.\n" * 2
    same = run(reference.lower().replace("„", '"').replace("“", '"'), reference)
    assert "tok:none" in same and "= 100.00 " in same
    assert "hyp_len = 28 " in same  # fourteen tokens per line
    assert "= 100.00 " not in run(reference.replace("Hund", "Hase"), reference)


def test_unequal_counts_and_missing_files_are_one_line(run, tmp_path):
    with pytest.raises(SystemExit) as missing:
        run(None, "a\n")
    assert missing.value.code == f"error: {tmp_path / 'hyp'}: no such file"
    with pytest.raises(SystemExit) as unequal:
        run("a\nb\n", "a\n")
    assert unequal.value.code == "error: 2 hypotheses but 1 references"
