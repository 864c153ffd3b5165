"""The generator of parallel text for measurements."""

import gzip
import sys
from pathlib import Path

import generate_pairs
import pytest


def test_the_text_of_fewer_pairs_is_the_beginning_of_that_of_more(tmp_path: Path, monkeypatch):
    source, target = tmp_path / "s.en", tmp_path / "t.de.gz"
    monkeypatch.setattr(generate_pairs, "BLOCK", 200)
    monkeypatch.setattr(sys, "argv", ["generate_pairs.py", "210", str(source), str(target)])
    generate_pairs.main()
    sides = source.read_bytes(), gzip.decompress(target.read_bytes())
    assert [side.count(b"\n") for side in sides] == [210] * 2
    few = list(generate_pairs.pairs(20, seed=1))
    assert len(few) == 1 and all(side.startswith(block) for side, block in zip(sides, few[0], strict=True))
    sentences = [text.decode().splitlines() for text in few[0]]
    assert all(side.strip() == side and " " in side for side in sentences[0])
    # Each word has one translation.
    assert [text.count(" ") for text in sentences[0]] == [text.count(" ") for text in sentences[1]]


def test_it_explains_itself(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["generate_pairs.py", "--help"])
    with pytest.raises(SystemExit):
        generate_pairs.main()
    assert "PAIRS SOURCE TARGET" in capsys.readouterr().out
