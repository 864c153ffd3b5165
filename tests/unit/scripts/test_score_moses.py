"""scripts/score_moses.py: BLEU on lowercased and tokenized text."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.paths import ROOT

pytestmark = pytest.mark.skipif(find_spec("sacremoses") is None, reason="needs sacremoses")
SCRIPT = ROOT / "scripts/score_moses.py"


def run(tmp_path: Path, hypotheses: str, references: str) -> subprocess.CompletedProcess:
    for name, text in (("hyp", hypotheses), ("ref", references)):
        (tmp_path / name).write_text(text, encoding="utf-8")
    command = [sys.executable, SCRIPT, "--lang", "de", tmp_path / "hyp", tmp_path / "ref"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_case_quotes_and_spacing_do_not_count_and_words_do(tmp_path):
    reference = "Ein Mann sagt: „Das ist mein Hund“, und lacht.\n" * 2
    same = run(tmp_path, reference.lower().replace("„", '"').replace("“", '"'), reference)
    assert "tok:none" in same.stdout and "= 100.00 " in same.stdout
    assert "hyp_len = 28 " in same.stdout  # fourteen tokens per line
    other = run(tmp_path, reference.replace("Hund", "Hase"), reference)
    assert "= 100.00 " not in other.stdout


def test_unequal_counts_and_missing_files_are_one_line(tmp_path):
    unequal = run(tmp_path, "a\nb\n", "a\n")
    assert unequal.returncode == 1 and unequal.stderr == "error: 2 hypotheses but 1 references\n"
    command = [sys.executable, SCRIPT, "--lang", "de", tmp_path / "no", tmp_path / "ref"]
    missing = subprocess.run(command, capture_output=True, text=True, check=False)
    assert missing.stderr == f"error: {tmp_path / 'no'}: no such file\n"
