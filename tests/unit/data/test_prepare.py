"""Encoded corpora: encoded once, again when an input changes, with every dropped pair counted."""

import json
import logging
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrain.data import Pair
from mtrain.data.epochs.schedule import Position
from mtrain.data.preparing import encode_shards
from mtrain.data.reading.digests import RawFiles, read_digests
from mtrain.data.rewriting import reencode
from mtrain.data.scanning.samples import HoldoutSampler, draw_candidates
from mtrain.data.scanning.scanner import CorpusScanner
from mtrain.errors import DataError, ModelError, StorageError
from mtrain.processes import pool
from mtrain.storage import temporary
from mtrain.tokenizer.tokenizer import Tokenizer
from tests.support import tokenizers
from tests.support.corpora import block_of
from tests.support.encoding import TOY, config, dropped, prepare_data, rows, rows_of, text_of, write

pytestmark = pytest.mark.usefixtures("logs")

EOS = 3


@pytest.fixture
def encodings() -> Iterator[list[str]]:
    """A message for each time that the corpus is encoded."""
    done: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if re.search("encoding (of )?the corpus into", record.getMessage()):
                done.append(record.getMessage())

    handler, logger = Collect(), logging.getLogger("mtrain.data.preparing.encode_folder")
    logger.addHandler(handler)
    yield done
    logger.removeHandler(handler)


# --------------------------------------------------------------------------------------------------- encoding


def test_encoded_pairs_decode_to_their_text(tmp_path: Path, tokenizer: Tokenizer):
    prepared = prepare_data(config(tmp_path), tokenizer, tmp_path / "data", seed=1)
    assert len(prepared.train) == len(TOY)
    assert text_of(prepared, tokenizer) == TOY
    assert all(source[-1] == target[-1] == EOS for source, target in rows(prepared))
    assert prepared.train.encoded().source_lengths.tolist() == [len(source) for source, _ in rows(prepared)]
    assert prepared.train.encoded().target_lengths.tolist() == [len(target) for _, target in rows(prepared)]
    assert prepared.validation == TOY[:3]


def test_fetch_returns_rows_in_the_requested_order(tmp_path: Path, tokenizer: Tokenizer):
    prepared = prepare_data(config(tmp_path), tokenizer, tmp_path / "data", seed=1)
    whole = rows(prepared)
    source, target = prepared.train.encoded().fetch([7, 2, 7, 299])
    assert source.to_lists() == [whole[i][0] for i in (7, 2, 7, 299)]
    assert target.to_lists() == [whole[i][1] for i in (7, 2, 7, 299)]
    assert [len(column.lengths) for column in prepared.train.encoded().fetch([])] == [
        0,
        0,
    ]  # a rank without rows


