"""The commands of the how-to guides fit together, and scripts/multi30k.sh can be interrupted."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mtrain.config.load import load_config
from mtrain.config.sections.corpora import ToyCorpus
from mtrain.data.store.shards import EncodedCorpus, Shard
from mtrain.tokenizer.tokenizer import Tokenizer
from tests.support.documentation import CONNECTED_GUIDES, FEW_STEPS, blocks, prepare, run
from tests.support.paths import ROOT


@pytest.mark.slow
def test_commands_of_the_guides_fit_together(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(FEW_STEPS, "decoding.beam_size", 1)
    # A teacher that has hardly been trained may write nothing, and such pairs would be dropped.
    monkeypatch.setitem(FEW_STEPS, "decoding.min_length_offset", 4)
    prepare(tmp_path)
    found = [block for page in CONNECTED_GUIDES for block in blocks(page)]
    runnable = [block for block in found if block.language == "bash" and not block.mark]
    lines = [command for block in runnable for command in block.commands]
    fits = [line for line in lines if line.startswith("mtrain fit")]
    assert fits
    for line in lines:
        run(line)
    assert "BLEU" in capsys.readouterr().out
    runs = {folder.name: folder for folder in (tmp_path / "runs").iterdir()}
    assert len(runs) == len(fits) and all((run / "model/model.safetensors").exists() for run in runs.values())
    assert (tmp_path / "data/multi30k/val.out").read_text().count("\n") == 8
    student = load_config(ROOT / "configs/multi30k/en-de-student.yaml").model
    assert (student.encoder_layers, student.decoder_layers) == (6, 1)

    tagged = runs["multi30k-en-de-backtranslated"]
    tag = Tokenizer(tagged / "tokenizer").source.pieces.index("<bt>")
    sources = sources_of(tagged)  # 200 human translations, then the synthetic pairs
    assert [ids.count(tag) for ids in sources] == [0] * 200 + [1] * 20

    sources = sources_of(runs["multi30k-en-de-reborn"])
    assert len(sources) == 400
    assert sources[:200] == sources[200:]  # with human translations, then with the teacher's


def sources_of(run: Path) -> list[list[int]]:
    """The encoded source sentences of a run, in the order of its corpora."""
    shards = [Shard(file) for file in sorted((run / "data").glob("shard-*"))]
    corpora = [ToyCorpus(toy="train")] * len(shards)
    corpus = EncodedCorpus.open(shards, corpora, buckets=[0])
    return corpus.fetch(range(len(corpus)))[0].to_lists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("language", "models"),
    [("de", [f"en-de-mean{seed}" for seed in ("", "-2", "-3")]), ("fr", ["en-fr-mean"])],
)
def test_multi30k_script_resumes_and_repeats_nothing(language, models, tmp_path):
    prepare(tmp_path)
    for file in (tmp_path / "data/multi30k").glob("*.de"):  # stands in for French
        file.with_suffix(".fr").write_bytes(file.read_bytes().upper())
    calls = stand_in(tmp_path / "bin/mtrain", tmp_path / "calls")
    path = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"

    def recipe(stop_at: int = 0) -> subprocess.CompletedProcess[str]:
        calls.write_text("")
        environment = {**os.environ, "PATH": path, "STOP_AT": str(stop_at)}
        command = ["bash", "scripts/multi30k.sh", language]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    for stop_at in (1, 3, 8):
        assert recipe(stop_at).returncode == 130 and len(calls.read_text().splitlines()) == stop_at
    done = recipe()
    assert done.returncode == 0, done.stderr
    # Moses BLEU only, because `fit` prints the BLEU of every model on the test set.
    assert len(re.findall(r"tok:none\|.* = \d+\.\d+ ", done.stdout)) == len(models)
    kinds = (".de", ".fr", ".en", ".jsonl", ".safetensors")
    made = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*") if file.suffix in kinds}
    tests = {tmp_path / f"runs/multi30k-{model}.test_2016_flickr.{language}" for model in models}
    again = recipe()
    assert again.stdout == done.stdout and tests < made.keys()
    assert {file for file, when in made.items() if file.stat().st_mtime_ns != when} <= tests
    for line in calls.read_text().splitlines():
        assert "fit" in line or "test_2016_flickr" in line


def stand_in(command: Path, calls: Path) -> Path:
    """Write a command that trains a few steps, records its calls, and stops at the call number STOP_AT."""
    command.parent.mkdir()
    command.write_text(f"""#!{sys.executable}
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from tests.support.documentation import run_mtrain
with open({str(calls)!r}, "a+") as calls:
    print(*sys.argv[1:], file=calls, flush=True)
    calls.seek(0)
    if len(calls.readlines()) == int(os.environ["STOP_AT"]):
        sys.exit(130)
run_mtrain(sys.argv[1:])
""")
    command.chmod(0o755)
    return calls
