"""Corpus readers: every kind of corpus is read line by line, without misaligned pairs."""

import bz2
import csv
import gzip
import hashlib
import io
import json
import lzma
from collections.abc import Callable, Generator
from io import BytesIO
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrain.config.sections.corpora import TextTestSet
from mtrain.config.sections.data import DataConfig
from mtrain.data import Pair
from mtrain.data.preparing.inputs import check_corpora
from mtrain.data.reading.blocks import good_pairs, parse_block, read_blocks, read_pairs
from mtrain.data.reading.digests import content_hash
from mtrain.data.reading.files import files_of, further_references, place_of, toy_pairs
from mtrain.data.reading.lines import count_valid_lines, decode_block, open_blocks, read_lines, read_text
from mtrain.errors import DataError
from tests.support.corpora import corpus, read, text_pair, write

SOURCES = ["I like oranges.", "Hello,  world", "", "Ωμέγα 日本 😀", "last"]
TARGETS = ["J'aime les oranges.", "Bonjour", "vide", "Oméga", "dernière"]
PAIRS = list(map(Pair, SOURCES, TARGETS))
FIELDS = {"source_field": "en", "target_field": "fr"}
RANDOM_LINES = "".join(f"{i}\t{i * 2**0.5 % 1}\n" for i in range(20_000)).encode()  # hardly compressible


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()


def data_config(**keys) -> DataConfig:
    return DataConfig(
        **{"source_lang": "en", "target_lang": "fr", "validation": {"toy": "validation"}, **keys}
    )


# ------------------------------------------------------------------------------------------------------ kinds

PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": lambda data: pa.compress(data, codec="zstd", asbytes=True),
}


@pytest.mark.parametrize("source_end", PACKERS)
@pytest.mark.parametrize("target_end", PACKERS)
def test_text_plain_or_compressed(tmp_path: Path, source_end: str, target_end: str):
    for name, end, lines in (("a.en", source_end, SOURCES), ("a.fr", target_end, TARGETS)):
        (tmp_path / (name + end)).write_bytes(PACKERS[end]("".join(f"{x}\n" for x in lines).encode()))
    assert read(source=tmp_path / f"a.en{source_end}", target=tmp_path / f"a.fr{target_end}") == PAIRS


@pytest.mark.parametrize("end", [".gz", ".zst"])
def test_compressed_files_may_be_concatenated(tmp_path: Path, end: str):
    """As `cat a.gz b.gz` and parallel compressors write them."""
    file = tmp_path / f"a{end}"
    file.write_bytes(PACKERS[end](b"one\ntwo\n") + PACKERS[end](b"three\nfour\n"))
    assert read_text(file) == ["one", "two", "three", "four"]


@pytest.mark.parametrize("columns", [(0, 1), (2, 1), (1, 3)])
@pytest.mark.parametrize("end", PACKERS)
def test_tsv(tmp_path: Path, columns: tuple[int, int], end: str):
    rows = []
    for pair in PAIRS:
        cells = ["x"] * 5
        cells[columns[0]], cells[columns[1]] = pair
        rows.append("\t".join(cells) + "\n")
    file = tmp_path / f"a.tsv{end}"
    file.write_bytes(PACKERS[end]("".join(rows).encode()))
    assert read(tsv=file, source_column=columns[0], target_column=columns[1]) == PAIRS


def test_tsv_quotes_are_data(tmp_path: Path):
    assert read(tsv=write(tmp_path / "a.tsv", ['"a\t"b""'])) == [Pair('"a', '"b""')]


@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
@pytest.mark.parametrize("end", PACKERS)
def test_tsv_that_a_csv_writer_has_written(tmp_path: Path, quoting: int, end: str):
    pairs = [*PAIRS, Pair('He said "no", then "yes".', '"'), Pair('"', 'a\tb "" c'), Pair("\t", "d\re")]
    text = io.StringIO()
    writer = csv.writer(text, delimiter="\t", lineterminator="\r\n", quoting=quoting)
    writer.writerow(("target", "n", "source"))
    writer.writerows((pair.target, number, pair.source) for number, pair in enumerate(pairs))
    file = tmp_path / f"a.tsv{end}"
    file.write_bytes(PACKERS[end](text.getvalue().encode()))
    keys = {"tsv": file, "source_column": 2, "target_column": 0, "header": True}
    assert read(**keys, quotes=True) == pairs
    spec = corpus(**keys, quotes=True)
    blocks = [parse_block(raw, spec, score=1) for raw in read_blocks(spec, size=3, by_range=True)]
    assert [score for block in blocks for score in block.scores] == [*range(len(pairs))]


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ('"it continues\tx', "the quotes of column 0 do not end with it"),
        ('x\ty"', "the quotes of column 1 do not end with it"),
        ('"a"b\tx', "the quotes of column 0 do not end with it"),
        ('"a\tb"', "1 column(s); at least 2 expected"),
    ],
)
def test_quotes_that_do_not_match_are_bad_lines(tmp_path: Path, line: str, error: str):
    """Lines are never merged."""
    spec = corpus(tsv=write(tmp_path / "a.tsv", ["a\tb", line, "c\td"]), quotes=True)
    assert list(read_pairs(spec, "skip")) == [("a", "b"), None, ("c", "d")]
    with pytest.raises(DataError) as caught:
        list(read_pairs(spec, "error"))
    assert str(caught.value).startswith(f"{tmp_path / 'a.tsv'}:2: {error}")


