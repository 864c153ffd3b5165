"""The bundled toy corpus, and test sets by name, which are read without a network from a folder with the
layout of sacreBLEU's cache.

sacreBLEU reads the name of its folder when it is imported, so the tests of test sets use other processes.
"""

import json
import os
import subprocess
import sys
from pathlib import Path, PurePosixPath

import pytest
from sacrebleu.dataset import DATASETS

from mtrain.config.sections.corpora import ToyCorpus
from mtrain.data.reading.digests import content_hash
from mtrain.data.reading.files import ToySplit, toy_pairs

# sacreBLEU opens this file, which it would have downloaded, for WMT22.
XML = """<?xml version="1.0"?>
<dataset id="wmttest2022.en-de"><doc origlang="en" id="d" domain="news">
<src lang="en"><p><seg id="1">A dog  runs.</seg><seg id="2">It rains &amp; pours.</seg></p></src>
<ref lang="de" translator="A"><p><seg id="1">Ein Hund rennt.</seg><seg id="2">Es regnet.</seg></p></ref>
<ref lang="de" translator="B"><p><seg id="1">Ein Hund läuft.</seg><seg id="2">Es gießt.</seg></p></ref>
</doc></dataset>
"""
READ = """
import json, sys
from mtrain.config.sections.corpora import SacrebleuCorpus
from mtrain.data.reading.blocks import read_corpus
from mtrain.data.reading.files import files_of, further_references
from mtrain.errors import DataError
corpus = SacrebleuCorpus(sacrebleu=sys.argv[1], langs=sys.argv[2])
try:
    others = [[file.read_text() for file in files] for files in further_references(corpus)]
    print(json.dumps([list(read_corpus(corpus)), others, len(files_of(corpus))]))
except DataError as error:
    print(json.dumps(str(error)))
"""


def read(cache: Path, name: str, langs: str):
    """The pairs of a test set, the texts of its further references, and the number of its files; or the
    message of an error. A proxy that does not exist takes the place of the network."""
    environment = {**os.environ, "SACREBLEU": str(cache), "https_proxy": "http://127.0.0.1:9"}
    command = [sys.executable, "-c", READ, name, langs]
    output = subprocess.run(command, env=environment, capture_output=True, check=True).stdout
    return json.loads(output)


@pytest.fixture
def cache(tmp_path):
    [archive], [member] = DATASETS["wmt22"].data, DATASETS["wmt22"].langpairs["en-de"]
    raw = tmp_path / "wmt22" / "raw"
    (raw / member).parent.mkdir(parents=True)
    (raw / member).write_text(XML)
    (raw / f"wmt22.{PurePosixPath(archive).name}").write_bytes(b"downloaded")
    two = tmp_path / "wmt17" / "tworefs"
    two.mkdir(parents=True)
    fields = {"src": "a\nb\n", "ref-0": "A\nB\n", "ref-1": "X\nY\n", "docid": "", "genre": "", "origlang": ""}
    for field, text in fields.items():
        (two / f"wmt17_tworefs.en-fi.{field}").write_text(text)
    return tmp_path


def test_a_cached_test_set_is_read_with_its_references(cache):
    pairs = [["A dog runs.", "Ein Hund rennt."], ["It rains & pours.", "Es regnet."]]
    assert read(cache, "wmt22", "en-de") == [pairs, [], 2]  # A is the official reference
    assert read(cache, "wmt17/tworefs", "en-fi") == [[["a", "A"], ["b", "B"]], [["X\nY\n"]], 3]


def test_without_a_network_one_line_says_what_to_do(tmp_path):
    message = read(tmp_path, "wmt22", "en-de")
    assert message.startswith("wmt22: cannot download the test set: <urlopen error")
    assert "run `sacrebleu -t wmt22 -l en-de --echo src` on a machine with a network" in message
    assert f"copy its folder ~/.sacrebleu to {tmp_path} on this machine" in message and "\n" not in message


def test_a_damaged_download_is_an_error_of_one_line(cache):
    """sacreBLEU logs the wrong checksum and exits."""
    raw = cache / "wmt22" / "raw"
    for file in raw.rglob("*.xml"):
        file.unlink()
    for file in raw.glob("wmt22.*"):
        file.write_bytes(b"damaged")
    message = read(cache, "wmt22", "en-de")
    assert message.startswith("wmt22: cannot download the test set: ") and "\n" not in message
    assert "cannot download the test set: 1;" not in message


def test_the_toy_corpus_has_three_splits() -> None:
    assert {split: len(toy_pairs(split)) for split in ("train", "validation", "test")} == {
        "train": 5000,
        "validation": 300,
        "test": 300,
    }
    assert toy_pairs("test")[0] == ("I like oranges.", "J'aime les oranges.")


@pytest.mark.parametrize(
    ("split", "digest"),
    [
        ("train", "2590ddb720b74a464d82c8d67762cd39a117b46a712d6756a478c841ad660421"),
        ("validation", "371072ac61fba81de73f4c7fef563b1012e54c0ba69fe3706bdb8737f882f118"),
        ("test", "9d396d9e6797a29cf6fc48a5b49be8588eb9e4b0dd430f24595e55e40306958e"),
    ],
)
def test_the_toy_corpus_never_changes(split: ToySplit, digest: str) -> None:
    """Run folders record this hash, and a run refuses to resume on other data."""
    assert content_hash(ToyCorpus(toy=split)) == digest
