"""The loops of the README run as they are written there."""

import sys
from pathlib import Path

import numpy as np
import yaml

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import loops  # noqa: E402

from mtrain.data.encode import EncodedCorpus  # noqa: E402
from mtrain.tokenizer import Tokenizer  # noqa: E402


def test_the_commands_of_the_readme_fit_together(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    loops.prepare(tmp_path)
    lines = loops.commands((ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(lines) == 22 and sum("configs/" in line for line in lines) == 12
    for line in lines:
        loops.run(line)
    assert "BLEU" in capsys.readouterr().out
    runs = {folder.name: folder for folder in (tmp_path / "runs").iterdir()}
    assert len(runs) == 12 and all((run / "model/model.safetensors").exists() for run in runs.values())
    student = yaml.safe_load((runs["multi30k-en-de-student"] / "config.yaml").read_text())["model"]
    assert (student["encoder_layers"], student["decoder_layers"]) == (6, 1)

    tagged = runs["multi30k-en-de-backtranslated"]
    tag = Tokenizer(tagged / "tokenizer").source.pieces.index("<bt>")
    corpus = EncodedCorpus(tagged / "data/train.arrow", np.ones(220))
    sources = corpus.fetch(list(range(220)))[0].to_pylist()  # 200 pairs that people wrote, then the synthetic
    assert [ids.count(tag) for ids in sources] == [0] * 200 + [1] * 20

    reborn = EncodedCorpus(runs["multi30k-en-de-reborn"] / "data/train.arrow", np.ones(400))
    sources = reborn.fetch(list(range(400)))[0].to_pylist()
    assert sources[:200] == sources[200:]  # with what people said, then with what the teacher says