def test_the_quotes_key_changes_no_fingerprint_of_corpora_without_it():
    assert corpus(tsv="a.tsv").model_dump() == corpus(tsv="a.tsv", quotes=False).model_dump()
    assert "quotes" not in corpus(tsv="a.tsv").model_dump()
    assert corpus(tsv="a.tsv", quotes=True).model_dump()["quotes"] is True


@pytest.mark.parametrize("end", PACKERS)
def test_jsonl(tmp_path: Path, end: str):
    lines = [json.dumps({"id": i, "en": s, "fr": t}) for i, (s, t) in enumerate(PAIRS)]
    (tmp_path / f"a.jsonl{end}").write_bytes(PACKERS[end]("\n".join(lines).encode()))
    assert read(jsonl=tmp_path / f"a.jsonl{end}", **FIELDS) == PAIRS


def test_jsonl_with_dotted_fields(tmp_path: Path):
    lines = [json.dumps({"translation": {"en": s, "fr": {"text": t}}}) for s, t in PAIRS]
    file = write(tmp_path / "a.jsonl", lines)
    assert read(jsonl=file, source_field="translation.en", target_field="translation.fr.text") == PAIRS


def write_parquet(file: Path, pairs: list[Pair], nested: bool = False) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    records = [{"en": source, "fr": target} for source, target in pairs]
    pq.write_table(pa.Table.from_pylist([{"translation": r} for r in records] if nested else records), file)
    return file


def test_parquet(tmp_path: Path):
    assert read(parquet=write_parquet(tmp_path / "a.parquet", PAIRS), **FIELDS) == PAIRS


def test_parquet_pattern_and_dotted_fields(tmp_path: Path):
    write_parquet(tmp_path / "part-0.parquet", PAIRS[:2], nested=True)
    write_parquet(tmp_path / "part-1.parquet", PAIRS[2:], nested=True)
    write_parquet(tmp_path / "other.parquet", [Pair("no", "no")], nested=True)
    pattern = tmp_path / "part-*.parquet"
    assert read(parquet=pattern, source_field="translation.en", target_field="translation.fr") == PAIRS


def test_the_name_of_a_field_may_contain_a_dot(tmp_path: Path):
    """As in tables that were flattened."""
    records = [{"translation.en": s, "translation.fr": t, "translation": {"en": "no"}} for s, t in PAIRS]
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "a.parquet")
    write(tmp_path / "a.jsonl", map(json.dumps, records))
    fields = {"source_field": "translation.en", "target_field": "translation.fr"}
    assert read(parquet=tmp_path / "a.parquet", **fields) == PAIRS
    assert read(jsonl=tmp_path / "a.jsonl", **fields) == PAIRS


@pytest.mark.parametrize("size", [1, 4, 7, 100])
def test_parquet_files_are_read_in_blocks(tmp_path: Path, size: int):
    """Several files, one of them empty, with several row groups, are read from any block on."""
    pairs = [Pair(f"a{i}", f"b{i}") for i in range(20)]
    schema = pa.schema([("other", pa.int64()), ("en", pa.string()), ("fr", pa.string())])
    for number, (first, end) in enumerate(((0, 11), (11, 11), (11, 20))):
        rows = [{"other": 1, "en": source, "fr": target} for source, target in pairs[first:end]]
        table = pa.Table.from_pylist(rows, schema)
        pq.write_table(table, tmp_path / f"{number}.parquet", row_group_size=3)
    spec = corpus(parquet=tmp_path / "*.parquet", **FIELDS)
    blocks = list(read_blocks(spec, size=size))
    read_back = [pair for block in blocks for pair in zip(*parse_block(block, spec)[:2], strict=True)]
    assert read_back == pairs
    ends = [block.end.first - 1 for block in blocks]
    assert ends == sorted({*range(size, 20, size), 11, 20})
    for number, block in enumerate(blocks, start=1):
        assert list(read_blocks(spec, size=size, start=block.end)) == blocks[number:]


