"""The first pass over the raw text: how often files are read, what is sampled, and what is hashed."""

import gzip
import os
import sys
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from mtrain import progress_bar
from mtrain.config.sections.corpora import ToyCorpus
from mtrain.data import Pair
from mtrain.data.reading.blocks import read_blocks
from mtrain.data.reading.digests import RawFiles, content_hash
from mtrain.data.scanning import samples
from mtrain.data.scanning import scanner as scan
from mtrain.data.scanning.block_check import Normalizers
from mtrain.data.scanning.check import Changes, PairCounts
from mtrain.data.scanning.samples import TextSample, sample_block
from mtrain.data.scanning.scanner import CorpusScanner
from mtrain.errors import DataError, StorageError
from mtrain.storage import temporary
from mtrain.tokenizer.vocabulary import make_normalizer
from tests.support.checking import check_data
from tests.support.corpora import block_of, corpus
from tests.support.encoding import TOY, config, write

WATCHED: dict[str, Counter[str]] = {}  # by folder: how often each of its files was opened


def count_opening(event: str, arguments: tuple) -> None:
    """An audit hook, which cannot be removed; it does nothing unless a folder is watched."""
    if WATCHED and event == "open":
        folder, name = os.path.split(str(arguments[0]))
        if folder in WATCHED:
            WATCHED[folder][name] += 1


@pytest.fixture(scope="module")
def audited() -> None:
    sys.addaudithook(count_opening)


@pytest.fixture
def openings(mtrain, audited):
    """Run a command, and return how often it opens each file of a folder."""

    def openings(folder: Path, *command: object) -> dict[str, int]:
        WATCHED[str(folder)] = Counter()
        code, _, err = mtrain(*command)
        assert code == 0, err
        return dict(WATCHED.pop(str(folder)))

    return openings


