"""Shards: what they contain, and how damaged, missing and interrupted ones are written again."""

import errno
import gzip
import hashlib
import json
import logging
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import count, islice, pairwise, product
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from mtrain import progress_bar
from mtrain.config.sections.data import DataConfig
from mtrain.data import Pair
from mtrain.data.epochs.schedule import Position
from mtrain.data.prepare import PreparedData
from mtrain.data.preparing import encode_folder, encode_shards
from mtrain.data.reading.blocks import read_blocks
from mtrain.data.reading.digests import RawFiles, content_hash
from mtrain.data.scanning.scanner import CorpusScanner
from mtrain.data.store.folder import DataFolder, read_summary
from mtrain.data.store.shards import LAYOUT, EncodedCorpus, Shard, buckets_of, shard_file
from mtrain.errors import DataError, ModelError, StorageError
from mtrain.processes import pool
from mtrain.processes.pool import WorkerProcess
from mtrain.tokenizer.tokenizer import Tokenizer
from tests.support.corpora import corpus
from tests.support.encoding import (
    TOY,
    config,
    dropped,
    prepare_data,
    rows,
    rows_of,
    text_of,
    use_sizes,
    write,
)
from tests.support.faults.file_operations import Operation, on_file_operation
from tests.support.faults.processes import start, wait, wait_until
from tests.support.faults.saves import Killed

pytestmark = pytest.mark.usefixtures("logs")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch):
    """Shards of 60 pairs, read 20 at a time, with 3 buckets for 300 pairs."""
    use_sizes(monkeypatch, block=20, shard=60, bucket=100)


def prepare(folder: Path, tokenizer: Tokenizer, data: DataConfig | None = None) -> PreparedData:
    return prepare_data(data or config(folder), tokenizer, folder / "data", seed=1)


def contents(folder: Path) -> dict[str, bytes]:
    """The files that were written for a corpus, without the lock and the record of the raw files."""
    others = (".lock", ".lock-owner", "sources.json")
    files = [file for file in (folder / "data").iterdir() if file.is_file() and file.name not in others]
    return {file.name: file.read_bytes() for file in files}


def test_each_pair_is_in_one_bucket_of_one_shard(tmp_path: Path, tokenizer: Tokenizer, small):
    train = [
        write(tmp_path / "a.tsv", TOY[:130]),
        write(tmp_path / "b.tsv", []),
        write(tmp_path / "c.tsv", TOY[130:]),
    ]
    data = config(tmp_path, [*train, {"toy": "validation"}])
    prepared = prepare(tmp_path, tokenizer, data)
    assert text_of(prepared, tokenizer)[:300] == TOY
    summary = json.loads((tmp_path / "data/summary.json").read_text())
    assert summary["kept"] == [130, 0, 170, 300] and summary["buckets"] == 6
    shards = [Shard(shard_file(tmp_path / "data", index)) for index in range(len(summary["shards"]))]
    assert [shard.info.pairs for shard in shards] == [60, 60, 10, 60, 60, 50, *[60] * 5]
    parts = [EncodedCorpus.open(shards, data.train, [bucket]) for bucket in range(6)]
    assert all(50 < len(part) < 150 for part in parts)
    assert sorted(row for part in parts for row in rows_of(part)) == sorted(rows(prepared))
    two = EncodedCorpus.open(shards, data.train, [4, 1])
    found = {tuple(map(tuple, row)) for part in (parts[1], parts[4]) for row in rows_of(part)}
    assert rows_of(two) == [row for row in rows(prepared) if tuple(map(tuple, row)) in found]