def test_a_dataset_of_the_hub_is_read_at_its_revision(monkeypatch):
    import datasets

    loaded = []

    def load_dataset(*names: str, **options: str) -> datasets.Dataset:
        loaded.append((names, options))
        return datasets.Dataset.from_list([{"en": "a", "fr": "x"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    options = {"config": "en-fr", "split": "test", "revision": "v2.0"}
    assert read(hub="some/dataset", **options, **FIELDS) == [("a", "x")]
    assert loaded == [(("some/dataset", "en-fr"), {"split": "test", "revision": "v2.0"})]


@pytest.mark.parametrize(("split", "expected"), [("train", PAIRS), ("validation", PAIRS[:2])])
def test_hub_dataset_in_a_local_folder(tmp_path: Path, split: str, expected: list[Pair]):
    for name, pairs in (("train", PAIRS), ("validation", PAIRS[:2])):
        write_parquet(tmp_path / "set" / "data" / f"{name}-00000-of-00001.parquet", pairs, nested=True)
    fields = {"source_field": "translation.en", "target_field": "translation.fr"}
    assert read(hub=tmp_path / "set", split=split, **fields) == expected
    with pytest.raises(DataError, match="nope"):
        read(hub=tmp_path / "set", split="nope", **fields)


def test_hub_dataset_that_was_saved_to_disk(tmp_path: Path):
    import datasets

    table = datasets.Dataset.from_list([{"en": "a", "fr": "x"}])
    table.save_to_disk(tmp_path / "table")
    datasets.DatasetDict({"train": table, "test": table}).save_to_disk(tmp_path / "tables")
    assert read(hub=tmp_path / "table", **FIELDS) == [("a", "x")]
    assert read(hub=tmp_path / "tables", split="test", **FIELDS) == [("a", "x")]
    assert read(hub=tmp_path / "tables", split="train+test", **FIELDS) == [("a", "x")] * 2
    for name in ("table", "tables"):
        with pytest.raises(DataError, match="cannot load the dataset"):
            read(hub=tmp_path / name, split="nope", **FIELDS)


def test_toy():
    assert read(toy="validation") == toy_pairs("validation")


def test_several_corpora_follow_each_other(tmp_path: Path):
    tsv = write(tmp_path / "a.tsv", ["a\tb", "c\td"])
    jsonl = write(tmp_path / "a.jsonl", ['{"en": "e", "fr": "f"}'])
    train = [{"tsv": str(tsv)}, {"jsonl": str(jsonl), **FIELDS}, {"tsv": str(tsv), "weight": 2.0}]
    expected = [("a", "b"), ("c", "d"), ("e", "f"), ("a", "b"), ("c", "d")]
    assert list(good_pairs(data_config(train=train).train, "error")) == expected


# ------------------------------------------------------------------------------------------------------ lines


texts = st.text(st.characters(codec="utf-8", exclude_characters="\n\0"), max_size=20)
lines_without_end = st.lists(texts.map(lambda line: line.rstrip("\r")), max_size=8)


@settings(deadline=None, max_examples=80)
@given(lines=lines_without_end, end=st.sampled_from(["\n", "\r\n"]), packer=st.sampled_from(list(PACKERS)))
def test_any_lines_read_back_the_same(tmp_path_factory, lines: list[str], end: str, packer: str):
    file = tmp_path_factory.getbasetemp() / f"lines{packer}"
    content = "".join(line + end for line in ["\ufefffirst", *lines])
    file.write_bytes(PACKERS[packer](content.encode()))
    assert read_text(file) == ["first", *lines]


@settings(deadline=None, max_examples=60)
@given(pairs=st.lists(st.tuples(texts, texts), max_size=5), escape=st.booleans())
def test_any_text_comes_through_jsonl(tmp_path_factory, pairs: list[tuple[str, str]], escape: bool):
    file = tmp_path_factory.getbasetemp() / "texts.jsonl"
    lines = [json.dumps({"en": s + "\n", "fr": t}, ensure_ascii=escape) for s, t in pairs]
    write(file, lines, final=bool(lines))
    assert read(jsonl=file, **FIELDS) == [(s + "\n", t) for s, t in pairs]


@settings(deadline=None, max_examples=80)
@given(
    begin=st.sampled_from([b"x", 2 * b"\xef\xbb\xbf"]),
    content=st.lists(st.sampled_from([b"\n", b"\r", b"a", b"\xc3\xa9", b"\xff", b"\0", b"\xef\xbb\xbf"])),
    size=st.integers(1, 4),
    packer=st.sampled_from(list(PACKERS)),
)
def test_blocks_of_any_size_contain_the_same_lines(tmp_path_factory, begin, content, size: int, packer: str):
    file = tmp_path_factory.getbasetemp() / f"blocks{packer}"
    file.write_bytes(PACKERS[packer](begin + b"".join(content)))
    blocks = []
    with open_blocks(file) as lines:
        while block := lines.take(size):
            first = lines.lines - len(list(BytesIO(block))) + 1
            blocks += [str(line) for line in decode_block(block, str(file), first)]
    assert blocks == [str(line) for line in read_lines(file)]
    with open_blocks(file) as lines:
        assert lines.count_all() == len(blocks)


def test_a_byte_order_mark_alone_is_an_empty_line(tmp_path: Path):
    (tmp_path / "a.en").write_bytes(b"\xef\xbb\xbf")
    (tmp_path / "a.fr").write_bytes(b"tea\n")
    assert read_text(tmp_path / "a.en") == [""]
    spec = corpus(source=tmp_path / "a.en", target=tmp_path / "a.fr")
    [raw] = read_blocks(spec, size=10)
    block = parse_block(raw, spec)
    assert (block.sources, block.targets) == ([""], ["tea"])


# -------------------------------------------------------------------------------------------------- bad lines


@pytest.mark.parametrize(
    ("kind", "line", "named"),
    [
        ("tsv", b"only one column", "1 column"),
        ("tsv", b"a,b", "1 column(s); at least 2 expected; separate them by tabs"),
        ("tsv", b"", "1 column"),
        ("tsv", b"a\t\xff", "UTF-8"),
        ("jsonl", b"{not json", "JSON"),
        ("jsonl", b"", "a blank line, not JSON"),
        ("jsonl", b"[1, 2]", "'en'"),
        ("jsonl", b'{"en": "a", "french": "b"}', "no field 'fr'; available fields: en, french"),
        ("jsonl", b'{"en": "a", "fr": null}', "'fr' is not a string"),
        ("jsonl", b'{"en": 5, "fr": "b"}', "'en' is not a string"),
        ("jsonl", b'{"en": "a", "fr": "\\u0000"}', "NUL"),
        ("jsonl", b'{"en": "a", "fr": "\\ud800"}', "surrogate"),
        ("jsonl", b'{"en": "a", "fr": "b", "n": ' + b"1" * 5000 + b"}", "JSON"),
        ("jsonl", b"[" * 100_000, "JSON"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_bad_records_name_file_and_line_or_are_skipped(tmp_path: Path, kind: str, line: bytes, named: str):
    good = {"tsv": b"a\tb", "jsonl": b'{"en": "a", "fr": "b"}'}[kind]
    (tmp_path / "f").write_bytes(b"\n".join([good, line, good]) + b"\n")
    spec = corpus(**{kind: tmp_path / "f"}, **(FIELDS if kind == "jsonl" else {}))
    with pytest.raises(DataError, match=r"f:2: ") as caught:
        list(read_pairs(spec, "error"))
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list(read_pairs(spec, "skip")) == [("a", "b"), None, ("a", "b")]


@pytest.mark.parametrize("end", PACKERS)
@pytest.mark.parametrize("blank", ["", "\n", "\n\n\n", "\r\n", " \n\r\n  ", "\n" * 5])
@pytest.mark.parametrize("size", [2, 3, 100])
def test_blank_lines_at_the_end_of_records_are_no_pairs(tmp_path: Path, end: str, blank: str, size: int):
    """However the blocks are cut, and whether other processes read them by range."""
    records = {
        "tsv": [f"a{i}\tb{i}" for i in range(4)],
        "jsonl": [json.dumps({"en": f"a{i}", "fr": f"b{i}"}) for i in range(4)],
    }
    for kind, lines in records.items():
        for part in (1, 2):
            (tmp_path / f"{part}.{kind}{end}").write_bytes(PACKERS[end]("\n".join([*lines, blank]).encode()))
        spec = corpus(**{kind: tmp_path / f"*.{kind}{end}"}, **(FIELDS if kind == "jsonl" else {}))
        for by_range in (False, True):
            raws = list(read_blocks(spec, size=size, by_range=by_range))
            blocks = [parse_block(raw, spec) for raw in raws]
            assert [text for block in blocks for text in block.sources] == [f"a{i}" for i in range(4)] * 2
            assert [number for block in blocks for number in block.numbers] == [*range(1, 9)]
            assert not any(block.errors for block in blocks) and raws[-1].end.first == 9
            again = [raw for block in raws for raw in [*read_blocks(spec, size=size, start=block.end)][:1]]
            assert [raw.first for raw in again] == [raw.first for raw in raws[1:]]


def test_a_header_without_pairs_has_none(tmp_path: Path):
    assert read(tsv=write(tmp_path / "a.tsv", ["en\tfr", "", " "]), header=True) == []


def test_many_blank_lines_that_are_not_at_the_end_are_bad_pairs(tmp_path: Path):
    file = write(tmp_path / "a.tsv", ["a\tb", *[" " * 2000] * 300, "c\td", ""])
    spec = corpus(tsv=file)
    blocks = [parse_block(raw, spec) for raw in read_blocks(spec)]
    assert sum(len(block.errors) for block in blocks) == 300
    assert [pair for block in blocks for pair in zip(*block[:2], strict=True)] == [("a", "b"), ("c", "d")]


@pytest.mark.parametrize("end", PACKERS)
@pytest.mark.parametrize("by_range", [False, True])
def test_lines_that_are_too_long_are_bad_lines(tmp_path: Path, monkeypatch, end: str, by_range: bool):
    monkeypatch.setattr("mtrain.data.reading.lines.MAX_LINE", 400_000)
    longest, longer = "x" * 399_998 + "\ty", "x" * 399_999 + "\ty"
    texts = ["a\tb", longest, longer, "é" * 700_000 + "\t", longest + "\r", "c\td", longer * 4]
    file = tmp_path / f"a.tsv{end}"
    file.write_bytes(PACKERS[end]("\n".join(texts).encode()))
    spec = corpus(tsv=file)
    for size in (1, 3, 100):
        blocks = [parse_block(raw, spec) for raw in read_blocks(spec, size=size, by_range=by_range)]
        errors = [str(error) for block in blocks for error in block.errors.values()]
        assert errors == [f"{file}:{number}: longer than 400,000 bytes" for number in (3, 4, 7)]
        found = [len(text) for block in blocks for text in block.sources]
        assert found == [1, 399_998, 399_998, 1]
    assert [str(line) for line in read_lines(file) if isinstance(line, DataError)] == errors
    with pytest.raises(DataError, match=f"a.tsv{end}:3: longer than 400,000 bytes"):
        count_valid_lines(file)


def test_a_missing_dotted_field_lists_the_fields_of_its_parent(tmp_path: Path):
    file = write(tmp_path / "a.jsonl", ['{"translation": {"en": "a", "de": "b"}}'])
    with pytest.raises(DataError, match=r"'translation\.fr'; available fields: en, de"):
        read(jsonl=file, source_field="translation.en", target_field="translation.fr")


@pytest.mark.parametrize("nested", [False, True])
def test_a_parquet_row_that_is_not_utf8_is_a_single_bad_row(tmp_path: Path, nested: bool):
    texts = [pa.array(side, pa.binary()).view(pa.string()) for side in ([b"a", b"b\xff", b"c"], [b"d"] * 3)]
    columns = dict(zip(("en", "fr"), texts, strict=True))
    if nested:
        columns = {"translation": pa.StructArray.from_arrays(texts, names=list(columns))}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    names = {key: "translation." * nested + name for key, name in FIELDS.items()}
    spec = corpus(parquet=tmp_path / "a.parquet", **names)
    assert list(read_pairs(spec, "skip")) == [Pair("a", "d"), None, Pair("c", "d")]
    with pytest.raises(DataError, match=r"a\.parquet:2: not valid UTF-8 \(byte 2 of a field\); fix"):
        list(read_pairs(spec, "error"))


def test_parquet_files_are_hashed_while_they_are_read(tmp_path: Path):
    files = [tmp_path / f"{number}.parquet" for number in range(3)]
    for file, size in zip(files, (7, 0, 1), strict=True):
        pairs = [Pair(f"source {i}", f"target {i}") for i in range(size)]
        table = pa.table({"en": [p.source for p in pairs], "fr": [p.target for p in pairs]})
        pq.write_table(table.append_column("further", table["en"]), file, row_group_size=2)
    digests: dict[Path, bytes] = {}
    spec = corpus(parquet=tmp_path / "*.parquet", **FIELDS)
    assert sum(len(block.records) for block in read_blocks(spec, digests)) == 8
    assert digests == {file: hashlib.sha256(file.read_bytes()).digest() for file in files}
    digests = {}
    blocks = read_blocks(spec, digests, size=1)
    next(blocks)
    assert isinstance(blocks, Generator)
    blocks.close()
    assert not digests


@pytest.mark.parametrize("kind", [pa.date32(), pa.timestamp("us"), pa.duration("s")])
def test_a_parquet_column_of_dates_that_python_cannot_have_is_not_read(tmp_path: Path, kind: pa.DataType):
    dates = pa.array([2**31 - 1 if kind == pa.date32() else 2**62, 0], kind)
    pq.write_table(pa.table({"en": ["a", "b"], "day": dates, "fr": ["x", "y"]}), tmp_path / "a.parquet")
    assert read(parquet=tmp_path / "a.parquet", **FIELDS) == [("a", "x"), ("b", "y")]
    with pytest.raises(DataError, match="no field 'de'; available fields: en, fr"):
        read(parquet=tmp_path / "a.parquet", source_field="en", target_field="de")
    nested = pa.StructArray.from_arrays([dates], names=["day"])
    pq.write_table(pa.table({"en": ["a", "b"], "more": nested}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet: cannot read: "):
        read(parquet=tmp_path / "a.parquet", **FIELDS)


def test_the_audio_of_a_dataset_is_not_decoded(tmp_path: Path):
    """It needs a further package. If a field is missing, the error names the others."""
    features = datasets.Features({"en": datasets.Value("string"), "fr": datasets.Value("string")})
    features["audio"] = datasets.Audio()
    columns = {"en": ["a"], "fr": ["x"], "audio": [{"bytes": b"RIFF", "path": None}]}
    folder = tmp_path / "hub"
    folder.mkdir()
    pq.write_table(pa.table(columns, schema=features.arrow_schema), folder / "train.parquet")
    assert read(hub=folder, **FIELDS) == [("a", "x")]
    with pytest.raises(DataError, match="no field 'de'; available fields: en, fr"):
        read(hub=folder, source_field="en", target_field="de")


def test_bad_parquet_records(tmp_path: Path):
    table = pa.table({"en": ["a", None, "c"], "fr": ["x", "y", "z"]})
    pq.write_table(table, tmp_path / "a.parquet")
    spec = corpus(parquet=tmp_path / "a.parquet", **FIELDS)
    assert list(read_pairs(spec, "skip")) == [("a", "x"), None, ("c", "z")]
    with pytest.raises(DataError, match=r"a\.parquet:2: field 'en'"):
        list(read_pairs(spec, "error"))
    with pytest.raises(DataError, match="no field 'de'; available fields: en, fr"):
        read(parquet=tmp_path / "a.parquet", source_field="en", target_field="de")


def test_read_text_is_strict(tmp_path: Path):
    (tmp_path / "a").write_bytes(b"ok\n\xff\n")
    assert [isinstance(line, DataError) for line in read_lines(tmp_path / "a")] == [False, True]
    with pytest.raises(DataError, match="a:2"):
        read_text(tmp_path / "a")


@pytest.mark.parametrize("end", PACKERS)
def test_valid_lines_are_counted(tmp_path: Path, end: str):
    file, lines = tmp_path / f"a{end}", b"\xef\xbb\xbf\n" + b"ok\n" * 39_998
    for last in (b"ok\n", b"\xc2\x85 ok", b"\r"):
        file.write_bytes(PACKERS[end](lines + last))
        assert count_valid_lines(file) == len(read_text(file)) == 40_000
    for last in (b"\xff\n", b"\0"):
        file.write_bytes(PACKERS[end](lines + last + b"ok\n"))
        with pytest.raises(DataError, match=f"a{end}:40000: "):
            count_valid_lines(file)


# ---------------------------------------------------------------------------------- missing and damaged files


@pytest.mark.parametrize(
    "spec",
    [
        {"source": "none.en", "target": "there"},
        {"source": "there", "target": "none.fr"},
        {"source": "there", "target": "none.fr.gz"},
        {"tsv": "none.tsv.zst"},
        {"jsonl": "none.jsonl", **FIELDS},
        {"parquet": "none.parquet", **FIELDS},
        {"parquet": "none-*.parquet", **FIELDS},
    ],
    ids=lambda spec: next(iter(spec)),
)
def test_a_missing_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: dict[str, str]):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "there", ["a"])
    with pytest.raises(DataError, match=r"none.*no such file"):
        read(**spec)
    with pytest.raises(DataError, match=r"none.*no such file"):
        files_of(corpus(**spec))
    for place in ({"train": spec}, {"train": {"toy": "train"}, "validation": spec}):
        with pytest.raises(DataError, match="none"):
            check_corpora(data_config(**place))
    with pytest.raises(DataError, match="none"):
        check_corpora(data_config(train={"toy": "train"}, test={"a": spec}))


def test_a_folder_is_not_a_file(tmp_path: Path):
    with pytest.raises(DataError, match="not a file"):
        files_of(corpus(tsv=tmp_path))
    with pytest.raises(DataError, match="cannot read"):
        read(tsv=tmp_path)


@pytest.mark.parametrize("end", [".gz", ".zst"])
@pytest.mark.parametrize("keep", [0.3, 0.6, 0.99])
def test_a_truncated_file_is_an_error_and_not_a_shorter_corpus(tmp_path: Path, end: str, keep: float):
    content = PACKERS[end](RANDOM_LINES)
    file = tmp_path / f"a.tsv{end}"
    file.write_bytes(content)
    assert len(read(tsv=file)) == 20_000
    file.write_bytes(content[: int(keep * len(content))])
    with pytest.raises(DataError, match=rf"a\.tsv{end}"):
        list(read_pairs(corpus(tsv=file), "skip"))


@pytest.mark.parametrize("damaged", ["a.en.gz", "a.fr.gz"])
def test_of_two_files_the_damaged_one_is_named(tmp_path: Path, damaged: str):
    content = gzip.compress(RANDOM_LINES)
    for name in ("a.en.gz", "a.fr.gz"):
        (tmp_path / name).write_bytes(content[: len(content) // 2] if name == damaged else content)
    with pytest.raises(DataError, match=f"{damaged}: cannot read"):
        read(source=tmp_path / "a.en.gz", target=tmp_path / "a.fr.gz")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(b"a\tb\n"), "compressed with gzip; give it a name that ends in .gz"),
        (pa.compress(b"a\tb\n", codec="zstd", asbytes=True), "compressed with zstd"),
        (bz2.compress(b"a\tb\n"), "compressed with bzip2; decompress it"),
        (bz2.compress(b"a\tb\n", 1), "compressed with bzip2; decompress it"),
        (lzma.compress(b"a\tb\n"), "compressed with xz; decompress it"),
        (b"\x04\x22\x4d\x18\x64", "compressed; decompress it, or use gzip or zstd"),
        (b"\x1f\x9d\x90a", "compressed; decompress it, or use gzip or zstd"),
        ("a\tb\n".encode("utf-16"), "UTF-16; convert it"),
        ("a\tb\n".encode("utf-32"), "UTF-32; convert it"),
        (b"\xfe\xff" + "a\tb\n".encode("utf-16-be"), "UTF-16; convert it"),
        (b"PK\x03\x04...", "a ZIP archive"),
        (b"PAR1\x15\0...", "a Parquet file"),
    ],
    ids=lambda value: str(value)[:20] if not isinstance(value, bytes) else "file",
)
def test_files_that_are_not_text_are_refused_even_if_bad_lines_are_skipped(
    tmp_path: Path, content: bytes, message: str
):
    (tmp_path / "a.tsv").write_bytes(content)
    with pytest.raises(DataError, match=rf"a\.tsv: {message}"):
        list(read_pairs(corpus(tsv=tmp_path / "a.tsv"), "skip"))


def test_text_that_begins_like_a_parquet_file(tmp_path: Path):
    assert read(tsv=write(tmp_path / "a.tsv", ["PAR1 is a word\tb"])) == [("PAR1 is a word", "b")]


@pytest.mark.parametrize("end", [".gz", ".zst"])
def test_a_file_that_is_not_compressed(tmp_path: Path, end: str):
    with pytest.raises(DataError, match="cannot read"):
        read_text(write(tmp_path / f"a{end}", ["just text"]))
    (tmp_path / f"b{end}").touch()
    with pytest.raises(DataError, match=f"b{end}: cannot read: empty, so not a {end} file"):
        read_text(tmp_path / f"b{end}")


def test_a_file_that_is_not_parquet(tmp_path: Path):
    file = write(tmp_path / "a.parquet", ["just text"])
    with pytest.raises(DataError, match=r"a\.parquet: cannot read: ") as caught:
        read(parquet=file, **FIELDS)
    assert "\n" not in str(caught.value)
    content = write_parquet(file, [Pair(f"source {i}", f"target {i}") for i in range(100)]).read_bytes()
    middle = len(content) // 3  # in the rows
    file.write_bytes(content[:middle] + b"garbage" * 10 + content[middle + 70 :])
    with pytest.raises(DataError, match=r"a\.parquet: cannot read: "):
        read(parquet=file, **FIELDS)


# ---------------------------------------------------------------------------------------------- several files


def test_several_files_are_read_in_the_order_of_their_names(tmp_path: Path):
    write(tmp_path / "part-1.en", ["\ufeffa", "b"])
    (tmp_path / "part-1.fr").write_bytes(b"A\r\nB\r\n")
    (tmp_path / "part-2.en").touch()
    (tmp_path / "part-2.fr").touch()
    (tmp_path / "part-3.en").write_bytes(b"\xef\xbb\xbfc\nd")  # no line break at the end
    write(tmp_path / "part-3.fr", ["C", "D"])
    write(tmp_path / "other.en", ["x"])
    spec = corpus(source=tmp_path / "part-*.en", target=tmp_path / "part-*.fr")
    assert read(source=spec.source, target=spec.target) == [("a", "A"), ("b", "B"), ("c", "C"), ("d", "D")]
    names = [f"part-{i}.{side}" for side in ("en", "fr") for i in "123"]
    assert [file.name for file in files_of(spec)] == names
    for size in (1, 2, 3, 9):
        blocks = list(read_blocks(spec, size=size))
        for number, block in enumerate(blocks, start=1):
            assert list(read_blocks(spec, size=size, start=block.end)) == blocks[number:]


@pytest.mark.parametrize("suffix", PACKERS)
def test_several_files_of_tsv_and_jsonl(tmp_path: Path, suffix: str):
    pack = PACKERS[suffix]
    for number, text in enumerate((b"a\tA\nb\tB\n", b"c\tC")):
        (tmp_path / f"{number}.tsv{suffix}").write_bytes(pack(text))
    for number, text in enumerate((b'{"en": "a", "fr": "A"}\n', b'{"en": "b", "fr": "B"}\n')):
        (tmp_path / f"{number}.jsonl{suffix}").write_bytes(pack(text))
    assert read(tsv=tmp_path / f"?.tsv{suffix}") == [("a", "A"), ("b", "B"), ("c", "C")]
    assert read(jsonl=tmp_path / f"[01].jsonl{suffix}", **FIELDS) == [("a", "A"), ("b", "B")]


def test_a_file_whose_name_is_a_pattern_is_read_alone(tmp_path: Path):
    write(tmp_path / "a[1].tsv", ["a\tb"])
    write(tmp_path / "a1.tsv", ["c\td"])
    assert read(tsv=tmp_path / "a[1].tsv") == [("a", "b")]


def test_blocks_end_at_multiples_of_their_size(tmp_path: Path):
    for number, count in enumerate((3, 1, 8)):
        write(tmp_path / f"{number}.tsv", ["a\tb"] * count)
    blocks = list(read_blocks(corpus(tsv=tmp_path / "*.tsv"), size=5))
    assert [block.first for block in blocks] == [1, 4, 5, 6, 11]


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize("target_end", ["", ".gz"])
def test_ranges_of_bytes_contain_the_same_pairs(tmp_path: Path, size: int, target_end: str):
    """A compressed file is read by one process."""
    sources = [b"\xef\xbb\xbfa\r\n\n\xc3\xa9\nd", b"\xff\n\0\n", b"", b"g\n\n\n"]
    targets = [b"A\nB\nC\nD\n", b"E\nF", b"", b"G\nH\nI\n"]
    for number, (source, target) in enumerate(zip(sources, targets, strict=True)):
        (tmp_path / f"{number}.en").write_bytes(source)
        (tmp_path / f"{number}.fr{target_end}").write_bytes(PACKERS[target_end](target))
    spec = corpus(source=tmp_path / "*.en", target=tmp_path / f"*.fr{target_end}")
    digests: list[dict] = [{}, {}]
    whole = list(read_blocks(spec, digests[0], size))
    ranges = list(read_blocks(spec, digests[1], size, by_range=True))
    assert digests[0] == digests[1] and len(digests[0]) == 8
    assert [block.end for block in ranges] == [block.end for block in whole]
    assert [block.size for block in ranges] == [block.size for block in whole]
    assert all(bool(block.ranges) == (target_end == "") for block in ranges)
    parsed = [[parse_block(block, spec) for block in blocks] for blocks in (whole, ranges)]
    for one, other in zip(*parsed, strict=True):
        assert str(one) == str(other)  # errors are equal to themselves only
    for number, block in enumerate(whole, start=1):
        assert list(read_blocks(spec, size=size, start=block.end, by_range=True)) == ranges[number:]


def test_a_file_that_is_cut_after_its_ranges_were_found_is_an_error(tmp_path: Path):
    file = write(tmp_path / "a.tsv", ["a\tb"] * 9)
    [_, last] = read_blocks(corpus(tsv=file), size=5, by_range=True)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"a\.tsv: changed while it was read; run again"):
        parse_block(last, corpus(tsv=file))
    file.unlink()
    with pytest.raises(DataError, match=r"a\.tsv: no such file"):
        parse_block(last, corpus(tsv=file))


def test_a_side_that_loses_a_line_after_its_ranges_were_found_is_an_error(tmp_path: Path):
    files = {side: write(tmp_path / side, ["abc"] * 3) for side in ("source", "target")}
    [block] = read_blocks(corpus(**files), by_range=True)
    files["target"].write_bytes(b"abc\nabcdefg\n")
    with pytest.raises(DataError, match="changed while it was read; run again"):
        parse_block(block, corpus(**files))


def test_the_header_of_each_tsv_file_is_skipped(tmp_path: Path):
    header, rows = "en\tfr", {1: ["a\tA", "b\tB"], 2: [], 3: ["c\tC", "bad", "d\tD"]}
    for number, lines in rows.items():
        write(tmp_path / f"{number}.tsv", [header, *lines])
    (tmp_path / "4.tsv").touch()
    spec = corpus(tsv=tmp_path / "?.tsv", header=True)
    assert list(good_pairs([spec], "skip")) == [("a", "A"), ("b", "B"), ("c", "C"), ("d", "D")]
    with pytest.raises(DataError, match=r"3\.tsv:3: 1 column\(s\); at least 2 expected"):
        list(good_pairs([spec], "error"))
    for size in (1, 2, 3, 9):
        blocks = list(read_blocks(spec, size=size))
        assert [place for raw in blocks for place in parse_block(raw, spec).numbers] == [1, 2, 3, 5]
        for number, block in enumerate(blocks, start=1):
            assert list(read_blocks(spec, size=size, start=block.end)) == blocks[number:]
        ranges = read_blocks(spec, size=size, by_range=True)
        assert [str(parse_block(raw, spec)) for raw in ranges] == [
            str(parse_block(raw, spec)) for raw in blocks
        ]
    assert place_of(corpus(tsv="x.tsv", header=True), 1) == "x.tsv:2"
    first = parse_block(next(read_blocks(spec)), spec)
    assert first.place_of(1).endswith("1.tsv:2")


def test_a_tsv_corpus_is_recorded_as_before_headers_were_known():
    assert "header" not in corpus(tsv="a.tsv").model_dump()
    assert corpus(tsv="a.tsv", header=True).model_dump()["header"] is True


def test_unpaired_files_are_an_error(tmp_path: Path):
    spec = {"source": str(tmp_path / "part-*.en"), "target": str(tmp_path / "part-*.fr")}
    write(tmp_path / "part-1.fr", ["a"])
    with pytest.raises(DataError, match=r"part-\*\.en: no such file"):
        check_corpora(data_config(train=spec))
    for name in ("part-1.en", "part-2.en", "part-1.fr", "part-3.fr"):
        write(tmp_path / name, ["a"])
    with pytest.raises(DataError, match=r"part-2\.en: no file of .*part-\*\.fr belongs to it"):
        check_corpora(data_config(train=spec))
    write(tmp_path / "part-3.en", ["a"])
    write(tmp_path / "part-2.fr", ["a"])
    write(tmp_path / "part-4.fr", ["a"])
    with pytest.raises(DataError, match=r"part-4\.fr: no file of .*part-\*\.en belongs to it"):
        read(**spec)
    with pytest.raises(DataError, match=r"en matches 3 files but .*r matches 4; each source file needs"):
        read(source=spec["source"], target=tmp_path / "part-*.*r")
    (tmp_path / "part-4.fr").unlink()
    for other in ({"target": tmp_path / "part-*.*r"}, {"source": tmp_path / "part-?.*n"}):
        with pytest.raises(DataError, match="cannot tell which files belong together; give patterns with"):
            read(**{**spec, **other})


def test_files_are_paired_by_the_text_of_the_wildcards(tmp_path: Path):
    """The names of the two sides sort differently: doc1.en, doc10.en, but doc10_de.txt, doc1_de.txt."""
    for part in ("1", "10"):
        for name in (f"doc{part}.en", f"doc{part}_de.txt", f"ref-{part}-de"):
            write(tmp_path / name, [part])
    spec = {"source": str(tmp_path / "doc*.en"), "target": str(tmp_path / "doc*_de.txt")}
    assert read(**spec) == [Pair("1", "1"), Pair("10", "10")]
    [references] = further_references(TextTestSet(**spec, references=[str(tmp_path / "ref-*-de")]))
    assert [file.name for file in references] == ["ref-1-de", "ref-10-de"]
    one = str(tmp_path / "ref-1-de")  # a file with the lines of all sources
    assert further_references(TextTestSet(**spec, references=[one, one])) == [[Path(one)]] * 2


def test_lines_must_match_file_by_file(tmp_path: Path):
    """Here both sides have as many lines in total."""
    for name, lines in (("1.en", "ab"), ("2.en", "cde"), ("1.fr", "abc"), ("2.fr", "de")):
        write(tmp_path / name, [*lines])
    with pytest.raises(
        DataError, match=r"1\.en has 2 lines but .*1\.fr has 3 lines; the pairs would be misa"
    ):
        read(source=tmp_path / "*.en", target=tmp_path / "*.fr")


def test_errors_name_the_line_of_the_file(tmp_path: Path):
    write(tmp_path / "1.tsv", ["a\tb"] * 3)
    write(tmp_path / "2.tsv", ["a\tb", "bad"])
    with pytest.raises(DataError, match=r"2\.tsv:2: 1 column\(s\); at least 2 expected"):
        read(tsv=tmp_path / "*.tsv")
    write_parquet(tmp_path / "1.parquet", PAIRS)
    write_parquet(tmp_path / "2.parquet", [*PAIRS[:2], Pair("a", "unpaired surrogate or NUL: \0")])
    with pytest.raises(DataError, match=r"2\.parquet:3: field 'fr' contains a NUL"):
        read(parquet=tmp_path / "*.parquet", **FIELDS)
    (tmp_path / "1.en").write_bytes(b"a\n")
    (tmp_path / "2.en").write_bytes(b"a\ncaf\xe9\n")
    with pytest.raises(DataError, match=r"2\.en:2: not valid UTF-8"):
        read(source=tmp_path / "?.en", target=tmp_path / "?.en")


# ----------------------------------------------------------------------------------------------- fingerprints


def test_content_hash_depends_on_the_content_only(tmp_path: Path):
    one = content_hash(text_pair(tmp_path, b"a\n", b"b\n"))
    (tmp_path / "moved").mkdir()
    assert content_hash(text_pair(tmp_path / "moved", b"a\n", b"b\n")) == one
    assert content_hash(text_pair(tmp_path, b"a\n", b"c\n")) != one
    assert content_hash(text_pair(tmp_path, b"b\n", b"a\n")) != one
    assert content_hash(corpus(toy="train")) != content_hash(corpus(toy="test"))


def test_content_hash_of_a_dataset(tmp_path: Path):
    file = tmp_path / "set" / "data" / "train-00000-of-00001.parquet"
    spec = corpus(hub=tmp_path / "set", **FIELDS)
    write_parquet(file, PAIRS)
    one = content_hash(spec)
    assert content_hash(spec) == one
    write_parquet(file, PAIRS[:3])
    assert content_hash(spec) != one
