"""Filters in the data folder: which pairs it contains, and when they are filtered again."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mtrain.data.reading.digests import RawFiles
from mtrain.data.scanning.scanner import CorpusScanner
from mtrain.data.store.folder import read_summary
from mtrain.errors import DataError, UsageError
from mtrain.tokenizer.tokenizer import Tokenizer
from tests.support.checking import check_data
from tests.support.encoding import TOY, config, prepare_data, rows, text_of, use_sizes, write

pytestmark = pytest.mark.usefixtures("logs")

NOISE = [("Tom", "Tom"), ("", "x"), ("The same.", "The same.")]
FILTERS = {"copied": True, "duplicates": "pairs"}


def prepare(run: Path, tokenizer: Tokenizer, pairs, **keys):
    """The encoded pairs, in `run`/data unless `data.folder` is given."""
    data = config(run, write(run / "train.tsv", pairs), **keys)
    return prepare_data(data, tokenizer, Path(data.folder or run / "data"), seed=1, run_dir=run)


def files(folder: Path) -> dict[str, bytes]:
    """The contents of the shards and the summary."""
    return {file.name: file.read_bytes() for file in (folder / "data").glob("s[hu][am]*")}


def test_training_pairs_are_filtered_and_others_are_not(tmp_path, tokenizer, caplog):
    validation = write(tmp_path / "v.tsv", [NOISE[0], TOY[3], TOY[3]])
    pairs = [*TOY[:10], *NOISE, *TOY[5:15]]
    prepared = prepare(tmp_path, tokenizer, pairs, filters=FILTERS, validation=validation)
    assert text_of(prepared, tokenizer) == TOY[:15]
    assert prepared.validation == [NOISE[0], TOY[3], TOY[3]]
    assert "(dropped: 1 empty, 2 copied, 5 duplicates)" in caplog.text


def test_held_out_pairs_and_the_text_for_the_tokenizer_are_filtered(tmp_path):
    train = write(tmp_path / "train.tsv", [*TOY[:20], *[("Tom", "Tom")] * 20, *TOY[:5]])
    data = config(tmp_path, train, {"holdout": 18}, filters=FILTERS)
    result = CorpusScanner(RawFiles(data), seed=1, check=True).result
    assert [*map(len, result.held_out)] == [18] and {*result.held_out[0]} <= {*TOY[:20]}
    assert sorted(result.text.pairs()) == sorted([*TOY[:20], *TOY[:5]])
    findings = check_data(data)
    assert findings.rejected == {"copied": 20, "duplicates": 5}
    assert (findings.sets["train"].usable, findings.duplicates) == (20, 0)
    assert findings.suspicious["a copied source"].count == 0


def test_a_corpus_can_be_left_unfiltered(tmp_path, tokenizer):
    clean = {**write(tmp_path / "clean.tsv", [NOISE[0], NOISE[0], TOY[1]]), "filters": "off"}
    noisy = write(tmp_path / "noisy.tsv", [TOY[1], NOISE[2], TOY[2]])
    prepared = prepare_data(
        config(tmp_path, [clean, noisy], filters=FILTERS), tokenizer, tmp_path / "data", seed=1
    )
    assert text_of(prepared, tokenizer) == [NOISE[0], NOISE[0], TOY[1], TOY[2]]


def test_filters_that_are_off_change_nothing(tmp_path, tokenizer):
    for name, keys in {"none": {}, "off": {"filters": {"script": False, "duplicates": "off"}}}.items():
        (tmp_path / name).mkdir()
        train = {**write(tmp_path / "train.tsv", [*TOY[:9], *NOISE]), **({"filters": "off"} if keys else {})}
        prepare_data(config(tmp_path, train, **keys), tokenizer, tmp_path / name / "data", seed=1)
    assert files(tmp_path / "none") == files(tmp_path / "off")
    assert not (tmp_path / "none/data/rejections.bin").exists()


def test_other_filters_encode_again_unless_the_folder_is_shared(tmp_path, tokenizer):
    keys = {"filters": FILTERS}
    first = prepare(tmp_path, tokenizer, [*TOY[:9], *NOISE], **keys).fingerprint
    assert prepare(tmp_path, tokenizer, [*TOY[:9], *NOISE], **keys).fingerprint == first
    again = prepare(tmp_path, tokenizer, [*TOY[:9], *NOISE], filters={"max_words": 100})
    assert again.fingerprint != first and len(again.train) == 11
    shared = {"folder": str(tmp_path / "shared")}
    prepare(tmp_path, tokenizer, TOY[:9], **shared, **keys)
    with pytest.raises(UsageError, match=r"shared: was prepared with other data\.filters"):
        prepare(tmp_path, tokenizer, TOY[:9], **shared)


@pytest.mark.parametrize("damage", ["missing", "damaged", "other"])
def test_pairs_are_filtered_again_if_their_file_is_lost(tmp_path, tokenizer, monkeypatch, caplog, damage):
    use_sizes(monkeypatch, 10, 20, 100)
    pairs = [*TOY[:30], *NOISE, *TOY[20:40]]
    expected = rows(prepare(tmp_path, tokenizer, pairs, filters=FILTERS))
    written, file = files(tmp_path), tmp_path / "data/rejections.bin"
    (tmp_path / "data/shard-00001.safetensors").unlink()
    assert rows(prepare(tmp_path, tokenizer, pairs, filters=FILTERS)) == expected
    assert "filtering the corpora again" not in caplog.text
    (tmp_path / "data/shard-00001.safetensors").unlink()
    if damage == "missing":
        file.unlink()
    elif damage == "damaged":
        file.write_bytes(b"\0" * len(file.read_bytes()))
    else:  # the text too
        file.unlink()
        with pytest.raises(DataError, match=r"rejections\.bin: missing|other contents"):
            prepare(
                tmp_path, tokenizer, [*pairs[:-1], TOY[50]], filters=FILTERS, folder=str(tmp_path / "data")
            )
        return
    assert rows(prepare(tmp_path, tokenizer, pairs, filters=FILTERS)) == expected
    assert "filtering the corpora again" in caplog.text and files(tmp_path) == written


def test_another_tokenizer_keeps_what_was_rejected(tmp_path, tokenizer, trained, caplog):
    pairs = [*TOY[:30], *NOISE, *TOY[20:40]]
    prepare(tmp_path, tokenizer, pairs, filters=FILTERS)
    before = read_summary(tmp_path / "data")["rejections"]
    other = prepare(tmp_path, trained(vocab_size=350), pairs, filters=FILTERS)
    assert len(other.train) == 40 and read_summary(tmp_path / "data")["rejections"] == before
    assert "filtering the corpora again" not in caplog.text


def test_scores_that_are_no_numbers_are_unreadable(tmp_path, tokenizer, caplog):
    lines = [
        f"{source}\t{target}\t{score}"
        for (source, target), score in zip(TOY, ["0.9", "x", "0.1", "nan"], strict=False)
    ]
    (tmp_path / "scored.tsv").write_text("\n".join([*lines, "a\tb"]) + "\n", encoding="utf-8")
    filters = {"min_score": {"column": 2, "value": 0.5}}
    data = config(tmp_path, {"tsv": str(tmp_path / "scored.tsv")}, filters=filters)
    with pytest.raises(
        DataError,
        match=r"tsv:2: column 2, which data\.filters\.min_score names, is not a number: 'x'; fix it, or set",
    ):
        prepare_data(data, tokenizer, tmp_path / "data", seed=1)
    data = data.model_copy(update={"bad_lines": "skip"})
    prepared = prepare_data(data, tokenizer, tmp_path / "data", seed=1)
    assert text_of(prepared, tokenizer) == TOY[:1] and "(dropped: 2 bad, 2 min_score)" in caplog.text


def test_a_missing_column_of_scores_is_named_by_its_setting(tmp_path, tokenizer):
    (tmp_path / "x.tsv").write_text("a\tb\n", encoding="utf-8")
    filters = {"min_score": {"column": 7, "value": 0.5}}
    data = config(tmp_path, {"tsv": str(tmp_path / "x.tsv")}, filters=filters)
    message = r"2 column\(s\); no column 7 \(from 0\), which data\.filters\.min_score names"
    with pytest.raises(DataError, match=message):
        prepare_data(data, tokenizer, tmp_path / "data", seed=1)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_scores_in_fields(tmp_path, tokenizer, kind):
    file = tmp_path / f"x.{kind}"

    def fill(*scores):
        records = [
            {"id": "x", "en": source, "fr": target, "meta": {"score": score}}
            for (source, target), score in zip(TOY, scores, strict=False)
        ]
        if kind == "parquet":
            pq.write_table(pa.Table.from_pylist(records), file)
        else:
            file.write_text("".join(f"{json.dumps(record)}\n" for record in records))

    fill(0.9, 0.1, 1)
    filters = {"min_score": {"column": "meta.score", "value": 0.5}}
    corpus = {kind: str(file), "source_field": "en", "target_field": "fr"}
    data = config(tmp_path, corpus, filters=filters)
    prepared = prepare_data(data, tokenizer, tmp_path / "data", seed=1)
    assert text_of(prepared, tokenizer) == [TOY[0], TOY[2]]
    fill(None)
    with pytest.raises(
        DataError, match=r"field 'meta\.score', which data\.filters\.min_score names, is not a number: 'None'"
    ):
        prepare_data(data, tokenizer, tmp_path / "data", seed=1)


def test_no_pair_left(tmp_path, tokenizer):
    with pytest.raises(DataError, match="no training pair is left; dropped: 1 empty, 2 copied"):
        prepare(tmp_path, tokenizer, NOISE, filters=FILTERS)