def test_whoever_can_read_other_files_can_read_shards(tmp_path: Path, tokenizer: Tokenizer):
    prepare(tmp_path, tokenizer)
    modes = {file.stat().st_mode for file in (tmp_path / "data").glob("*.*")}
    assert modes == {(tmp_path / "train.tsv").stat().st_mode}


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_shards_keep_no_file_open(tmp_path: Path, tokenizer: Tokenizer, small):
    """A billion pairs are 4,000 shards, and a process may often have only 1,024 files open."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    prepared = prepare(tmp_path, tokenizer)
    assert text_of(prepared, tokenizer) == TOY
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_ids_take_two_bytes_below_65536_entries(tmp_path: Path, tokenizer: Tokenizer):
    prepare(tmp_path, tokenizer)
    tensors = load_file(shard_file(tmp_path / "data", 0))
    assert tensors["source"].dtype == tensors["target"].dtype == np.uint16
    assert tensors["number"].tolist() == list(range(300))


def test_large_ids_are_read_back(tmp_path: Path, tokenizer: Tokenizer):
    class Large(Tokenizer):
        def encode_source(self, texts: list[str]) -> list[list[int]]:
            return [[i + 70_000 for i in ids] for ids in super().encode_source(texts)]

    large = Large(tokenizer.files[0].parent)
    large.source_vocab_size = 80_000
    plain = rows(prepare_data(config(tmp_path), tokenizer, tmp_path / "plain", seed=1))
    expected = [([*(i + 70_000 for i in source[:-1]), source[-1]], target) for source, target in plain]
    assert rows(prepare(tmp_path, large)) == expected


def test_buckets_are_of_equal_size_and_depend_on_the_seed():
    numbers = np.arange(1, 100_001)
    counts = np.bincount(buckets_of(numbers, 1, 0, 10), minlength=10)
    assert counts.sum() == 100_000 and abs(counts - 10_000).max() < 500
    for other in (buckets_of(numbers, 2, 0, 10), buckets_of(numbers, 1, 1, 10)):
        assert 0.08 < np.mean(other == buckets_of(numbers, 1, 0, 10)) < 0.12


def test_the_number_of_buckets_is_bounded(tmp_path: Path, tokenizer: Tokenizer, small, monkeypatch):
    """A folder with more buckets, as earlier versions wrote it, keeps them when its encoding is resumed."""
    monkeypatch.setattr(encode_folder, "BUCKET", 30)
    for name in ("many", "few"):
        (tmp_path / name).mkdir()
    many = prepare(tmp_path / "many", tokenizer)
    expected = contents(tmp_path / "many")
    monkeypatch.setattr(encode_folder, "MAX_BUCKETS", 4)
    few = prepare(tmp_path / "few", tokenizer)
    assert [len(Shard(shard_file(tmp_path / name / "data", 0)).buckets) - 1 for name in ("many", "few")] == [
        *(10, 4)
    ]
    assert rows(few) == rows(many)
    summary = read_summary(tmp_path / "many/data")
    del summary["complete"]
    DataFolder(tmp_path / "many/data", tmp_path / "many/data").write_summary(summary)
    shard_file(tmp_path / "many/data", 3).unlink()
    assert rows(prepare(tmp_path / "many", tokenizer)) == rows(many)
    assert {name: content for name, content in contents(tmp_path / "many").items() if "shard" in name} == {
        name: content for name, content in expected.items() if "shard" in name
    }


def test_locations_of_rows(tmp_path: Path, tokenizer: Tokenizer, small):
    train = [
        write(tmp_path / "a.tsv", [*TOY[:70], ("", "blank"), *TOY[70:80]]),
        write(tmp_path / "b.tsv", TOY),
    ]
    prepared = prepare(tmp_path, tokenizer, config(tmp_path, train))
    a, b = tmp_path / "a.tsv", tmp_path / "b.tsv"
    assert prepared.train.encoded().locate([0, 69, 70, 79, 80, 379]) == [
        *(f"{a}:1", f"{a}:70", f"{a}:72", f"{a}:81", f"{b}:1", f"{b}:300")
    ]


# ------------------------------------------------------------------------------------ reading from a position


@pytest.mark.parametrize("kind", ["text", "tsv", "tsv.gz", "jsonl", "toy", "parquet"])
def test_reading_continues_at_any_block(tmp_path: Path, kind: str):
    import pyarrow as pa
    import pyarrow.parquet as pq

    records = [{"en": source, "fr": target} for source, target in TOY]
    lines = {"tsv": ["\t".join(pair) for pair in TOY], "jsonl": list(map(json.dumps, records))}
    for name, texts in (*lines.items(), ("en", [p.source for p in TOY]), ("fr", [p.target for p in TOY])):
        (tmp_path / f"a.{name}").write_text("\ufeff" + "\r\n".join(texts), encoding="utf-8", newline="")
    (tmp_path / "a.tsv.gz").write_bytes(gzip.compress((tmp_path / "a.tsv").read_bytes()))
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "a.parquet")
    fields = {"source_field": "en", "target_field": "fr"}
    given = {
        "text": {"source": tmp_path / "a.en", "target": tmp_path / "a.fr"},
        "toy": {"toy": "validation"},
        "jsonl": {"jsonl": tmp_path / "a.jsonl", **fields},
        "parquet": {"parquet": tmp_path / "a.parquet", **fields},
    }.get(kind, {"tsv": tmp_path / f"a.{kind}"})
    blocks = list(read_blocks(corpus(**given), size=70))
    assert [block.first for block in blocks] == [1, 71, 141, 211, 281]
    for number, block in enumerate(blocks, start=1):
        assert list(read_blocks(corpus(**given), size=70, start=block.end)) == blocks[number:]


def test_unequal_line_counts_are_reported_after_continuing(tmp_path: Path):
    (tmp_path / "a.en").write_text("a\n" * 30)
    (tmp_path / "a.fr").write_text("b\n" * 25)
    spec = corpus(source=tmp_path / "a.en", target=tmp_path / "a.fr")
    [first] = islice(read_blocks(spec, size=10), 1)
    with pytest.raises(DataError, match=r"a\.en has 30 lines but .*a\.fr has 25 lines"):
        list(read_blocks(spec, size=10, start=first.end))


# ----------------------------------------------------------------------------------------------------- damage


@pytest.mark.parametrize(
    ("how", "place"),
    [
        *product(["flipped", "cut"], [0.001, 0.02, 0.3, 0.6, 0.999]),
        *product(["gone", "empty", "other"], [0.0]),
    ],
)
def test_a_damaged_shard_is_named_and_encoded_again_alone(
    tmp_path: Path, tokenizer: Tokenizer, small, caplog, how: str, place: float
):
    before = rows(prepare(tmp_path, tokenizer))
    files, file = contents(tmp_path), shard_file(tmp_path / "data", 2)
    untouched = {
        other: other.stat().st_mtime_ns for other in (tmp_path / "data").glob("shard-*") if other != file
    }
    content = bytearray(file.read_bytes())
    content[int(place * len(content))] ^= 4
    damaged = {"flipped": content, "cut": content[: int(place * len(content))], "empty": b""}
    file.unlink()
    if how == "other":
        file.write_bytes(shard_file(tmp_path / "data", 1).read_bytes())
    elif how != "gone":
        file.write_bytes(damaged[how])
    caplog.clear()
    assert rows(prepare(tmp_path, tokenizer)) == before
    [warning] = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warning.startswith(f"{file}: ") and warning.endswith("; encoding this shard again")
    assert contents(tmp_path) == files
    assert {other: other.stat().st_mtime_ns for other in untouched} == untouched


def test_a_damaged_shard_is_kept_until_the_new_one_is_complete(tmp_path: Path, tokenizer: Tokenizer, small):
    prepare(tmp_path, tokenizer)
    before, file = contents(tmp_path), shard_file(tmp_path / "data", 2)
    damaged = before[file.name][:-1] + b"x"
    file.write_bytes(damaged)

    def full(operation: Operation) -> None:
        if operation.name == "os.fsync" and file.name in operation.path.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with on_file_operation(full), pytest.raises(StorageError, match="No space left on device"):
        prepare(tmp_path, tokenizer)
    assert contents(tmp_path) == {**before, file.name: damaged}
    prepare(tmp_path, tokenizer)
    assert contents(tmp_path) == before


def test_a_shard_is_not_replaced_by_one_with_other_contents(tmp_path: Path, tokenizer: Tokenizer, small):
    """Another version of SentencePiece may give other ids."""

    class Other(Tokenizer):
        def encode_source(self, texts: list[str]) -> list[list[int]]:
            return [ids[::-1] for ids in super().encode_source(texts)]

    before = rows(prepare(tmp_path, tokenizer))
    files, file = contents(tmp_path), shard_file(tmp_path / "data", 2)
    file.write_bytes(files[file.name][:-1] + b"x")
    damaged = contents(tmp_path)
    message = f"{file}: encoding this shard again gives other contents than it had"
    with pytest.raises(DataError, match=message):
        prepare(tmp_path, Other(tokenizer.files[0].parent))
    assert contents(tmp_path) == damaged
    assert rows(prepare(tmp_path, tokenizer)) == before


@pytest.mark.parametrize("how", ["flipped", "cut"])
def test_a_window_is_verified_in_each_epoch(tmp_path: Path, tokenizer: Tokenizer, small, how: str):
    train = prepare(tmp_path, tokenizer, config(tmp_path, window_pairs=100)).train
    windows = [(epoch, window) for epoch in (0, 1) for window in range(len(train.windows(epoch)))]
    assert sum(len(train.open(Position(*window))) for window in windows) == 2 * len(TOY)
    file = shard_file(tmp_path / "data", 2)
    with file.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        if how == "cut":
            stream.truncate()
        else:
            stream.write(b"x")
    with pytest.raises(DataError, match=f"{file}: damaged"):
        for window in windows:
            train.open(Position(*window))


def test_a_single_window_is_verified_in_its_second_epoch(tmp_path: Path, tokenizer: Tokenizer, small):
    """Also if it was verified just before the first one, as at the start of a run."""
    train = prepare(tmp_path, tokenizer).train
    train.open(Position())
    file = shard_file(tmp_path / "data", 2)
    with file.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        stream.write(b"x")
    with pytest.raises(DataError, match=f"{file}: damaged"):
        train.open(Position(1))


def test_a_window_whose_shards_another_run_replaces_stays_readable(tmp_path: Path, tokenizer, small):
    train = prepare(tmp_path, tokenizer).train
    for file in (tmp_path / "data").glob("shard-*"):
        (tmp_path / "new").write_bytes(b"shorter")
        (tmp_path / "new").replace(file)
    assert sum(len(train.open(Position(1, window))) for window in range(len(train.windows(1)))) == len(TOY)


@pytest.mark.parametrize("changed", ["LAYOUT", "SHARD", "BUCKET"])
@pytest.mark.parametrize("larger", [False, True])
def test_shards_of_another_layout_are_replaced(
    tmp_path: Path, tokenizer: Tokenizer, small, monkeypatch, changed: str, larger: bool
):
    old = {"LAYOUT": LAYOUT, "SHARD": 60, "BUCKET": 100}[changed]
    (tmp_path / "expected").mkdir()
    prepare(tmp_path, tokenizer)
    (tmp_path / "data/summary.json").unlink()  # so that the encoding is resumed
    module = encode_shards if changed == "SHARD" else encode_folder
    monkeypatch.setattr(module, changed, old + (30 if larger else -30))
    data = config(tmp_path)
    expected = prepare(tmp_path / "expected", tokenizer, data)
    assert rows(prepare(tmp_path, tokenizer, data)) == rows(expected)
    assert contents(tmp_path) == contents(tmp_path / "expected")


@pytest.mark.parametrize("name", ["first", "pairs", "ends", "kept", "dropped", "corpus"])
def test_a_kept_shard_with_damaged_metadata_is_encoded_again(
    tmp_path: Path, tokenizer: Tokenizer, small, name: str
):
    pairs = [*TOY[:59], ("", "empty"), *TOY[60:]]
    data = config(tmp_path, write(tmp_path / "train.tsv", pairs))
    prepare(tmp_path, tokenizer, data)
    files, file = contents(tmp_path), shard_file(tmp_path / "data", 0)
    key = f'\\"{name}\\": '.encode()
    before, after = file.read_bytes().split(key)
    digit = re.search(rb"\d", after).start()
    damaged = after[:digit] + bytes([after[digit] ^ 1]) + after[digit + 1 :]
    (tmp_path / "data/summary.json").unlink()  # so that the encoding is resumed
    file.write_bytes(before + key + damaged)
    with pytest.raises(ModelError, match="damaged"):
        Shard(file)
    prepare(tmp_path, tokenizer, data)
    assert contents(tmp_path) == files


@pytest.mark.parametrize("name", ["sha256", "source_length", "number", "buckets", "data_offsets", "shard"])
def test_a_shard_with_a_damaged_name_is_encoded_again(
    tmp_path: Path, tokenizer: Tokenizer, caplog, name: str
):
    before = rows(prepare(tmp_path, tokenizer))
    file = shard_file(tmp_path / "data", 0)
    content = file.read_bytes()
    file.write_bytes(content.replace(f'"{name}"'.encode(), f'"x{name[1:]}"'.encode(), 1))
    assert rows(prepare(tmp_path, tokenizer)) == before
    assert f"{file}: damaged" in caplog.text
    assert file.read_bytes() == content


@pytest.mark.parametrize("code", [errno.EACCES, errno.EMFILE, errno.ENOMEM])
def test_a_shard_that_cannot_be_read_is_kept(tmp_path: Path, tokenizer: Tokenizer, monkeypatch, code: int):
    prepare(tmp_path, tokenizer)
    file, before = shard_file(tmp_path / "data", 0), contents(tmp_path)
    real = Path.open

    def fail(self: Path, *args, **keys):
        if self == file:
            raise OSError(code, os.strerror(code), str(self))
        return real(self, *args, **keys)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", fail)
        with pytest.raises(StorageError, match=f"{file}: cannot read: {os.strerror(code)}"):
            prepare(tmp_path, tokenizer)
    assert contents(tmp_path) == before


def test_a_shard_on_damaged_sectors_is_encoded_again(tmp_path: Path, tokenizer: Tokenizer, monkeypatch):
    before = rows(prepare(tmp_path, tokenizer))
    file, real = shard_file(tmp_path / "data", 0), Path.open
    inode = file.stat().st_ino

    def fail(self: Path, *args, **keys):
        if self == file and file.stat().st_ino == inode:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(self))
        return real(self, *args, **keys)

    with file.open("rb"), monkeypatch.context() as patch:  # open, so that the inode is not used again
        patch.setattr(Path, "open", fail)
        assert rows(prepare(tmp_path, tokenizer)) == before


def test_a_disk_that_damages_every_shard_is_a_storage_error(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch
):
    def verify(self: Shard, *_) -> None:
        raise ModelError(f"{self.file}: damaged")

    monkeypatch.setattr(Shard, "verify", verify)
    with pytest.raises(StorageError, match="check the disk"):
        prepare(tmp_path, tokenizer)


def test_shards_of_other_inputs_are_replaced(tmp_path: Path, tokenizer: Tokenizer, small):
    prepare(tmp_path, tokenizer)
    shorter = config(tmp_path, write(tmp_path / "train.tsv", TOY[:100]))
    assert text_of(prepare(tmp_path, tokenizer, shorter), tokenizer) == TOY[:100]
    assert len(list((tmp_path / "data").glob("shard-*"))) == 2


def test_obsolete_files_are_removed_and_those_of_others_kept(tmp_path: Path, tokenizer: Tokenizer):
    """Obsolete files also remain if a process is killed after it has written the summary."""
    before = rows(prepare(tmp_path, tokenizer))
    own = set(contents(tmp_path))
    others = {"shard-00000.safetensors.bak", "shard-00099.bak", "shard-99.safetensors", "shard-x", "notes"}
    for name in (*others, "shard-00001.safetensors", "shard-100000.safetensors", "train.arrow"):
        (tmp_path / "data" / name).write_text("x")
    assert rows(prepare(tmp_path, tokenizer)) == before
    assert set(contents(tmp_path)) == own | others
    assert text_of(prepare(tmp_path, tokenizer, config(tmp_path, max_length=100)), tokenizer) == TOY
    assert set(contents(tmp_path)) == own | others  # after encoding, too


def test_data_of_an_older_layout_is_encoded_again(tmp_path: Path, tokenizer: Tokenizer, caplog):
    """With the fingerprint that 84697cc computed, so that its runs resume."""
    data = config(tmp_path)
    columns = {"source_column": 0, "target_column": 1}
    settings = {
        "format": 2,
        "data": {
            "train": [{"tsv": str(tmp_path / "train.tsv"), **columns}],
            "validation": [{"tsv": str(tmp_path / "validation.tsv"), **columns, "weight": 1.0}],
            **{"max_length": 256, "bad_lines": "error", "subword_sampling": None},
        },
        "seed": 1,
        "tokenizer": tokenizer.fingerprint,
    }
    hashes = [content_hash(each) for each in (*data.train, *data.validation)]
    fingerprint = hashlib.sha256(json.dumps([settings, hashes], sort_keys=True).encode()).hexdigest()
    (tmp_path / "data").mkdir()
    for name in ("train.arrow", "manifest.json", "validation.jsonl"):
        (tmp_path / "data" / name).write_text("{}")
    summary = {"fingerprint": fingerprint, "kept": [300], "dropped": {}}
    (tmp_path / "data/summary.json").write_text(json.dumps(summary))
    for times in (1, 1):
        prepared = prepare_data(data, tokenizer, tmp_path / "data", seed=1, trained_on=fingerprint)
        assert text_of(prepared, tokenizer) == TOY
        assert (
            caplog.text.count("was written by another version of mtrain; encoding the corpus again") == times
        )
    assert sorted(contents(tmp_path)) == ["shard-00000.safetensors", "summary.json", "validation.jsonl"]


def test_a_file_that_is_not_a_shard_is_a_model_error(tmp_path: Path):
    two = b"\x02" + b"\0" * 7  # the length of the header
    for content in (b"", b"\xff" * 100, two + b"{}", two + b"[]", two + b"12", two + b'""'):
        (tmp_path / "shard").write_bytes(content)
        with pytest.raises(ModelError, match="shard: damaged"):
            Shard(tmp_path / "shard")


# ------------------------------------------------------------------------------------------------------ kills


FILTERS = {"max_words": 7, "duplicates": "target"}


@pytest.mark.parametrize(
    ("kills", "workers", "filters"),
    [
        (1, 2, FILTERS),
        pytest.param(2, 2, FILTERS, marks=pytest.mark.slow),
        pytest.param(2, 1, None, marks=pytest.mark.slow),
    ],
)
def test_encoding_that_is_killed_resumes_to_identical_shards(
    tmp_path: Path, tokenizer: Tokenizer, small, kills: int, workers: int, filters
):
    """The worker processes end, too."""
    pairs = [Pair(f"{source} {i}", target) for i in range(12) for source, target in TOY]
    data = config(tmp_path, write(tmp_path / "train.tsv", pairs), {"holdout": 30}, filters=filters)
    for name in ("expected", "killed"):
        (tmp_path / name).mkdir()
    expected = rows(prepare(tmp_path / "expected", tokenizer, data))
    folder, generator, kept = tmp_path / "killed/data", random.Random(3), 0
    for _ in range(kills):
        reading, writing = os.pipe()

        def work() -> None:
            os.dup2(writing, 2)  # noqa: B023 - which worker processes inherit
            os.close(writing)  # noqa: B023
            prepare_data(data, tokenizer, folder, 1, workers=workers)

        child = start(work)
        os.close(writing)
        enough = kept + 5
        assert not wait_until(child, lambda: len(list(folder.glob("shard-*"))) >= enough)  # noqa: B023
        time.sleep(generator.uniform(0, 0.01))
        os.kill(child, signal.SIGKILL)
        assert wait(child).exit_code == -signal.SIGKILL
        with open(reading) as pipe:  # noqa: PTH123
            pipe.read()  # ends when the last process has ended that could write to it
        found = len(list(folder.glob("shard-*")))
        assert kept + 5 <= found < 60 and not read_summary(folder).get("complete")  # while it encoded
        kept = found
    assert rows(prepare(tmp_path / "killed", tokenizer, data)) == expected
    same = contents(tmp_path / "expected")
    assert {name: value for name, value in contents(tmp_path / "killed").items() if name in same} == same


def test_a_full_disk_leaves_no_temporary_file(tmp_path: Path, tokenizer: Tokenizer, small):
    """The shards that are complete are kept."""

    def full(operation: Operation) -> None:
        if operation.name == "os.fsync" and "shard-00002" in operation.path.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    message = r"shard-00002\.safetensors: cannot write: No space left on device"
    with on_file_operation(full), pytest.raises(StorageError, match=message):
        prepare(tmp_path, tokenizer)
    names = ["shard-00000.safetensors", "shard-00001.safetensors", "summary.json", "validation.jsonl"]
    assert sorted(contents(tmp_path)) == names
    assert text_of(prepare(tmp_path, tokenizer), tokenizer) == TOY


def test_a_disk_that_is_full_when_the_tokenizer_is_copied(tmp_path: Path, tokenizer: Tokenizer):
    def full(operation: Operation) -> None:
        if operation.name == "open" and operation.path.match("data/.tokenizer.tmp/joint.model"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with on_file_operation(full), pytest.raises(StorageError) as caught:
        prepare(tmp_path, tokenizer)
    assert str(caught.value) == f"{tmp_path / 'data/tokenizer'}: cannot write: No space left on device"
    assert text_of(prepare(tmp_path, tokenizer), tokenizer) == TOY


def test_a_kill_at_any_rename_or_removal_leaves_what_the_next_start_completes(
    tmp_path: Path, tokenizer: Tokenizer, small
):
    """The folder contains more shards of an earlier corpus, which are removed at the end."""
    prepare(tmp_path, tokenizer, config(tmp_path, write(tmp_path / "train.tsv", TOY[:150])))
    data = config(tmp_path, write(tmp_path / "train.tsv", TOY[200:280]))
    shutil.copytree(tmp_path / "data", tmp_path / "earlier")
    prepare(tmp_path, tokenizer, data)
    expected = contents(tmp_path)
    assert len(list((tmp_path / "earlier").glob("shard-*"))) == 3 and len(expected) == 4
    done = 0

    def kill(operation: Operation) -> None:  # from one operation on, none succeeds
        nonlocal done
        is_counted = operation.name in ("os.rename", "os.remove")
        if is_counted and operation.path.is_relative_to(tmp_path / "data"):
            if done >= allowed:
                raise Killed
            done += 1

    for allowed in count():  # noqa: B007
        done = 0
        shutil.rmtree(tmp_path / "data")
        shutil.copytree(tmp_path / "earlier", tmp_path / "data")
        try:
            with on_file_operation(kill):
                prepare(tmp_path, tokenizer, data)
        except Killed:
            prepare(tmp_path, tokenizer, data)
            assert contents(tmp_path) == expected
        else:
            break
    assert allowed > 8


def test_an_encoding_that_is_resumed_says_so(tmp_path: Path, tokenizer: Tokenizer, small, caplog):
    with on_file_operation(interrupt_at("shard-00001")), pytest.raises(KeyboardInterrupt):
        prepare(tmp_path, tokenizer)
    assert caplog.text.count(f"data: encoding the corpus into {tmp_path / 'data'}") == 1
    caplog.clear()
    prepare(tmp_path, tokenizer)
    assert f"data: resuming the encoding of the corpus into {tmp_path / 'data'}" in caplog.text
    assert "data: encoding" not in caplog.text


def interrupt_at(name: str) -> Callable[[Operation], None]:
    """Interrupt before the first operation on a file whose name contains `name`."""

    def interrupt(operation: Operation) -> None:
        if name in operation.path.name:
            raise KeyboardInterrupt

    return interrupt


def test_encoding_resumes_after_the_last_complete_shard(tmp_path: Path, tokenizer: Tokenizer, small):
    class Interrupted(Tokenizer):
        limit = 10

        def encode_source(self, texts: list[str]) -> list[list[int]]:
            self.limit -= 1
            if not self.limit:
                raise KeyboardInterrupt
            return super().encode_source(texts)

    class Counting(Tokenizer):
        calls = 0

        def encode_source(self, texts: list[str]) -> list[list[int]]:
            self.calls += 1
            return super().encode_source(texts)

    folder = tokenizer.files[0].parent
    with pytest.raises(KeyboardInterrupt):
        prepare(tmp_path, Interrupted(folder))
    counting = Counting(folder)
    assert text_of(prepare(tmp_path, counting), tokenizer) == TOY
    assert counting.calls == 6  # of 15: three shards were complete


# -------------------------------------------------------------------------------------------------- processes


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen]:
    """The worker processes that were started."""
    started: list[subprocess.Popen] = []

    class Noted(WorkerProcess):
        def __init__(self, *arguments) -> None:
            super().__init__(*arguments)
            started.append(self.process)

    monkeypatch.setattr(pool, "WorkerProcess", Noted)
    return started


def parallel(folder: Path, tokenizer: Tokenizer, data: DataConfig) -> PreparedData:
    return prepare_data(data, tokenizer, folder / "data", seed=1, workers=2)


def write_parts(folder: Path) -> dict[str, str]:
    """Write three files that do not end where shards end; returns the corpus section for a config."""
    for number, (first, last) in enumerate(pairwise((0, 10, 250, 300))):
        write(folder / f"part-{number}.tsv", TOY[first:last])
    return {"tsv": str(folder / "part-*.tsv")}


def test_several_processes_write_the_same_shards(
    tmp_path: Path, tokenizer: Tokenizer, small, processes, monkeypatch, caplog
):
    """Corpora of every kind, with unreadable pairs."""
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    records = [{"en": source, "fr": target} for source, target in TOY]
    lines = "".join(f"{s}\t{t}\n" for s, t in TOY).replace("\t", " ", 1).encode()
    (tmp_path / "t.tsv.gz").write_bytes(gzip.compress(lines))
    objects = "".join(json.dumps(record) + "\n" for record in records[:70])
    (tmp_path / "a.jsonl").write_text(objects + '{"en": "no French"}\nnot JSON\n')
    pq.write_table(pa.Table.from_pylist([*records[70:140], {"en": "null"}]), tmp_path / "a.parquet")
    fields = {"source_field": "en", "target_field": "fr"}
    tables = [{kind: str(tmp_path / f"a.{kind}"), **fields} for kind in ("jsonl", "parquet")]
    train = [{"tsv": str(tmp_path / "t.tsv.gz")}, {"toy": "test"}, *tables, write_parts(tmp_path)]
    data = config(tmp_path, train, {"holdout": 20}, bad_lines="skip")
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    one = prepare(tmp_path / "one", tokenizer, data)
    two = parallel(tmp_path / "two", tokenizer, data)
    assert rows(one) == rows(two) and len(processes) == 2
    assert dropped(caplog)["bad"] == 4
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert all(process.poll() is not None for process in processes)


def test_several_files_are_encoded_like_one(tmp_path: Path, tokenizer: Tokenizer, small):
    """A shard is encoded again from the middle of the second file."""
    several = config(tmp_path, write_parts(tmp_path))
    for name in ("one", "several"):
        (tmp_path / name).mkdir()
    one = prepare(tmp_path / "one", tokenizer, config(tmp_path))
    assert rows(prepare(tmp_path / "several", tokenizer, several)) == rows(one)
    files, file = contents(tmp_path / "several"), shard_file(tmp_path / "several/data", 2)
    file.unlink()
    assert rows(prepare(tmp_path / "several", tokenizer, several)) == rows(one)
    assert contents(tmp_path / "several") == files


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_bad_line_that_is_first_found_while_encoding_is_an_error(
    tmp_path: Path, tokenizer: Tokenizer, small, workers: int
):
    data = config(tmp_path, bad_lines="skip")
    scanner = CorpusScanner(RawFiles(data), seed=1)
    assert scanner.result.pairs == 300
    file = Path(data.train[0].tsv)
    file.write_bytes(file.read_bytes().replace(b"\t", b" ", 1))  # while the corpus is prepared
    strict = data.model_copy(update={"bad_lines": "error"})
    with pytest.raises(DataError, match=r"train\.tsv:1: 1 column"):
        prepare_data(strict, tokenizer, tmp_path / "data", 1, scanner=scanner, workers=workers)


def test_encoding_continues_without_processes_that_fail(
    tmp_path: Path, tokenizer: Tokenizer, small, monkeypatch, caplog
):
    class Failing(WorkerProcess):
        def __init__(self, *arguments) -> None:
            if not caplog.text.count("cannot start"):
                raise BlockingIOError(11, "Resource temporarily unavailable")
            super().__init__(*arguments)
            self.process.kill()

    monkeypatch.setattr(pool, "WorkerProcess", Failing)
    assert text_of(parallel(tmp_path, tokenizer, config(tmp_path)), tokenizer) == TOY
    assert "cannot start a worker process: [Errno 11] Resource temporarily unavailable" in caplog.text
    assert caplog.text.count("was killed by SIGKILL, perhaps because memory ran out; starting another") == 1
    assert caplog.text.count("was killed by SIGKILL, perhaps because memory ran out; its work continues") == 1


def test_progress_is_logged_without_a_terminal(
    tmp_path: Path, tokenizer: Tokenizer, small, monkeypatch, caplog
):
    monkeypatch.setattr(progress_bar, "LOG_EVERY", 0)
    prepare(tmp_path, tokenizer)
    lines = [line for line in caplog.messages if line.startswith("data: encoded")]
    assert len(lines) == 15 and lines[-1].startswith("data: encoded 300 of 300 pairs, ")
    assert lines[-1].endswith(" pairs/s, 0 s left")


def test_pairs_that_cannot_be_read_do_not_shift_the_others(
    tmp_path: Path, tokenizer: Tokenizer, small, monkeypatch, caplog
):
    """Here at the borders of shards, which have 60 lines each."""
    monkeypatch.setattr(progress_bar, "LOG_EVERY", 0)
    bad = {*range(20), 58, 59, 60, 61, 119, 180, 299}  # the first block has no pair
    lines = ["bad\n" if i in bad else f"{source}\t{target}\n" for i, (source, target) in enumerate(TOY)]
    (tmp_path / "train.tsv").write_text("".join(lines), encoding="utf-8")
    data = config(tmp_path, {"tsv": str(tmp_path / "train.tsv")}, bad_lines="skip")
    for _ in range(2):  # encoded, then one shard again
        prepared = prepare(tmp_path, tokenizer, data)
        assert text_of(prepared, tokenizer) == [pair for i, pair in enumerate(TOY) if i not in bad]
        assert dropped(caplog) == {"bad": len(bad)}
        places = prepared.train.encoded().locate([0, 63, 272])
        assert places == [f"{tmp_path / 'train.tsv'}:{n}" for n in (21, 88, 299)]
        last = [line for line in caplog.messages if line.startswith("data: encoded")][-1]
        assert last.startswith("data: encoded 273 of 273 pairs, ")
        shard_file(tmp_path / "data", 4).unlink()