def test_the_block_size_does_not_matter(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(encode_shards, "BLOCK", 7)
    prepared = prepare_data(config(tmp_path), tokenizer, tmp_path / "data", seed=1)
    assert text_of(prepared, tokenizer) == TOY


@settings(deadline=None, max_examples=15)
@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\n\t\0"), min_size=1), min_size=1))
def test_any_validation_text_is_read_back(tmp_path_factory, tokenizer: Tokenizer, texts: list[str]):
    folder = tmp_path_factory.mktemp("any")
    texts = ["first", *(text.strip("\r") for text in texts)]
    validation = write(folder / "v.tsv", [(text, text + ".") for text in texts])
    data = config(folder, validation=validation)
    for _ in range(2):  # encoded, then reused
        prepared = prepare_data(data, tokenizer, folder / "data", seed=1)
        assert prepared.validation == [(text, text + ".") for text in texts]


def test_validation_pairs_are_drawn_by_the_seed(tmp_path: Path, tokenizer: Tokenizer, caplog):
    validation = write(tmp_path / "validation.tsv", TOY[:20])
    prepared = prepare_data(config(tmp_path, validation=validation), tokenizer, tmp_path / "data", seed=1)
    drawn = prepared.with_sampled_validation(5, seed=1)
    assert "validation: 5 of 20 pairs, drawn by the seed" in caplog.text
    assert len(drawn.directions) == len(drawn.validation) == 5 and set(drawn.validation) < set(TOY[:20])
    assert drawn == prepared.with_sampled_validation(5, seed=1)
    assert drawn.validation != prepared.with_sampled_validation(5, seed=2).validation
    assert prepared.with_sampled_validation(20, seed=1) == prepared.with_sampled_validation(None, seed=1)


def test_each_pair_has_the_weight_of_its_corpus(tmp_path: Path, tokenizer: Tokenizer):
    train = [
        {**write(tmp_path / "a.tsv", [*TOY[:5], ("", "empty")]), "weight": 2.5},
        write(tmp_path / "b.tsv", TOY[5:8]),
        {**write(tmp_path / "c.tsv", []), "weight": 9.0},
        {**write(tmp_path / "d.tsv", TOY[8:9]), "weight": 0.1},
    ]
    prepared = prepare_data(config(tmp_path, train), tokenizer, tmp_path / "data", seed=1)
    assert prepared.train.encoded().weights.tolist() == [2.5] * 5 + [1.0] * 3 + [0.1]
    assert text_of(prepared, tokenizer) == TOY[:9]


# ------------------------------------------------------------------------------------------------------ reuse


def test_unchanged_data_is_reused(tmp_path: Path, tokenizer: Tokenizer, encodings: list[str]):
    data = config(tmp_path)
    first = prepare_data(data, tokenizer, tmp_path / "data", seed=1)
    stamp = (tmp_path / "data" / "shard-00000.safetensors").stat().st_mtime_ns
    second = prepare_data(data, tokenizer, tmp_path / "data", seed=1, trained_on=first.fingerprint)
    assert len(encodings) == 1
    assert (tmp_path / "data" / "shard-00000.safetensors").stat().st_mtime_ns == stamp
    assert second.fingerprint == first.fingerprint
    assert rows(second) == rows(first)
    assert second.validation == first.validation


def test_modification_times_do_not_matter(tmp_path: Path, tokenizer: Tokenizer, encodings: list[str]):
    data = config(tmp_path)
    first = prepare_data(data, tokenizer, tmp_path / "data", seed=1)
    for name in ("train.tsv", "validation.tsv"):
        os.utime(tmp_path / name, (1, 1))
    second = prepare_data(data, tokenizer, tmp_path / "data", seed=1, trained_on=first.fingerprint)
    assert len(encodings) == 1
    assert second.fingerprint == first.fingerprint


def test_new_weights_take_effect_without_encoding(tmp_path: Path, tokenizer: Tokenizer, encodings: list[str]):
    train = write(tmp_path / "train.tsv", TOY)
    first = prepare_data(config(tmp_path, train), tokenizer, tmp_path / "data", seed=1)
    heavier = config(tmp_path, {**train, "weight": 3.0})
    second = prepare_data(heavier, tokenizer, tmp_path / "data", seed=1, trained_on=first.fingerprint)
    assert len(encodings) == 1
    assert set(second.train.encoded().weights) == {3.0}


@pytest.mark.parametrize("name", ["train.tsv", "validation.tsv"])
@pytest.mark.parametrize("same_time", [False, True], ids=["new time", "new size, old time"])
def test_one_changed_byte_changes_the_fingerprint(
    tmp_path: Path, tokenizer: Tokenizer, encodings: list[str], name: str, same_time: bool
):
    data = config(tmp_path)
    first = prepare_data(data, tokenizer, tmp_path / "data", seed=1)
    file = tmp_path / name
    old, content = file.stat().st_mtime_ns, file.read_bytes()
    file.write_bytes(content[:-1] + b"x\n" if same_time else b"X" + content[1:])
    os.utime(file, ns=(old, old if same_time else old + 10**9))
    with pytest.raises(ModelError, match="changed"):
        prepare_data(data, tokenizer, tmp_path / "data", seed=1, trained_on=first.fingerprint)
    assert len(encodings) == 1
    second = prepare_data(data, tokenizer, tmp_path / "data", seed=1)
    assert len(encodings) == 2
    assert second.fingerprint != first.fingerprint


@pytest.mark.parametrize("name", ["train.tsv", "validation.tsv"])
def test_a_file_that_changes_before_it_is_encoded_is_an_error(
    tmp_path: Path, tokenizer: Tokenizer, name: str
):
    data, file = config(tmp_path), tmp_path / name
    expected = rows(prepare_data(data, tokenizer, tmp_path / "expected", seed=1))
    content = file.read_bytes()
    scanner = CorpusScanner(RawFiles(data), 1, tmp_path)
    assert scanner.result.pairs == len(TOY) and scanner.files.content_hashes
    time.sleep(0.05)  # the times of files have a resolution of some milliseconds
    file.write_bytes(content.replace(b"a", b"b"))
    with pytest.raises(DataError, match=f"{name}: changed while it was read; run again"):
        prepare_data(data, tokenizer, tmp_path / "data", seed=1, scanner=scanner)
    file.write_bytes(content)  # the fingerprint is as at the first scan again
    prepared = prepare_data(data, tokenizer, tmp_path / "data", seed=1)
    assert rows(prepared) == expected and prepared.validation == TOY[:3]


def test_a_file_that_a_pattern_no_longer_matches_is_an_error(tmp_path: Path, tokenizer: Tokenizer):
    for number in range(3):
        write(tmp_path / f"part-{number}.tsv", TOY[number * 100 : (number + 1) * 100])
    data = config(tmp_path, {"tsv": str(tmp_path / "part-*.tsv")})
    scanner = CorpusScanner(RawFiles(data), 1, tmp_path)
    assert scanner.result.pairs == len(TOY) and scanner.files.content_hashes
    (tmp_path / "part-2.tsv").rename(tmp_path / "moved.tsv")
    with pytest.raises(DataError, match=r"part-2\.tsv: changed while it was read; run again"):
        prepare_data(data, tokenizer, tmp_path / "data", seed=1, scanner=scanner)
    assert not json.loads((tmp_path / "data/summary.json").read_text()).get("complete")


def test_a_filtered_corpus_that_grows_before_it_is_encoded_is_an_error(tmp_path: Path, tokenizer: Tokenizer):
    data = config(tmp_path, filters={"copied": True})
    scanner = CorpusScanner(RawFiles(data), 1, tmp_path)
    assert scanner.result.pairs == len(TOY) and scanner.files.content_hashes
    with (tmp_path / "train.tsv").open("a") as file:
        file.write("one\tmore\n")
    with pytest.raises(DataError, match=r"train\.tsv: changed while it was read; run again"):
        prepare_data(data, tokenizer, tmp_path / "data", seed=1, scanner=scanner)


def test_a_file_that_loses_its_last_shard_while_it_is_encoded_is_an_error(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch
):
    class Shortening(Tokenizer):
        def encode_source(self, texts: list[str]) -> list[list[int]]:
            time.sleep(0.05)
            write(tmp_path / "train.tsv", TOY[:50])
            return super().encode_source(texts)

    data = config(tmp_path)
    for name in ("BLOCK", "SHARD"):
        monkeypatch.setattr(encode_shards, name, 50)
    with pytest.raises(DataError, match="changed while it was read"):
        prepare_data(data, Shortening(tokenizer.files[0].parent), tmp_path / "data", seed=1)
    assert not json.loads((tmp_path / "data/summary.json").read_text()).get("complete")


def test_a_file_that_may_have_changed_since_the_start_is_not_recorded(tmp_path: Path, tokenizer: Tokenizer):
    """On Windows, only the modification time shows it."""
    data, later = config(tmp_path), time.time() + 1000
    os.utime(tmp_path / "train.tsv", (later, later))
    prepare_data(data, tokenizer, tmp_path / "data", seed=1)
    recorded = json.loads((tmp_path / "data/sources.json").read_text())
    assert list(recorded) == [str(tmp_path / "validation.tsv")]


def test_a_file_that_has_changed_since_its_stamp_was_taken_is_not_recorded(tmp_path: Path, monkeypatch):
    """The times of a file seem older than the start if the clock of a file server is slow."""
    files = [tmp_path / "old", tmp_path / "new", tmp_path / "unknown"]
    for file in files:
        file.write_text("old")
    later = time.time_ns() + 10**12
    monkeypatch.setattr(time, "time_ns", lambda: later)
    data = config(tmp_path, {"tsv": str(files[0])}, {"tsv": str(files[1])})
    raw_files = RawFiles(data)
    files[1].write_text("newer")
    raw_files.digests = dict.fromkeys(files, b"hash of the old text")
    raw_files.record_digests(tmp_path)
    assert list(read_digests(tmp_path)) == files[:1]


def test_a_damaged_record_of_raw_files_is_not_used(tmp_path: Path, tokenizer: Tokenizer):
    data = config(tmp_path)
    first = prepare_data(data, tokenizer, tmp_path / "data", seed=1)
    for content in (b"", b"[]", b"{", b'{"a": 1}', b'{"a": {"stamp": 1}}'):
        (tmp_path / "data/sources.json").write_bytes(content)
        again = prepare_data(data, tokenizer, tmp_path / "data", seed=1, trained_on=first.fingerprint)
        assert again.fingerprint == first.fingerprint


def test_a_rejected_corpus_leaves_the_encoded_data_unchanged(
    tmp_path: Path, tokenizer: Tokenizer, encodings: list[str]
):
    data = config(tmp_path)
    file = tmp_path / "train.tsv"
    content = file.read_bytes()
    first = prepare_data(data, tokenizer, tmp_path / "data", seed=1)
    file.write_bytes(content + b"one\tmore\n")
    with pytest.raises(ModelError):
        prepare_data(data, tokenizer, tmp_path / "data", seed=1, trained_on=first.fingerprint)
    file.write_bytes(content)
    again = prepare_data(data, tokenizer, tmp_path / "data", seed=1, trained_on=first.fingerprint)
    assert len(encodings) == 1
    assert rows(again) == rows(first)


def test_data_with_an_unexpected_fingerprint_is_an_error(tmp_path: Path, tokenizer: Tokenizer):
    data = config(tmp_path)
    with pytest.raises(ModelError):  # the encoded data is gone and the corpus has changed
        prepare_data(data, tokenizer, tmp_path / "data", seed=1, trained_on="0" * 64)
    prepare_data(data, tokenizer, tmp_path / "data", seed=1)
    with pytest.raises(ModelError):
        prepare_data(data, tokenizer, tmp_path / "data", seed=1, trained_on="0" * 64)


def test_deleted_data_is_encoded_again_identically(tmp_path: Path, tokenizer: Tokenizer):
    data = config(tmp_path, validation={"holdout": 10})
    first = prepare_data(data, tokenizer, tmp_path / "data", seed=1)
    before = rows(first)
    second = prepare_data(data, tokenizer, tmp_path / "elsewhere", seed=1, trained_on=first.fingerprint)
    assert rows(second) == before
    assert second.validation == first.validation


@pytest.mark.parametrize(
    "change", ["max_length", "bad_lines", "sampling", "seed", "tokenizer", "validation", "more"]
)
def test_every_input_changes_the_fingerprint(tmp_path: Path, tokenizer: Tokenizer, encodings, change: str):
    train = write(tmp_path / "train.tsv", TOY)
    first = prepare_data(config(tmp_path, train), tokenizer, tmp_path / "data", seed=1)
    keys: dict = {
        "max_length": {"max_length": 30},
        "bad_lines": {"bad_lines": "skip"},
        "sampling": {"subword_sampling": 0.1},
    }.get(change, {})
    if change == "validation":
        keys = {"validation": write(tmp_path / "other.tsv", TOY[:4])}
    if change == "more":
        train = [train, write(tmp_path / "more.tsv", TOY[:4])]
    other = tokenizers.train(tmp_path / "tokenizer", vocab_size=401) if change == "tokenizer" else tokenizer
    second = prepare_data(
        config(tmp_path, train, **keys), other, tmp_path / "data", 2 if change == "seed" else 1
    )
    assert len(encodings) == 2
    assert second.fingerprint != first.fingerprint


@pytest.mark.parametrize("validation", [None, {"holdout": 10}])
def test_pairs_that_were_counted_are_not_read_to_count_them_again(tmp_path, tokenizer: Tokenizer, validation):
    first = prepare_data(config(tmp_path, validation=validation), tokenizer, tmp_path / "data", seed=1)
    data = config(tmp_path, validation=validation, max_length=100)
    scanner = CorpusScanner(RawFiles(data), 1)
    second = prepare_data(data, tokenizer, tmp_path / "data", seed=1, scanner=scanner)
    assert "result" not in vars(scanner)
    assert rows(second) == rows(first) and second.validation == first.validation
    assert second.fingerprint != first.fingerprint


def test_a_changed_local_dataset_is_encoded_again(tmp_path: Path, tokenizer: Tokenizer, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    file = tmp_path / "set" / "data" / "train-00000-of-00001.parquet"
    file.parent.mkdir(parents=True)
    data = config(
        tmp_path, {"hub": str(tmp_path / "set"), "source_field": "source", "target_field": "target"}
    )
    for pairs in (TOY[:5], TOY[:7]):
        pq.write_table(pa.Table.from_pylist([pair._asdict() for pair in pairs]), file)
        prepared = prepare_data(data, tokenizer, tmp_path / "data", seed=1)
        assert text_of(prepared, tokenizer) == pairs


@pytest.mark.parametrize("damage", ["summary.json", "shard-00000.safetensors", "validation.jsonl"])
@pytest.mark.parametrize("how", ["cut", "gone", "empty"])
def test_damaged_data_is_encoded_again(tmp_path: Path, tokenizer: Tokenizer, damage: str, how: str):
    """Damaged as by a full disk, a kill or an interrupted copy."""
    data = config(tmp_path)
    before = rows(prepare_data(data, tokenizer, tmp_path / "data", seed=1))
    file = tmp_path / "data" / damage
    content = file.read_bytes()
    file.unlink()
    if how != "gone":
        file.write_bytes(content[: len(content) // 2] if how == "cut" else b"")
    prepared = prepare_data(data, tokenizer, tmp_path / "data", seed=1)
    assert rows(prepared) == before
    assert prepared.validation == TOY[:3]


def test_an_interrupted_encoding_is_not_reused(tmp_path: Path, tokenizer, monkeypatch):
    class Interrupted(Tokenizer):
        calls = 0

        def encode_source(self, texts: list[str]) -> list[list[int]]:
            self.calls += 1
            if self.calls == 3:
                raise KeyboardInterrupt
            return super().encode_source(texts)

    data = config(tmp_path)
    monkeypatch.setattr(encode_shards, "BLOCK", 50)
    with pytest.raises(KeyboardInterrupt):
        prepare_data(data, Interrupted(tokenizer.files[0].parent), tmp_path / "data", seed=1)
    assert len(prepare_data(data, tokenizer, tmp_path / "data", seed=1).train) == len(TOY)


# ------------------------------------------------------------------------------------------------------ drops


def test_dropped_pairs_are_counted_by_reason(tmp_path: Path, tokenizer: Tokenizer, caplog):
    good = TOY[:4]
    lines = [
        *("\t".join(pair).encode() for pair in good),
        b"\tempty", b"empty\t", b" \t \xc2\xa0", b"\xe2\x80\x8b\tonly a zero-width space",
        b"long " * 50 + b"\tshort", b"short\t" + b"long " * 50,
        b"caf\xe9\tbad", b"bad\tb\0d", b"one column",
    ]  # fmt: skip
    (tmp_path / "t.tsv").write_bytes(b"\n".join(lines) + b"\n")
    data = config(tmp_path, {"tsv": str(tmp_path / "t.tsv")}, max_length=60, bad_lines="skip")
    expected = {"empty": 4, "too long": 2, "bad": 3}
    for _ in range(2):  # encoded, then reused
        prepared = prepare_data(data, tokenizer, tmp_path / "data", seed=1)
        assert text_of(prepared, tokenizer) == good
        assert dropped(caplog) == expected


def test_unreadable_validation_pairs_that_are_skipped_are_counted(tmp_path: Path, tokenizer, caplog):
    (tmp_path / "v.tsv").write_bytes(b"a\tb\none column\ncaf\xe9\tbad\n")
    data = config(tmp_path, bad_lines="skip", validation={"tsv": str(tmp_path / "v.tsv")})
    prepare_data(data, tokenizer, tmp_path / "data", seed=1)
    assert "data.validation: 2 unreadable pair(s) were skipped" in caplog.text


def test_a_start_after_no_pair_was_left_warns_of_nothing(tmp_path: Path, tokenizer: Tokenizer, caplog):
    with pytest.raises(DataError, match="no training pair is left; dropped: 300 too long"):
        prepare_data(config(tmp_path, max_length=2), tokenizer, tmp_path / "data", seed=1)
    prepare_data(config(tmp_path), tokenizer, tmp_path / "data", seed=1)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_bad_line_is_an_error_by_default(tmp_path: Path, tokenizer: Tokenizer):
    (tmp_path / "t.tsv").write_bytes(b"a\tb\ncaf\xe9\tbad\n")
    with pytest.raises(DataError, match=r"t\.tsv:2"):
        prepare_data(config(tmp_path, {"tsv": str(tmp_path / "t.tsv")}), tokenizer, tmp_path / "data", seed=1)


@pytest.mark.parametrize("side", [0, 1])
def test_the_length_limit_is_exact(tmp_path: Path, tokenizer: Tokenizer, side: int, caplog):
    long = "oranges and pineapples and tea"
    pair = ("tea", long) if side else (long, "tea")
    length = len((tokenizer.encode_target if side else tokenizer.encode_source)([long])[0]) + 1  # and EOS
    train = write(tmp_path / "t.tsv", [("tea", "tea"), pair])
    fits = prepare_data(config(tmp_path, train, max_length=length), tokenizer, tmp_path / "data", seed=1)
    assert max(map(len, rows(fits)[1])) == length
    over = prepare_data(config(tmp_path, train, max_length=length - 1), tokenizer, tmp_path / "data", seed=1)
    assert len(over.train) == 1
    assert dropped(caplog) == {"too long": 1}


def test_no_validation_pairs_is_an_error(tmp_path: Path, tokenizer: Tokenizer):
    data = config(tmp_path, validation=write(tmp_path / "v.tsv", []))
    with pytest.raises(DataError, match="validation"):
        prepare_data(data, tokenizer, tmp_path / "data", seed=1)


# --------------------------------------------------------------------------------------------------- held out


def test_held_out_pairs_are_not_in_training(tmp_path: Path, tokenizer: Tokenizer, caplog):
    prepared = prepare_data(
        config(tmp_path, validation={"holdout": 25}), tokenizer, tmp_path / "data", seed=1
    )
    assert len(prepared.validation) == len(set(prepared.validation)) == 25
    assert sorted([*text_of(prepared, tokenizer), *prepared.validation]) == sorted(TOY)
    assert dropped(caplog) == {"held out": 25}


def test_holdout_is_drawn_by_seed(tmp_path: Path, tokenizer: Tokenizer):
    data = config(tmp_path, validation={"holdout": 25})
    drawn = [
        prepare_data(data, tokenizer, tmp_path / f"data{i}", seed=seed).validation
        for i, seed in enumerate((1, 1, 2))
    ]
    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2]


def draw(pairs: list[Pair], count: int, seed: int) -> list[Pair]:
    holdout = HoldoutSampler(count)
    holdout.add(draw_candidates(block_of(pairs), 0, str(seed), count, holdout.max_digest))
    return holdout.pairs(1)[0]


def test_every_pair_is_equally_likely_to_be_held_out():
    pairs = [Pair(str(i), str(i)) for i in range(40)]
    counts = dict.fromkeys(pairs, 0)
    for seed in range(400):
        for pair in draw(pairs, 10, seed):
            counts[pair] += 1
    assert min(counts.values()) > 60  # 100 expected, deviation below 9
    assert max(counts.values()) < 140


def test_an_edited_corpus_keeps_its_held_out_pairs():
    pairs = [Pair(str(i), str(i)) for i in range(1000)]
    drawn = draw(pairs, 100, 1)
    grown = draw([Pair("first", "1"), *pairs, Pair("last", "2")], 100, 1)
    assert len(grown) == 100 and set(grown) - {Pair("first", "1"), Pair("last", "2")} <= set(drawn)
    removed, remaining = drawn[0], drawn[1:]
    shrunk = draw([pair for pair in pairs if pair != removed], 100, 1)
    assert set(remaining) < set(shrunk) and len(shrunk) == 100


def test_a_repeated_source_is_held_out_once():
    pairs = (
        [Pair("Yes.", "Ja.")] * 50 + [Pair("Yes.", "Doch.")] * 50 + [Pair(str(i), str(i)) for i in range(9)]
    )
    for seed in range(20):
        drawn = [pair.source for pair in draw(pairs, 5, seed)]
        assert len(drawn) == len(set(drawn)) == 5


def test_sources_of_held_out_pairs_are_not_in_training(tmp_path: Path, tokenizer: Tokenizer, caplog):
    twins = [
        (source, target + " !") for source, target in TOY
    ]  # the same sources with different translations
    pairs = [*TOY, *twins, *TOY]
    random.Random(0).shuffle(pairs)
    train = [write(tmp_path / "a.tsv", pairs[:500]), write(tmp_path / "b.tsv", pairs[500:])]
    prepared = prepare_data(config(tmp_path, train, {"holdout": 30}), tokenizer, tmp_path / "data", seed=1)
    held = {source for source, _ in prepared.validation}
    kept = {source for source, _ in text_of(prepared, tokenizer)}
    assert not held & kept
    assert held | kept == {source for source, _ in TOY}
    assert len(prepared.validation) == 30
    assert dropped(caplog) == {"held out": 3 * len(held)}


def test_blank_pairs_are_not_held_out(tmp_path: Path, tokenizer: Tokenizer):
    train = write(tmp_path / "t.tsv", [*[("", "blank")] * 100, *TOY[:20], *[("blank", " ")] * 100])
    prepared = prepare_data(config(tmp_path, train, {"holdout": 10}), tokenizer, tmp_path / "data", seed=1)
    assert len(prepared.validation) == 10
    assert set(prepared.validation) <= set(TOY[:20])


@pytest.mark.parametrize("count", [300, 1000])
def test_holding_out_everything_is_an_error(tmp_path: Path, tokenizer: Tokenizer, count: int):
    with pytest.raises(DataError, match="300 held out"):
        prepare_data(config(tmp_path, validation={"holdout": count}), tokenizer, tmp_path / "data", seed=1)


def test_the_summary_is_json(tmp_path: Path, tokenizer: Tokenizer):
    prepared = prepare_data(config(tmp_path), tokenizer, tmp_path / "data", seed=1)
    summary = json.loads((tmp_path / "data" / "summary.json").read_text())
    assert summary["fingerprint"] == prepared.fingerprint
    assert np.sum(summary["kept"]) == len(TOY)


# ------------------------------------------------------------------------------------------- subword sampling


@pytest.fixture(scope="module", params=["unigram", "bpe"])
def sampler(request, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizers.train(tmp_path_factory.mktemp(request.param), type=request.param)


unigram_by_default = pytest.mark.parametrize(
    "sampler", ["unigram", pytest.param("bpe", marks=pytest.mark.slow)], indirect=True
)


def refuse_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no worker process start, so that the main process does their work."""

    def refuse(*_):
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(pool, "WorkerProcess", refuse)


@unigram_by_default
def test_every_epoch_has_different_segmentations(tmp_path: Path, sampler: Tokenizer, monkeypatch):
    monkeypatch.setattr(reencode, "BLOCK", 70)
    refuse_processes(monkeypatch)
    prepared = prepare_data(config(tmp_path, subword_sampling=0.05), sampler, tmp_path / "data", seed=1)
    plain = rows(prepared)
    assert plain == rows(prepare_data(config(tmp_path), sampler, tmp_path / "other", seed=1))
    epochs = [prepared.train.open(Position(number)) for number in range(3)]
    for corpus in epochs:
        sampled = rows_of(corpus)
        assert [sampler.decode(list(pair)) for pair in sampled] == [list(pair) for pair in TOY]
        assert all(source[-1] == target[-1] == EOS for source, target in sampled)
        assert corpus.source_lengths.tolist() == [len(source) for source, _ in sampled]
        assert corpus.target_lengths.tolist() == [len(target) for _, target in sampled]
        assert (corpus.weights == 1).all() and len(corpus.weights) == len(TOY)
        for side in (0, 1):
            assert 10 < sum(new[side] != old[side] for new, old in zip(sampled, plain, strict=True)) < 300
    assert rows_of(epochs[0]) != rows_of(epochs[1]) != rows_of(epochs[2]) != rows_of(epochs[0])


@unigram_by_default
def test_segmentations_do_not_depend_on_the_processes(
    tmp_path: Path, sampler: Tokenizer, monkeypatch, caplog
):
    """On several ones, on one, and without those that cannot start."""
    monkeypatch.setattr(reencode, "BLOCK", 30)

    def sampled(count: int) -> list[tuple[list[int], list[int]]]:
        with monkeypatch.context() as patch:
            patch.setattr(reencode, "count_processes", lambda: count)
            data = config(tmp_path, subword_sampling=0.3)
            return rows(prepare_data(data, sampler, tmp_path / "data", seed=1), 7)

    expected = sampled(2)
    assert sampled(1) == expected and "cannot start" not in caplog.text
    refuse_processes(monkeypatch)
    assert sampled(2) == expected and "cannot start" in caplog.text


def test_two_blocks_of_the_same_text_are_segmented_differently(
    tmp_path: Path, sampler: Tokenizer, monkeypatch
):
    monkeypatch.setattr(reencode, "BLOCK", 150)
    refuse_processes(monkeypatch)
    train = write(tmp_path / "t.tsv", TOY[:150] * 2)
    data = config(tmp_path, train, subword_sampling=0.3)
    sampled = rows(prepare_data(data, sampler, tmp_path / "data", seed=1), 0)
    assert sampled[:150] != sampled[150:]


@unigram_by_default
def test_an_epoch_depends_on_its_number_and_seed_only(tmp_path: Path, sampler: Tokenizer):
    """Including in a new process that runs on one core."""
    data = config(tmp_path, subword_sampling=0.3)
    prepared = prepare_data(data, sampler, tmp_path / "data", seed=1)
    held = prepared.train.open(Position(3))
    rows(prepared, 2)
    assert rows(prepared, 3) == rows_of(held)
    elsewhere = prepare_data(data, sampler, tmp_path / "elsewhere", 1, prepared.fingerprint)
    assert rows(elsewhere, 3) == rows_of(held)
    program = """if True:
        import json, os, sys
        from pathlib import Path
        from tests.support.encoding import prepare_data
        from mtrain.config.sections.data import DataConfig
        from mtrain.data.epochs.schedule import Position
        from mtrain.tokenizer.tokenizer import Tokenizer
        os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:1])
        data, tokenizer, folder = DataConfig.model_validate_json(sys.argv[1]), sys.argv[2], sys.argv[3]
        corpus = prepare_data(data, Tokenizer(Path(tokenizer)), Path(folder), 1).train.open(Position(3))
        source, target = corpus.fetch(list(range(len(corpus))))
        print(json.dumps([source.to_lists(), target.to_lists()]))"""
    arguments = [data.model_dump_json(), str(sampler.files[0].parent), str(tmp_path / "data")]
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, check=True)
    assert list(zip(*json.loads(done.stdout), strict=True)) == rows_of(held)


def test_another_seed_samples_different_segmentations(tmp_path: Path, sampler: Tokenizer):
    data = config(tmp_path, subword_sampling=0.3)
    one, two = (prepare_data(data, sampler, tmp_path / f"data{seed}", seed) for seed in (1, 2))
    assert rows(one) == rows(two)
    assert rows(one, 0) != rows(two, 0)


def test_pairs_that_would_get_too_long_keep_their_segmentation(tmp_path: Path, sampler: Tokenizer, caplog):
    limit = 20
    plain = prepare_data(config(tmp_path, max_length=limit), sampler, tmp_path / "plain", seed=1)
    counts = dropped(caplog)
    data = config(tmp_path, max_length=limit, subword_sampling=0.5)
    prepared = prepare_data(data, sampler, tmp_path / "data", seed=1)
    assert dropped(caplog) == counts and counts["too long"] > 10
    assert rows(prepared) == rows(plain)
    sampled = rows(prepared, 0)
    assert max(max(map(len, row)) for row in sampled) == limit
    assert [sampler.decode(list(row)) for row in sampled] == [
        sampler.decode(list(row)) for row in rows(plain)
    ]
    near = [i for i, row in enumerate(rows(plain)) if max(map(len, row)) == limit]
    assert near and sum(sampled[i] == rows(plain)[i] for i in near) > len(near) / 2


def test_only_training_pairs_are_sampled_and_only_if_configured(tmp_path: Path, sampler: Tokenizer):
    prepared = prepare_data(config(tmp_path), sampler, tmp_path / "plain", seed=1)
    assert prepared.train.open(Position(4)) is prepared.train.encoded()
    sampled = prepare_data(config(tmp_path, subword_sampling=0.3), sampler, tmp_path / "data", seed=1)
    assert rows(sampled) == rows(prepared) != rows(sampled, 0)
    assert sampled.validation == prepared.validation


def test_segmenting_can_be_cancelled(tmp_path: Path, tokenizer: Tokenizer, monkeypatch):
    monkeypatch.setattr(reencode, "BLOCK", 70)
    refuse_processes(monkeypatch)
    prepared = prepare_data(config(tmp_path, subword_sampling=0.3), tokenizer, tmp_path / "data", seed=1)
    answers = iter([False, False, True])  # before each of five blocks is written
    with pytest.raises(CancelledError):
        prepared.train.open(Position(), cancelled=lambda: next(answers))
    assert not list(answers)


def children() -> set[int]:
    """The ids of the processes that this one has started."""
    found = (file.read_text().split() for file in Path("/proc/self/task").glob("*/children"))
    return {int(child) for some in found for child in some}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds processes in /proc")
def test_stopped_processes_are_not_waited_for_if_segmenting_is_cancelled(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch
):
    monkeypatch.setattr(reencode, "BLOCK", 150)
    monkeypatch.setattr(reencode, "count_processes", lambda: 1)
    before = children()
    prepared = prepare_data(config(tmp_path, subword_sampling=0.3), tokenizer, tmp_path / "data", seed=1)
    first = rows(prepared, 0)
    [process] = children() - before
    os.kill(process, signal.SIGSTOP)
    end = time.monotonic() + 1
    with pytest.raises(CancelledError):
        prepared.train.open(Position(1), cancelled=lambda: time.monotonic() > end)
    assert rows(prepared, 0) == first


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds processes in /proc")
def test_only_the_first_window_is_segmented_at_the_priority_of_training(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch
):
    monkeypatch.setattr(reencode, "BLOCK", 150)
    monkeypatch.setattr(reencode, "count_processes", lambda: 1)

    before = children()
    prepared = prepare_data(config(tmp_path, subword_sampling=0.3), tokenizer, tmp_path / "data", seed=1)
    own, priorities = os.getpriority(os.PRIO_PROCESS, 0), []
    for epoch in range(3):
        held = prepared.train.open(Position(epoch))
        assert len(held) == len(TOY)
        [process] = children() - before
        priorities.append(os.getpriority(os.PRIO_PROCESS, process))
    assert priorities == [own, *[min(own + 15, 19)] * 2]


@pytest.mark.parametrize(("cores", "ranks", "expected"), [(1, 1, 1), (2, 1, 1), (64, 1, 32), (64, 8, 4)])
def test_half_of_the_cores_segment_pairs(monkeypatch, cores: int, ranks: int, expected: int):
    monkeypatch.setattr(reencode, "count_cores", lambda: cores)
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}.items():
        monkeypatch.setenv(name, str(value))
    assert reencode.count_processes() == expected


def test_an_epoch_leaves_no_file_even_if_the_disk_is_full(tmp_path: Path, tokenizer: Tokenizer, monkeypatch):
    data = config(tmp_path, subword_sampling=0.3)
    prepared = prepare_data(data, tokenizer, tmp_path / "data", seed=1)
    before = sorted((tmp_path / "data").iterdir())
    held = prepared.train.open(Position())
    assert len(held.fetch([0, 299])[0].lengths) == 2

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(temporary, "SpooledTemporaryFile", full)
    with pytest.raises(StorageError, match="No space left"):
        prepared.train.open(Position(1))
    assert sorted((tmp_path / "data").iterdir()) == before
    assert len(held.fetch([0, 299])[0].lengths) == 2
