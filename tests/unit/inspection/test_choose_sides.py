"""Columns of tables, and which texts are source and target."""

import json
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mtrain.config.language_names import languages_of_pair
from mtrain.data.reading.files import toy_pairs
from mtrain.data.text.identify_language import identify_language
from mtrain.errors import DataError, UsageError
from mtrain.inspection.choose_sides import FoundText, choose_sides, with_languages
from mtrain.inspection.table_columns import read_table, text_columns
from tests.support.corpora import write

NONE = (None, None)
PAIRS = toy_pairs("test")


@pytest.fixture
def without_identification(monkeypatch):
    """As if py3langid were not installed."""
    monkeypatch.setitem(sys.modules, "py3langid", None)


def tsv(folder: Path, *columns, header: str = "") -> Path:
    rows = ["\t".join(row) for row in zip(*columns, strict=True)]
    return write(folder / "x.tsv", [header, *rows] if header else rows)


SOURCES, TARGETS = [pair.source for pair in PAIRS], [pair.target for pair in PAIRS]
IDS = [str(number) for number in range(len(PAIRS))]
URLS = [f"https://example.org/{number}" for number in IDS]
KEYS = [f"news-{number}" for number in IDS]
LICENSES = [f"CC-BY 2.0 (France) Attribution: number {number}" for number in IDS]


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ((SOURCES, TARGETS), [0, 1]),
        ((IDS, SOURCES, IDS, TARGETS), [1, 3]),
        ((URLS, KEYS, SOURCES, TARGETS, ["0.5"] * len(PAIRS)), [2, 3]),
        ((SOURCES, TARGETS, LICENSES), [0, 1]),
        ((["en"] * len(PAIRS), SOURCES, ["fr"] * len(PAIRS), TARGETS), [1, 3]),
        (([f"I have {text}" for text in SOURCES], TARGETS), [0, 1]),
        ((IDS, [f"I have {text}" for text in SOURCES], [f"J'ai {text}" for text in TARGETS]), [1, 2]),
        ((SOURCES, ["No reference yet"] * len(PAIRS)), [0]),
        ((["Wixarika_own"] * 9 + ["Other_corpus"] * (len(PAIRS) - 9), SOURCES, TARGETS), [1, 2]),
        ((["www.city.example", "city.example/a"] * (len(PAIRS) // 2), SOURCES, TARGETS), [1, 2]),
        ((["A talk", "Another talk"] * (len(PAIRS) // 2), SOURCES, TARGETS), [1, 2]),
    ],
)
def test_columns_that_contain_sentences(tmp_path, columns, expected):
    table = read_table(tsv(tmp_path, *columns), "tsv")
    assert not table.header
    assert [column.key for column in text_columns(table)] == expected


@pytest.mark.parametrize(
    ("header", "found"),
    [
        *(("en\tfr", True), ("English\tFrench", True), ("source\ttarget", True), ("0\t1", True)),
        *(
            ("src_text\ttgt_text", True),
            ("sentence_en\tsentence_fr", True),
            ("sentence_pl\tsentence_csb", True),
            ("Source text\tTarget text", True),
            ("sourceString\ttargetString", True),
            ("eng_Latn\ttam_Taml", True),
            ("English\tCherokee", True),
            ("Even\tPear", False),
            ("English words/sentences\tFrench words/sentences", True),
        ),
        *(("No, it is\tNo", False), ("It is\tNo", False)),
        *(("Frage\tAntwort", False), ("I am here.\tJe suis ici.", False), ("Yes.\tOui.", False)),
    ],
)
def test_headers_are_recognized(tmp_path, header, found):
    assert read_table(tsv(tmp_path, SOURCES, TARGETS, header=header), "tsv").header is found


def test_the_header_of_short_texts_and_of_pandas_with_an_index(tmp_path):
    for header in (
        *("English\tFrench", "\t0\t1", "\ten\tcsb", "Unnamed: 0\ten\tfr", "\tQuestion\tAnswer"),
        *("row\tdas\tquestes", '""\t"en"\t"fr"', "en\tfr", "Question\tAnswer"),
    ):
        assert read_table(write(tmp_path / "x.tsv", [header, "0\tGo.\tVa !", "1\tNo.\tNon."]), "tsv").header


def test_an_index_or_a_score_is_no_side(tmp_path):
    numbers, scores = [f'"{number}"' for number in IDS], [f"{number}.5" for number in IDS]
    table = read_table(tsv(tmp_path, numbers, SOURCES, TARGETS, scores, header='""\t"a"\t"b"\t"c"'), "tsv")
    assert table.header
    assert [(column.key, column.name) for column in text_columns(table)] == [(1, "a"), (2, "b")]
    rest = (numbers[1:], SOURCES[1:], TARGETS[1:], scores[1:])
    for first in (
        *("0\tGo.\tVa !\t", "0\tGo\tVa\tnan", "\tGo.\tVa !\t1.5", "0\tGo\tVa\t1e-05"),
        *("\tयह\tहै।\t1.5", "\tما\tهذا؟\t1.5"),
    ):
        assert not read_table(tsv(tmp_path, *rest, header=first), "tsv").header


def test_a_first_pair_of_short_words_is_no_header(tmp_path):
    file = write(tmp_path / "x.tsv", ["no\tsi", "io\tme", "la\tthe"])  # codes of languages, too
    assert not read_table(file, "tsv").header


def test_nested_fields(tmp_path):
    records = [{"id": "7", "translation": {"en": pair.source, "fr": pair.target}} for pair in PAIRS]
    file = write(tmp_path / "x.jsonl", ["", *map(json.dumps, records)])
    assert [column.key for column in text_columns(read_table(file, "jsonl"))] == [
        "translation.en",
        "translation.fr",
    ]
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "x.parquet")
    assert len(text_columns(read_table(tmp_path / "x.parquet", "parquet"))) == 2


@pytest.mark.parametrize(
    ("name", "contents", "message"),
    [
        ("x.tsv", b"", "is empty"),
        ("x.jsonl", b'[{"en": "a"}]', "not JSONL, .* jq"),
        ("x.jsonl", b"a\tb", "not JSONL, .* a"),
        ("x.jsonl", b"[" + b" " * 2**24 + b"]", "x.jsonl:1: .*; JSONL has one JSON object per line"),
        ("x.parquet", b"a\tb", "x.parquet: cannot read: "),
    ],
)
def test_files_that_are_no_tables(tmp_path, name, contents, message):
    (tmp_path / name).write_bytes(contents)
    with pytest.raises(DataError, match=message):
        read_table(tmp_path / name, name.partition(".")[2])


def sides(*names: str, languages: str = "") -> list[FoundText]:
    codes = [None if code == "-" else code for code in languages.split()] or [None] * len(names)
    return [FoundText(name, name, [], code) for name, code in zip(names, codes, strict=True)]


@pytest.mark.parametrize(
    ("texts", "keys", "languages", "expected", "certain"),
    [
        (sides("a", "b"), NONE, NONE, "ab", True),
        (sides("a", "b", languages="en de"), NONE, ("de", None), "ba", True),
        (sides("a", "b", languages="en de"), NONE, (None, "en"), "ba", True),
        (sides("a", "b", languages="en de"), NONE, ("fr", "it"), "ab", True),
        (sides("a", "b", "c", languages="en de fr"), NONE, NONE, "ab", False),
        (sides("a", "b", "c", languages="en de fr"), NONE, ("fr", "en"), "ca", True),
        (sides("a", "b", "c", languages="en de fr"), NONE, ("fr", None), "ca", False),
        (sides("a", "b", "c", languages="- de fr"), NONE, NONE, "bc", True),
        (sides("a", "b", "c", languages="pt pt-BR en"), NONE, NONE, "ac", False),
        (sides("a", "b", "c", "d", languages="- en de fr"), NONE, NONE, "bc", False),
        (sides("a", "b", "c", languages="en en -"), NONE, NONE, "ac", False),
        (sides("a", "b", "c"), ("c", "a"), NONE, "ca", True),
        (sides("a", "b", "c"), (None, "a"), NONE, "ba", False),
        (sides("a", "b", languages="en pt"), NONE, ("pt-BR", None), "ba", True),
        (sides("a", "b", "c", languages="pt en pt-BR"), NONE, ("pt-BR", "en"), "cb", True),
        (sides("tgt", "src"), NONE, NONE, ("src", "tgt"), True),
        (sides("note", "tgt", "src"), NONE, NONE, ("src", "tgt"), True),
        (sides("note", "tgt", "src"), ("note", None), NONE, ("note", "tgt"), True),
        (sides("a", "b", languages="en de"), ("b", None), (None, "de"), "ba", True),
    ],
)
def test_sides_are_chosen(texts, keys, languages, expected, certain):
    found = choose_sides(texts, keys, languages)
    assert (found.source.key, found.target.key, found.certain) == (*expected, certain)


def test_two_files_are_in_the_order_given():
    files = [side._replace(kind="text") for side in sides("tgt.txt", "src.txt")]
    assert choose_sides(files, NONE, NONE).source.name == "tgt.txt"


def test_a_language_and_its_variety_are_the_same():
    assert choose_sides(sides("a", "b", languages="pt pt-BR"), NONE, NONE).languages == NONE


def test_columns_that_are_not_there_or_the_same():
    with pytest.raises(UsageError, match="no column x; choose from a, b"):
        choose_sides(sides("a", "b"), ("x", None), NONE)
    with pytest.raises(UsageError, match="source and target are the same"):
        choose_sides(sides("a", "b"), ("a", "a"), NONE)
    with pytest.raises(UsageError, match="source and target are the same"):
        choose_sides(sides("a", "b", languages="en de"), NONE, ("en", "en"))


@pytest.mark.usefixtures("without_identification")
def test_languages_of_the_file_name_without_identification():
    texts = [FoundText("0", 0, SOURCES), FoundText("1", 1, TARGETS)]
    assert [side.language for side in with_languages(texts, "news.en-fr.tsv")] == ["en", "fr"]
    assert [side.language for side in with_languages(texts, "news.tsv")] == [None, None]


def test_languages_of_texts():
    texts = [FoundText("0", 0, SOURCES), FoundText("1", 1, TARGETS)]
    assert [side.language for side in with_languages(texts, "news.tsv")] == ["en", "fr"]
    assert [side.language for side in with_languages(texts, "news.fr-en.tsv")] == ["en", "fr"]
    assert [side.language for side in with_languages(texts, "news.fr-de.tsv")] == ["de", "fr"]
    regions = with_languages(texts, "news.fr-CA.en-GB.tsv")
    assert [side.language for side in regions] == ["en-GB", "fr-CA"]
    variants = with_languages(texts, "news.fr-FR.fr-CA.tsv")
    assert [side.named for side in variants] == ["fr-FR", "fr-CA"]
    assert choose_sides(with_languages([texts[0]] * 2, ""), NONE, NONE).languages == NONE
    assert identify_language(["我喜欢橙子。"] * 9).code == "zh"
    kikuyu = "Mũndũ o wothe aciaragwo arĩ na wĩyathi, na mwiganania na andũ arĩa angĩ harĩ ũtĩĩku."
    assert identify_language([kikuyu]).code == "ki"
    assert identify_language(["QWERTZ UIOPA SDFGH JKLYX CVBNM"]) is None
    assert identify_language(["Yes", ""]) is None
    assert identify_language([]) is None


def test_similar_languages_keep_their_order():
    """The text in Swiss German seems to be German, or the other way round."""
    german = ["Der Hund rennt schnell durch den Park und bellt die Kinder an."] * 30
    texts = [FoundText("0", 0, german), FoundText("1", 1, german)]
    for name in ("de-gsw.tsv", "gsw-de.tsv", "de-DE.de-AT.tsv"):
        assert [side.named for side in with_languages(texts, name)] == languages_of_pair(name)
    exchanged = [FoundText("0", 0, TARGETS), FoundText("1", 1, SOURCES)]
    assert [side.named for side in with_languages(exchanged, "en-fr.tsv")] == ["fr", "en"]


def test_a_text_that_seems_to_be_in_several_languages_has_none():
    """Such as one in a language that py3langid does not know."""
    mixed = [sentence for pair in PAIRS for sentence in pair]
    [found] = with_languages([FoundText("a", 0, mixed, "de")], "")
    assert found.seen is None and found.language == "de" and found.is_misnamed
    [found] = with_languages([FoundText("a", 0, SOURCES)], "")
    assert found.seen == "en"


def test_names_that_contradict_the_text():
    texts = [
        FoundText("a.fr", 0, SOURCES, "fr"),
        FoundText("a.en", 1, SOURCES, "en"),
        FoundText("a.sco", 2, SOURCES, "sco"),
    ]
    texts.append(FoundText("a.en", 3, SOURCES, "en", given="it"))
    assert [side.is_misnamed for side in with_languages(texts, "")] == [True, False, False, True]


def test_what_is_given_is_the_language_before_names_and_contents():
    texts = with_languages([FoundText("a.de", 0, SOURCES, "de"), FoundText("b", 1, TARGETS)], "")
    found = choose_sides(texts, NONE, NONE)
    assert found.languages == ("de", "fr")
    assert found.with_given("csb", None).languages == ("csb", "fr")
    assert found.with_given(None, "pt-BR").languages == ("de", "pt-BR")


def test_sides_in_names_are_not_exchanged_by_what_the_texts_seem_to_be():
    texts = [FoundText("a.src", 0, TARGETS, kind="text", is_marked=True)]
    texts += [FoundText("a.trg", 1, SOURCES, kind="text", is_marked=True)]
    assert choose_sides(with_languages(texts, ""), NONE, ("en", "fr")).source.name == "a.src"