@pytest.fixture
def first_run(raw_config, tmp_path: Path) -> tuple[Path, Path]:
    """A config for which `fit` does everything that reads raw text, and the folder of its corpora."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    train = [write(folder / "one.tsv", TOY), write(folder / "two.tsv", TOY[:50])]
    raw = {
        **raw_config,
        "run_dir": str(tmp_path / "run"),
        "data": {
            **{"source_lang": "en", "target_lang": "fr", "train": train, "max_length": 64},
            **{"validation": {"holdout": 8}, "test": {"news": write(folder / "test.tsv", TOY[:4])}},
        },
        "tokenizer": {"joint": False},
        "model": {"preset": "auto", "tie_embeddings": "decoder"},
        "training": {**raw_config["training"], "max_steps": 1},
    }
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(raw), encoding="utf-8")
    return file, folder


def test_a_first_fit_reads_the_raw_text_twice(openings, first_run):
    """It chooses the model's size by the number of pairs, learns two vocabularies, checks the data, draws
    held-out pairs, hashes the files, and encodes them. The test set is read to check it, and to score it
    at the end."""
    file, folder = first_run
    fit = ("fit", file, "--device", "cpu")
    assert openings(folder, *fit) == {"one.tsv": 2, "two.tsv": 2, "test.tsv": 2}
    # A resumed run does not read the corpus, and hashes again only those that were written since.
    assert openings(folder, *fit, "--set", "training.max_steps=2") == {"test.tsv": 1}
    (folder / "two.tsv").write_bytes((folder / "two.tsv").read_bytes())
    assert openings(folder, *fit, "--set", "training.max_steps=3") == {"two.tsv": 1, "test.tsv": 1}


@pytest.mark.slow
def test_fit_after_tokenize_reads_the_raw_text_at_most_three_times(openings, first_run):
    file, folder = first_run
    assert openings(folder, "tokenize", file) == {"one.tsv": 1, "two.tsv": 1}
    second = openings(folder, "fit", file, "--device", "cpu")
    assert max(second.values()) <= 3


def test_check_reads_the_raw_text_once(openings, first_run):
    file, folder = first_run
    assert openings(folder, "check", file) == {"one.tsv": 1, "two.tsv": 1, "test.tsv": 1}


# ----------------------------------------------------------------------------------------------------- hashes


def compress_twice(text: bytes) -> bytes:
    """Two members, as `cat one.gz two.gz` makes them."""
    return gzip.compress(text) + gzip.compress(b"c\td")


@pytest.mark.parametrize("compress", [bytes, gzip.compress, compress_twice])
def test_hashes_computed_while_reading_equal_those_of_the_files(tmp_path: Path, compress):
    file = tmp_path / ("t.tsv" if compress is bytes else "t.tsv.gz")
    file.write_bytes(
        compress(b"\xef\xbb\xbf" + (b"a " * 25 + b"\tb\r\n") * 10_000 + b"no newline\tat the end")
    )
    data = config(tmp_path, {"tsv": str(file)})
    scanner = CorpusScanner(RawFiles(data), seed=1, check=True)
    assert scanner.result.pairs == 10_001
    assert scanner.files.digests.keys() == {file, tmp_path / "validation.tsv"}
    assert scanner.files.content_hashes == [content_hash(each) for each in (*data.train, *data.validation)]
    unread = CorpusScanner(RawFiles(data), seed=1)
    assert unread.files.content_hashes == scanner.files.content_hashes


def test_a_file_that_was_not_read_to_its_end_has_no_hash(tmp_path: Path):
    digests: dict[Path, bytes] = {}
    blocks = read_blocks(corpus(**write(tmp_path / "t.tsv", TOY)), digests, size=100)
    next(blocks)
    assert isinstance(blocks, Generator)
    blocks.close()
    assert digests == {}


def test_the_bundled_corpus_needs_no_file(tmp_path: Path):
    data = config(tmp_path, {"toy": "test"}, {"toy": "validation"})
    scanner = CorpusScanner(RawFiles(data), seed=1)
    assert scanner.result.pairs == 300 and scanner.files.digests == {}
    assert scanner.files.content_hashes == [
        content_hash(ToyCorpus(toy=split)) for split in ("test", "validation")
    ]


# ------------------------------------------------------------------------------------------- unreadable pairs


def test_an_unreadable_pair_ends_a_strict_scan_unless_skipped(tmp_path: Path):
    (tmp_path / "t.tsv").write_bytes(b"a\tb\ncaf\xe9\tbad\nc\td\n")
    train = {"tsv": str(tmp_path / "t.tsv")}
    with pytest.raises(DataError, match=r"t\.tsv:2: not valid UTF-8 .*; fix it, or set data\.bad_lines"):
        CorpusScanner(RawFiles(config(tmp_path, train)), seed=1).result  # noqa: B018
    for data, strict in ((config(tmp_path, train), False), (config(tmp_path, train, bad_lines="skip"), True)):
        result = CorpusScanner(RawFiles(data), seed=1, strict=strict).result
        assert result.pairs == 2 and list(result.text.pairs()) == [("a", "b"), ("c", "d")]


# -------------------------------------------------------------------------------------------------- processes


def various_corpora(folder: Path) -> list[dict[str, str]]:
    """Corpora with every kind of pair that a check finds."""
    odd = [
        *(("", "empty"), ("Copied as it was.", "Copied as it was."), ("A sentence that is long.", "x")),
        *(("Hello.", "Это предложение."), ("i LIKE pears", "!"), ("It &apos;s a pear", "une poire")),
    ]
    (folder / "part-1.tsv").write_bytes(b"bad\n" * 3 + b"i eat caf\xe9\tbad\n")
    write(folder / "part-2.tsv", [*TOY, *odd, *TOY[:40]])
    table = pa.table({"en": [source for source, _ in TOY], "fr": [target for _, target in TOY]})
    pq.write_table(table, folder / "t.parquet")
    (folder / "t.jsonl").write_text('{"en": "line\\nbreak", "fr": "a…"}\n{"en": 1}\n' * 20, encoding="utf-8")
    fields = {"source_field": "en", "target_field": "fr"}
    tables = [{"parquet": str(folder / "t.parquet"), **fields}, {"jsonl": str(folder / "t.jsonl"), **fields}]
    return [{"tsv": str(folder / "part-*.tsv")}, *tables]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "BLOCK", 20)
    monkeypatch.setattr(scan, "SCRIPT_PAIRS", 30)


@pytest.mark.parametrize(
    "validation", [{"holdout": 10}, pytest.param({"toy": "train"}, marks=pytest.mark.slow)]
)
def test_the_result_does_not_depend_on_the_number_of_processes(
    tmp_path: Path, validation, small_blocks, monkeypatch
):
    monkeypatch.setattr(scan, "SAMPLED_CHARACTERS", 10_000)
    monkeypatch.setattr(samples, "CANDIDATES", 5)
    data = config(tmp_path, various_corpora(tmp_path), validation, test={"news": {"toy": "train"}})
    results = []

    def normalizers() -> Normalizers:
        return [make_normalizer("nmt_nfkc")] * 2

    for workers in (1, 2):
        scanner = CorpusScanner(
            RawFiles(data), 1, check=True, strict=False, workers=workers, normalizers=normalizers
        )
        found = scanner.result
        assert 100 < len(found.text) < found.pairs
        results.append(
            (found.pairs, found.held_out, found.findings, [*found.text.pairs()], scanner.files.digests)
        )
    assert results[0] == results[1]
    findings = results[0][2]
    assert findings.sets["train"] == PairCounts(usable=665, empty=1, bad=24) and findings.duplicates > 300
    assert findings.leaks["news"].sources == 300
    assert findings.changes == {"target": Changes(20, [("…", "...", 20)])}
    assert findings.suspicious["a copied source"].places[0] == f"{tmp_path / 'part-2.tsv'}:302"
    assert all(suspicious.count for suspicious in findings.suspicious.values())


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_first_unreadable_pair_is_reported(tmp_path: Path, small_blocks, workers: int):
    lines = ["bad\n" if i in (70, 150) else f"{source}\t{target}\n" for i, (source, target) in enumerate(TOY)]
    (tmp_path / "t.tsv").write_text("".join(lines), encoding="utf-8")
    scanner = CorpusScanner(
        RawFiles(config(tmp_path, {"tsv": str(tmp_path / "t.tsv")})), seed=1, workers=workers
    )
    with pytest.raises(
        DataError, match=r"t\.tsv:71: 1 column\(s\); at least 2 expected; fix it, or set data"
    ):
        scanner.result  # noqa: B018


# ---------------------------------------------------------------------------------------------------- samples


def sample(pairs: list[Pair], limit: int, seed: int = 1) -> TextSample:
    text = TextSample(limit)
    for start in range(0, len(pairs), 7):
        text.add(sample_block(block_of(pairs[start : start + 7], start + 1), 0, seed, text.threshold), 0)
    return text


def test_a_sample_of_few_pairs_contains_all_of_them():
    pairs = [*TOY, Pair("", "empty"), Pair("line\nbreak", "\r\u2028"), TOY[0]]
    text = sample(pairs, sum(map(len, sum(pairs, ()))))
    assert list(text.pairs()) == pairs and len(text) == len(pairs)
    for side in (0, 1):
        for _ in range(2):  # SentencePiece may read it twice
            assert list(text.side(side)) == [pair[side] for pair in pairs]


def test_a_sample_of_many_pairs_is_uniform_and_in_order():
    pairs = [Pair(f"{i:03}", f"-{i:03}") for i in range(1000)]
    counts = [0] * len(pairs)
    for seed in range(60):
        text = sample(pairs, 700, seed)
        numbers = [int(source) for source in text.side(0)]
        assert 60 < len(numbers) == len(text) <= 100  # of 7 characters
        assert numbers == sorted(set(numbers))
        assert list(text.side(1)) == [f"-{i:03}" for i in numbers]
        for i in numbers:
            counts[i] += 1
    first, second = sum(counts[:500]), sum(counts[500:])
    assert abs(first - second) < 0.1 * (first + second)
    assert list(sample(pairs, 700).pairs()) == list(sample(pairs, 700).pairs())


def test_temporary_files_that_cannot_be_written_are_a_storage_error(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(temporary, "IN_MEMORY", 100)
    folder = tmp_path / "missing"
    with pytest.raises(StorageError, match=f"^{folder}: cannot write temporary files: No such file"):
        CorpusScanner(RawFiles(config(tmp_path)), 1, folder).result  # noqa: B018


@pytest.mark.parametrize("compressed", [False, True])
def test_the_remaining_time_is_estimated_from_the_sizes_of_plain_files(
    tmp_path: Path, small_blocks, monkeypatch, caplog, compressed: bool
):
    caplog.set_level("INFO", "mtrain")
    monkeypatch.setattr(progress_bar, "LOG_EVERY", 0)
    text = "".join(f"{i:03}\tpair\n" for i in range(100)).encode()
    file = tmp_path / ("t.tsv.gz" if compressed else "t.tsv")
    file.write_bytes(gzip.compress(text) if compressed else text)
    CorpusScanner(RawFiles(config(tmp_path, {"tsv": str(file)})), seed=1).result  # noqa: B018
    found = [message for message in caplog.messages if message.startswith("data: read ")]
    assert len(found) == 5 and all((" of about 100 pairs" in message) != compressed for message in found)


def test_a_check_segments_at_most_20000_pairs(tmp_path: Path, tokenizer):
    data = config(tmp_path, write(tmp_path / "t.tsv", [*TOY * 100, ("", "empty")]))
    found = check_data(data, tokenizer).segmentation
    assert found is not None and 10_000 < found.pairs <= 20_000


def test_the_sample_is_small_unless_a_tokenizer_is_learned_from_it(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(scan, "CHECKED_CHARACTERS", 5_000)
    data = config(tmp_path)
    small = CorpusScanner(RawFiles(data), seed=1, for_tokenizer=False).result.text
    assert 20 < len(small) < 200
    assert sum(len(source + target) for source, target in small.pairs()) <= 5_000
    assert list(CorpusScanner(RawFiles(data), seed=1).result.text.pairs()) == TOY
