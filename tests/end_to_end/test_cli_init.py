"""`mtrain init`: from the files of a user to a config that `check` and `fit` accept."""

import csv
import gzip
import io
import json
import os
import select
import sys
import tarfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mtrain.config.load import load_config
from mtrain.config.sections.corpora import Holdout
from mtrain.data.reading.blocks import good_pairs
from mtrain.data.reading.files import toy_pairs
from tests.support.cli import one_line, start_forked
from tests.support.corpora import write

PAIRS = toy_pairs("test")
SOURCES, TARGETS = [pair.source for pair in PAIRS], [pair.target for pair in PAIRS]
CONFIG = Path("en-fr.yaml")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Work in an empty folder, as a user who starts."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def text_files(source="corpus.en", target="corpus.fr", count=300):
    """Write two text files, and return their names."""
    for name, lines in ((source, SOURCES), (target, TARGETS)):
        Path(name).parent.mkdir(exist_ok=True)
        write(Path(name), lines[:count])
    return source, target


def tsv_file(name="corpus.tsv", *columns):
    rows = zip(*(columns or (SOURCES, TARGETS)), strict=True)
    return str(write(Path(name), ["\t".join(row) for row in rows]))


def jsonl_file(name="corpus.jsonl"):
    records = [{"id": i, "translation": {"en": s, "fr": t}} for i, (s, t) in enumerate(PAIRS)]
    return str(write(Path(name), [json.dumps(record) for record in records]))


def train_pairs(file=CONFIG):
    return list(good_pairs(load_config(file).data.train, "error"))


def test_from_two_text_files_to_a_translation(mtrain):
    code, out, err = mtrain("init", *text_files("mine.txt", "deren.txt"), "--max-minutes", 1)
    assert (code, out) == (0, "en-fr.yaml\n")
    assert "train: mine.txt and deren.txt, 300 pairs\nvalidation: 15 of these pairs" in err
    assert f"source: mine.txt (English): {SOURCES[0]}" in err
    assert err.endswith("\nnext:\n  mtrain check en-fr.yaml\n  mtrain fit en-fr.yaml\n")
    assert (load_config(CONFIG).run_dir, train_pairs()) == ("runs/en-fr", PAIRS)
    assert mtrain("check", CONFIG)[0] == 0
    few = ("max_steps=2", "batch_tokens=512", "warmup_steps=1")
    sizes = ("preset=null", "d_model=16", "ffn_dim=16", "heads=2", "encoder_layers=1", "decoder_layers=1")
    short = ("max_length_ratio=0", "max_length_offset=2")
    keys = [f"training.{key}" for key in few]
    keys += [f"model.{key}" for key in sizes] + [f"decoding.{key}" for key in short]
    code, _, err = mtrain("fit", CONFIG, *(f"--set={key}" for key in [*keys, "tokenizer.vocab_size=450"]))
    assert code == 0, err
    assert mtrain("translate", "runs/en-fr", "I like oranges.")[0] == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda: text_files("train.en-fr.en", "train.en-fr.fr"),
        lambda: text_files("english.txt", "french.txt"),
        lambda: text_files("en/x.txt", "fr/x.txt"),
        lambda: [tsv_file()],
        lambda: [tsv_file("a.txt", list(map(str, range(300))), SOURCES, TARGETS, ["0.5"] * 300)],
        lambda: [tsv_file("a.tsv", ["en", *SOURCES], ["fr", *TARGETS])],
        lambda: [tsv_file("a.tsv", ["target", *TARGETS], ["source", *SOURCES])],
        lambda: [tsv_file("a.tsv", ["", *map(str, range(300))], ["one", *SOURCES], ["two", *TARGETS])],
        lambda: [jsonl_file()],
        lambda: text_files("train.src", "train.trg"),
        lambda: text_files("src/x.txt", "tgt/x.txt"),
        lambda: reversed(text_files("source.txt", "reference.txt")),
    ],
    ids=[
        *("names", "words", "folders", "tsv", "columns", "header", "reversed", "index", "jsonl"),
        *("sides", "side folders", "reversed sides"),
    ],
)
def test_all_pairs_are_found(mtrain, make):
    code, _, err = mtrain("init", *make(), "--yes")
    assert code == 0, err
    assert train_pairs() == PAIRS


def test_compressed_files_and_parquet(mtrain):
    names = text_files("a.en", "a.fr")
    for name in names:
        Path(f"{name}.gz").write_bytes(gzip.compress(Path(name).read_bytes()))
    assert mtrain("init", "a.en.gz", "a.fr.gz")[0] == 0
    assert train_pairs() == PAIRS
    pq.write_table(pa.table({"de": TARGETS, "note": ["-"] * 300, "en": SOURCES}), "a.parquet")
    assert mtrain("init", "a.parquet", "--source-lang", "English")[0] == 0
    assert train_pairs(Path("en-de.yaml")) == PAIRS


def test_several_files_and_patterns(mtrain):
    for name in ("part-1", "part-2", "dev"):
        tsv_file(f"{name}.tsv")
    assert mtrain("init", "part-1.tsv", "dev.tsv", "part-2.tsv", "-o", "a.yaml")[0] == 0
    config = load_config("a.yaml")
    assert len(train_pairs(Path("a.yaml"))) == 600
    assert config.data.validation[0].tsv == "dev.tsv" and config.run_dir == "runs/a"
    tsv_file("dev.txt")
    assert mtrain("init", "part-?.tsv", "-o", "b.yaml")[0] == 0
    assert load_config("b.yaml").data.train[0].tsv == "part-?.tsv"
    assert mtrain("init", tsv_file("all.txt"), "--validation", "dev.txt", "-o", "d.yaml")[0] == 0
    assert load_config("d.yaml").data.validation[0].tsv == "dev.txt"
    for name in ("one", "two"):
        text_files(f"{name}.en", f"{name}.fr", 20)
    assert mtrain("init", "*.fr", "*.en", "-o", "c.yaml")[0] == 0
    assert train_pairs(Path("c.yaml")) == [(t, s) for s, t in PAIRS[:20] * 2]


def test_validation_and_test_files(mtrain):
    train = text_files("train.en", "train.fr")
    text_files("val.en", "val.fr", 20)
    text_files("test_2016.en", "test_2016.fr", 10)
    text_files("test_bad.en", "test_bad.fr", 10)
    write(Path("test_bad.fr"), ["x"])
    code, _, err = mtrain("init", *train)
    assert code == 0
    assert "validation: val.en and val.fr, 20 pairs\ntest: test_2016.en and test_2016.fr, 10 pairs" in err
    assert "warning: not used: test_bad.en has 10 lines but test_bad.fr has 1 lines" in err
    data = load_config(CONFIG).data
    assert (data.validation[0].source, [*data.test]) == ("val.en", ["test_2016"])
    given = (
        "--validation",
        "test_2016.fr",
        "--validation",
        "test_2016.en",
        "--test",
        "val.en",
        "--test",
        "val.fr",
    )
    assert mtrain("init", *train, *given, "--force")[0] == 0
    data = load_config(CONFIG).data
    assert (data.validation[0].source, data.validation[0].target) == ("test_2016.en", "test_2016.fr")
    assert data.test["val"].source == "val.en"
    assert mtrain("init", *train, "--test", "val.fr", "--test", "val.en", "-o", "a.yaml")[0] == 0
    assert "holdout" in Path("a.yaml").read_text()  # not the test files
    assert mtrain("init", *train, "val.fr", "val.en", "--source-lang", "fr")[0] == 0
    assert load_config("fr-en.yaml").data.validation[0].source == "val.fr"


def test_columns_of_each_table_are_found_by_their_names(mtrain):
    tsv_file("train.tsv", ["en", *SOURCES], ["fr", *TARGETS])
    tsv_file("dev.tsv", ["fr", *TARGETS], ["en", *SOURCES])
    tsv_file("test.tsv", ["id", *map(str, range(len(PAIRS)))], ["en", *SOURCES], ["fr", *TARGETS])
    assert mtrain("init", "train.tsv", "--validation", "dev.tsv", "--test", "test.tsv")[0] == 0
    data = load_config(CONFIG).data
    for corpora in (data.train, data.validation, [data.test["test"]]):
        assert list(good_pairs(corpora, "error")) == PAIRS


def test_a_test_set_is_not_used_for_validation_however_it_is_named(mtrain, folder):
    text_files("train.en", "train.fr")
    text_files("val.en", "val.fr", 20)
    named = ("./train.en", "./train.fr", "--test", "./val.en", "--test", str(folder / "val.fr"))
    assert mtrain("init", *named)[0] == 0
    data = load_config(CONFIG).data
    assert isinstance(data.validation, Holdout) and [*data.test] == ["val"]


def test_files_of_a_language_may_name_its_script_or_region(mtrain):
    text_files("train.en", "train.fr")
    text_files("eng_Latn.dev", "fra_Latn.dev", 20)
    given = ("--validation", "fra_Latn.dev", "--validation", "eng_Latn.dev")
    assert mtrain("init", "train.en", "train.fr", *given)[0] == 0
    assert list(good_pairs(load_config(CONFIG).data.validation, "error")) == PAIRS[:20]


def test_parts_of_a_table_may_have_any_suffix(mtrain):
    half = len(PAIRS) // 2
    for name, part in (("part-1.txt", slice(half)), ("part-2.txt", slice(half, None))):
        tsv_file(name, SOURCES[part], TARGETS[part])
    assert mtrain("init", "part-1.txt", "part-2.txt", "--source-lang", "en", "--target-lang", "fr")[0] == 0
    assert train_pairs() == PAIRS


def test_tables_without_names_of_columns_may_have_different_columns(mtrain):
    """As parallel corpora are distributed: with scores, addresses or languages before the sentences."""
    tsv_file("train.fr-en.tsv", TARGETS, SOURCES)
    tsv_file("mined.en-fr.tsv", [f"1.0{i}" for i, _ in enumerate(PAIRS)], SOURCES, TARGETS)
    addresses = [f"https://example.com/{i}" for i, _ in enumerate(PAIRS)]
    tsv_file("crawled.sent", addresses, addresses, SOURCES, TARGETS)
    tsv_file("test.txt", ["eng"] * len(PAIRS), ["fra"] * len(PAIRS), SOURCES, TARGETS)
    train = ("train.fr-en.tsv", "mined.en-fr.tsv", "crawled.sent")
    options = ("--source-lang", "en", "--target-lang", "fr", "--test", "test.txt")
    assert mtrain("init", *train, *options)[0] == 0
    assert train_pairs() == PAIRS * 3
    assert list(good_pairs([load_config(CONFIG).data.test["test"]], "error")) == PAIRS


@pytest.mark.parametrize("is_installed", [True, False])
@pytest.mark.parametrize("count", [3, 300])
def test_a_table_that_tells_nothing_has_the_columns_of_the_first(mtrain, monkeypatch, is_installed, count):
    if not is_installed:
        monkeypatch.setitem(sys.modules, "py3langid", None)
    tsv_file("train.fr-en.tsv", ["fr", *TARGETS], ["en", *SOURCES])
    short = [["".join(filter(str.isalpha, text)) for text in side[:count]] for side in (TARGETS, SOURCES)]
    tsv_file("more.tsv", *short)
    train = ("train.fr-en.tsv", "more.tsv")
    assert mtrain("init", *train, "--source-lang", "en", "--target-lang", "fr")[0] == 0
    assert train_pairs() == [*PAIRS, *zip(*short[::-1], strict=True)]


def test_a_table_in_similar_languages_is_not_exchanged(mtrain):
    """Both sides may seem to be in the same language."""
    tsv_file("train.tsv", SOURCES, [f"{text} Yes." for text in SOURCES])
    tsv_file("valid.tsv", SOURCES[:20], [f"{text} Yes." for text in SOURCES[:20]])
    options = ("--source-lang", "en", "--target-lang", "sco")
    assert mtrain("init", "train.tsv", *options)[0] == 0
    [validation] = load_config("en-sco.yaml").data.validation
    assert (validation.source_column, validation.target_column) == (0, 1)
    code, _, err = mtrain("init", "train.tsv")
    assert code == 2 and "both seem to be English" in one_line(err[err.index("error: ") :])


def test_given_columns_are_found_by_their_names_in_other_kinds(mtrain):
    header = ["text", "original", "reference"]
    columns = zip(header, (SOURCES, TARGETS, TARGETS[::-1]), strict=True)
    tsv_file("a.tsv", *([name, *texts] for name, texts in columns))
    records = [
        dict(zip(header, row, strict=True)) for row in zip(SOURCES, TARGETS, TARGETS[::-1], strict=True)
    ]
    write(Path("b.jsonl"), [json.dumps(record) for record in records])
    options = ("--source-column", "text", "--target-column", "original", "--source-lang", "en")
    assert mtrain("init", "a.tsv", "b.jsonl", *options, "--target-lang", "fr")[0] == 0
    assert train_pairs() == PAIRS * 2


@pytest.mark.parametrize(
    ("source", "target"), [("train.src", "train.trg"), ("train.en.txt", "train.fr.txt"), ("en.dev", "fr.dev")]
)
def test_text_files_whose_names_are_partners_may_have_tabs(mtrain, source, target):
    """Such as the name of a speaker before each sentence."""
    for name, texts in ((source, SOURCES), (target, TARGETS)):
        write(Path(name), [f"Anna\t{text}" for text in texts])
    assert mtrain("init", source, target, "--source-lang", "en", "--target-lang", "fr")[0] == 0
    [corpus] = load_config(CONFIG).data.train
    assert (corpus.source, corpus.target) == (source, target)


def test_similar_languages_and_short_texts_in_other_tables_are_accepted(mtrain):
    tsv_file("a.tsv", ["en", *SOURCES], ["no", *TARGETS])
    tsv_file("b.tsv", ["en", *SOURCES], ["no", *(f"{text} https://t.co/x1" for text in TARGETS)])
    tsv_file(
        "c.tsv",
        ["en", *(f"v1.{i}" for i, _ in enumerate(PAIRS))],
        ["no", *(f"v2.{i}" for i, _ in enumerate(PAIRS))],
    )
    assert mtrain("init", "a.tsv", "b.tsv", "c.tsv")[0] == 0
    assert len(train_pairs(Path("en-no.yaml"))) == 3 * len(PAIRS)


def test_a_table_without_sentences_has_the_columns_of_the_first(mtrain):
    tsv_file("train.fr-en.tsv", TARGETS, SOURCES)
    numbers = [*map(str, range(1000, 1030))]
    tsv_file("dev.tsv", numbers, numbers)
    options = ("--source-lang", "en", "--target-lang", "fr", "--validation", "dev.tsv")
    assert mtrain("init", "train.fr-en.tsv", *options)[0] == 0
    [validation] = load_config(CONFIG).data.validation
    assert (validation.source_column, validation.target_column) == (1, 0)


def test_a_corpus_in_a_third_language_is_reported(mtrain):
    german = ["Der alte Mann geht langsam durch den Garten und sucht nach seiner Brille."] * 300
    tsv_file("a.tsv", SOURCES, TARGETS)
    write(Path("b.src"), SOURCES)
    write(Path("b.trg"), german)
    code, _, err = mtrain("init", "a.tsv", "b.src", "b.trg")
    assert code == 0 and "warning: b.src and b.trg: b.trg does not seem to be in fr" in err


def test_two_text_files_beside_a_table_must_be_partners(mtrain):
    names = text_files("notes.txt", "todo.txt")
    code, _, err = mtrain("init", tsv_file(), *names)
    assert code == 3 and "error: notes.txt: no file of the same name in another language" in err


def test_words_in_the_name_of_a_folder_are_no_languages_if_the_text_is_in_others(mtrain):
    assert mtrain("init", *text_files("my-mt/train.src", "my-mt/train.trg"))[0] == 0
    assert CONFIG.exists()


@pytest.mark.parametrize("columns", [("1", "2"), ("source", "target")])
def test_given_columns_hold_only_for_tables_that_have_them(mtrain, columns):
    numbers = ["id", *map(str, range(len(PAIRS)))]
    tsv_file("a.tsv", numbers, ["source", *SOURCES], ["target", *TARGETS])
    tsv_file("b.tsv", SOURCES, TARGETS)
    options = ("--source-column", columns[0], "--target-column", columns[1], "--source-lang", "en")
    assert mtrain("init", "a.tsv", "b.tsv", *options, "--target-lang", "fr")[0] == 0
    assert train_pairs() == PAIRS * 2


def test_corpora_may_be_of_different_kinds(mtrain):
    names = text_files("part.en", "part.fr", len(PAIRS))
    train = (tsv_file("train.tsv"), *names, jsonl_file("train.jsonl"))
    text_files("val.en", "val.fr", 20)
    options = (
        "--validation",
        "val.fr",
        "--validation",
        "val.en",
        "--test",
        tsv_file("test.txt", TARGETS, SOURCES),
    )
    assert mtrain("init", *train, *options)[0] == 0
    data = load_config(CONFIG).data
    assert train_pairs() == PAIRS * 3
    assert list(good_pairs(data.validation, "error")) == PAIRS[:20]
    assert list(good_pairs([data.test["test"]], "error")) == PAIRS


def test_columns_that_are_guessed_for_a_corpus_of_another_kind_are_reported(mtrain):
    names = text_files("train.src", "train.trg")
    options = (
        "--source-lang",
        "en",
        "--target-lang",
        "fr",
        "--test",
        tsv_file("test.tsv", SOURCES, TARGETS, TARGETS[::-1]),
    )
    code, _, err = mtrain("init", *names, *options)
    assert code == 0 and "warning: test.tsv: using columns 0 and 1" in err


def test_a_config_on_stdout_names_the_default_file(mtrain):
    code, out, _ = mtrain("init", *text_files(), "-o", "-")
    assert code == 0 and "mtrain check en-fr.yaml" in out and "run_dir: runs/en-fr" in out


def test_validation_and_test_files_of_the_sides(mtrain):
    for role in ("train", "dev", "test"):
        text_files(f"src-{role}.txt", f"tgt-{role}.txt", 20)
    assert mtrain("init", "tgt-train.txt", "src-train.txt", "--yes", "-o", "a.yaml")[0] == 0
    given = ("src-train.txt", "src-dev.txt", "tgt-test.txt", "tgt-train.txt", "tgt-dev.txt", "src-test.txt")
    assert mtrain("init", *given, "--yes", "-o", "b.yaml")[0] == 0
    for name in ("a.yaml", "b.yaml"):
        data = load_config(name).data
        assert (data.validation[0].source, data.validation[0].target) == ("src-dev.txt", "tgt-dev.txt")
        assert (data.test["test"].source, data.test["test"].target) == ("src-test.txt", "tgt-test.txt")


@pytest.mark.parametrize("train", [("train.fr", "train.en"), ("train.src", "train.trg")])
@pytest.mark.parametrize("dev", [("dev.fr", "dev.en"), ("dev.src", "dev.trg"), ("dev.trg", "dev.src")])
def test_names_of_different_kinds_have_the_same_sides(mtrain, train, dev):
    names = dict(zip((".en", ".fr", ".src", ".trg"), (SOURCES, TARGETS) * 2, strict=True))
    for name in (*train, *dev):
        write(Path(name), names[Path(name).suffix])
    languages = ("--source-lang", "en", "--target-lang", "fr")
    assert mtrain("init", *train, *(f"--validation={name}" for name in dev), *languages)[0] == 0
    data = load_config(CONFIG).data
    for corpus in (data.train, data.validation):
        assert list(good_pairs(corpus, "error")) == PAIRS


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("names", [("dev.en", "dev.nb"), ("dev.en-GB", "dev.en-US")])
def test_two_files_are_never_the_same_side(mtrain, names, order):
    text_files("train.src", "train.trg")
    text_files(*names)
    given = (f"--validation={name}" for name in names[::order])
    assert (
        mtrain("init", "train.src", "train.trg", *given, "--source-lang", "en", "--target-lang", "fr")[0] == 0
    )
    [corpus] = load_config(CONFIG).data.validation
    assert {corpus.source, corpus.target} == {*names}
    assert corpus.source == "dev.en" or names[0] != "dev.en"


@pytest.mark.parametrize("suffix", ["cni", "tar", "doc", "csv", "tsv", "sgm", "xls", "tar.gz", "CNI"])
def test_a_language_of_three_letters_in_the_suffix(mtrain, suffix):
    """The suffixes of several formats are codes of languages, too."""
    for role in ("train", "dev"):
        names = text_files(f"{role}.en", f"{role}.fr")
        if suffix.endswith(".gz"):
            Path(names[1]).write_bytes(gzip.compress(Path(names[1]).read_bytes()))
        Path(names[1]).rename(f"{role}.{suffix}")
    assert mtrain("init", "train.en", f"train.{suffix}", "--yes", "-o", "c.yaml")[0] == 0
    data = load_config("c.yaml").data
    assert (data.source_lang, data.target_lang) == ("en", suffix.removesuffix(".gz").lower())
    assert data.validation[0].target == f"dev.{suffix}"
    assert train_pairs(Path("c.yaml")) == PAIRS


def archive():
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("train.en"))
    return file.getvalue()


@pytest.mark.parametrize(
    ("name", "contents", "message"),
    [
        ("train.tar", archive(), ".tar files are not supported; unpack it"),
        ("train.tar.gz", gzip.compress(archive(), mtime=0), ".tar files are not supported; unpack it"),
        ("train.tgz", gzip.compress(archive(), mtime=0), ".tgz files are not supported; unpack it"),
        ("train.doc", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1\0", ".doc files are not supported; save it as"),
        ("train.doc", rb"{\rtf1 Hello.}", ".doc files are not supported; save it as plain text"),
        ("train.sgm", b"\xef\xbb\xbf\n<doc>\n", ".sgm files are not supported; convert it"),
        ("train.csv", b"en,fr\nYes,Oui\n", ".csv files are not supported; save the table"),
        ("train.csv", b'"Yes, I am.";Oui\n', ".csv files are not supported; save the table"),
        ("other.csv", b"Yes.\n", ".csv files are not supported; save the table"),
        ("train.xls", b"Yes\tOui\n", ".xls files are not supported; save the table"),
        ("train.docx", b"Yes.\n", ".docx files are not supported; save it as plain text"),
        ("train.tsv", b"Yes.\tOui.\nNo.\tNon.\n", "train.en: one column only; give two files"),
    ],
)
def test_archives_documents_and_tables_beside_text(mtrain, name, contents, message):
    write(Path("train.en"), ["Yes."])
    Path(name).write_bytes(contents)
    code, _, err = mtrain("init", "train.en", name, "--yes")
    assert code == 3 and message in one_line(err)


def test_sentences_with_as_many_commas_are_no_table(mtrain):
    write(Path("train.en"), [f"Well, dog {number} sleeps." for number in range(300)])
    write(Path("train.csv"), [f"Mapu, re {number} sleeps." for number in range(300)])
    write(Path("other.csv"), [f"Mapu, re {number} sleeps." for number in range(300)])
    assert mtrain("init", "train.en", "train.csv", "--yes")[0] == 0
    assert load_config("en-csv.yaml").data.target_lang == "csv"
    assert mtrain("init", "train.en", "other.csv", "--target-lang", "csv", "--force", "--yes")[0] == 0


def test_given_languages_are_shown_and_written(mtrain):
    code, _, err = mtrain("init", *text_files("a.en", "a.csb"), "--target-lang", "Arpitan", "--yes")
    assert code == 0
    assert f"target: a.csb (Arpitan): {TARGETS[0]}" in err
    assert "warning: a.csb: its name says csb, not frp" in err
    assert load_config("en-frp.yaml").data.target_lang == "frp"
    assert Path("en-frp.yaml").read_text().startswith("# English to Arpitan.")
    code, _, err = mtrain("init", *text_files("a.txt", "b.txt"), "--target-lang", "it", "--yes")
    assert code == 0 and "warning: b.txt: the text does not seem to be Italian, but perhaps French" in err


def test_a_language_that_cannot_be_identified_is_not_doubted(mtrain):
    code, _, err = mtrain("init", *text_files("a.en", "a.csb"), "--yes")
    assert code == 0
    assert f"target: a.csb (Kashubian): {TARGETS[0]}" in err and "does not seem" not in err
    assert load_config("en-csb.yaml").data.target_lang == "csb"


def test_identifiers_beside_sides_are_no_indonesian(mtrain):
    """As in the Tatoeba Challenge, whose folders have the names of the languages."""
    names = text_files("eng-fra/train.src", "eng-fra/train.trg")
    Path("eng-fra/train.id").write_text("corpus\teng\tfra\n")
    code, _, err = mtrain("init", *names, "eng-fra/train.id")
    assert code == 0 and "not used: eng-fra/train.id\n" in err
    data = load_config(CONFIG).data
    assert (data.source_lang, data.target_lang, train_pairs()) == ("en", "fr", PAIRS[:300])
    assert mtrain("init", *text_files("train.id", "train.en"))[0] == 0 and Path("id-en.yaml").exists()


@pytest.mark.parametrize("role", ["validation", "test"])
def test_a_given_file_is_not_dropped_without_a_word(mtrain, role):
    for name in ("train", "dev", "test", "other"):
        tsv_file(f"{name}.tsv")
    code, _, err = mtrain("init", "train.tsv", "dev.tsv", "test.tsv", f"--{role}", "other.tsv")
    unused = "dev.tsv" if role == "validation" else "test.tsv"
    assert code == 2 and f"error: {unused}: not used, because the names say {role}" in one_line(err)
    assert not CONFIG.exists()


def test_a_region_in_an_option_but_not_in_the_name(mtrain):
    names = text_files("train.en", "train.pt", 20)
    assert mtrain("init", *names, "--source-lang", "pt-BR", "--yes")[0] == 0
    data = load_config("pt-BR-en.yaml").data
    assert (data.source_lang, data.target_lang) == ("pt-BR", "en")
    assert (data.train[0].source, data.train[0].target) == ("train.pt", "train.en")


@pytest.mark.parametrize(
    ("name", "options", "code"),
    [
        ("pt-br", (), "pt-BR"),
        ("zh_hans", (), "zh-Hans"),
        ("xyz", ("--source-lang", "zh-hant-tw"), "zh-Hant-TW"),
        ("x", ("--source-lang", "EN-us"), "en-US"),
    ],
)
def test_codes_in_any_case(mtrain, name, options, code):
    names = [*text_files(f"train.{name}", "train.fr", 20), *text_files(f"dev.{name}", "dev.fr", 20)]
    files = names if not options else [names[0], names[1], "--validation", names[2], "--validation", names[3]]
    assert mtrain("init", *files, *options, "--target-lang", "fra", "--yes", "-o", CONFIG)[0] == 0
    data = load_config(CONFIG).data
    assert (data.source_lang, data.target_lang) == (code, "fr")
    assert data.validation[0].source == names[2]


def test_a_config_is_replaced_only_by_force(mtrain):
    names = text_files()
    CONFIG.write_text("precious")
    for arguments in ((), ("-o", CONFIG)):
        code, out, err = mtrain("init", *names, *arguments)
        assert (code, out) == (2, "") and err.endswith(
            "error: en-fr.yaml: already exists; give another file with -o, or replace it with --force\n"
        )
    assert CONFIG.read_text() == "precious"
    Path("runs/en-fr").mkdir(parents=True)
    assert mtrain("init", *names, "--force")[0] == 0
    assert load_config(CONFIG).run_dir == "runs/en-fr-2"  # a run that exists is not touched
    assert mtrain("init", *names, "-o", "nowhere/x.yaml")[0] == 6
    code, _, err = mtrain("init", *names, "-o", "x.yaml.gz")
    assert code == 2 and "x.yaml.gz: a config cannot be compressed; give another name with -o" in one_line(
        err
    )
    assert mtrain("init", *names, "-o", names[0], "--force")[0] == 2
    assert Path(names[0]).read_text().startswith(SOURCES[0])


def test_files_that_init_finds_and_links_are_not_replaced(mtrain):
    names = text_files("train.en", "train.fr")
    before = Path(text_files("val.en", "val.fr")[0]).read_text()
    code, _, err = mtrain("init", *names, "-o", "val.en", "--force")
    assert code == 2 and "val.en: this file is also an input" in err
    assert Path("val.en").read_text() == before
    Path("dangling.yaml").symlink_to("nowhere.yaml")
    assert mtrain("init", *names, "-o", "dangling.yaml")[0] == 2
    Path("file.yaml").write_text("old")
    Path("link.yaml").symlink_to("file.yaml")
    Path("file.yaml").chmod(0o600)
    Path(".link.yaml.tmp").write_text("precious")
    assert mtrain("init", *names, "-o", "link.yaml", "--force")[0] == 0
    assert Path("link.yaml").is_symlink() and load_config(Path("file.yaml")).data.source_lang == "en"
    assert Path("file.yaml").stat().st_mode & 0o777 == 0o600
    assert Path(".link.yaml.tmp").read_text() == "precious"


@pytest.mark.parametrize("name", ["a\nb.yaml", "a\udcff.yaml"])
def test_names_that_a_config_cannot_have(mtrain, name):
    code, _, err = mtrain("init", *text_files(), "-o", name)
    assert code == 2 and "the name of a config must be printable Unicode text" in one_line(err)


def test_quoted_fields_are_read_without_quotes(mtrain):
    """Tabs in them do not count as ends of columns."""
    with Path("corpus.tsv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter="\t")
        writer.writerow(("en", "fr"))
        writer.writerows((f'Tom said "{pair.source}"', f"Tom : {pair.target}") for pair in PAIRS)
        writer.writerow(('"\t"', "\t"))
    code, _, err = mtrain("init", "corpus.tsv")
    assert code == 0 and f'source: en (English): Tom said "{PAIRS[0].source}"' in err
    [train] = load_config(CONFIG).data.train
    assert train.quotes and train.header


def test_unreadable_lines_are_skipped_by_the_config(mtrain):
    lines = [f"{pair.source}\t{pair.target}" for pair in PAIRS]
    write(Path("corpus.tsv"), [*lines, "bad"])
    code, _, err = mtrain("init", "corpus.tsv")
    assert code == 0 and "warning: 1 pairs cannot be read: corpus.tsv:301: 1 column(s)" in err
    assert load_config(CONFIG).data.bad_lines == "skip"
    write(Path("corpus.tsv"), lines)
    write(Path("corpus.test.tsv"), [*lines[:20], "bad"])  # every line of a test set must be readable
    assert mtrain("init", "corpus.tsv", "--test", "corpus.test.tsv", "--force")[0] == 0
    assert load_config(CONFIG).data.bad_lines == "error"


@pytest.mark.parametrize(
    ("files", "arguments", "code", "message"),
    [
        ({}, "nowhere.en nowhere.fr", 3, "nowhere.en: no such file"),
        ({"a/x": b"x"}, "a", 3, "a: a folder; give the files in it"),
        ({"a.en": b"x\n" * 5, "a.fr": b"x\n" * 4}, "a.en a.fr", 3, "a.en has 5 lines but a.fr has 4 lines"),
        ({"a.txt": b"Hello.\n"}, "a.txt", 3, "a.txt: one column only; give two files"),
        (
            {"a.tsv": b"Hello.\n"},
            "a.tsv",
            3,
            "columns of text are needed, source and target; found 1 among 0; tabs separate columns",
        ),
        ({"a.tsv": b""}, "a.tsv", 3, "a.tsv: is empty"),
        ({"a.en": b"", "a.fr": b""}, "a.en a.fr", 3, "a.en and a.fr: no pair of sentences"),
        (
            {"UTF-8.tsv": b"It is.\tIl est.\n" * 9 + b"No.\n" * 4},
            "UTF-8.tsv",
            3,
            "1 column(s); at least 2 expected\n",
        ),
        ({"a.en": b"a\0b\n", "a.fr": b"x\n"}, "a.en a.fr", 3, "a.en: not a text file"),
        (
            {"a.en": b"<url>http://x</url>\nYes.\n", "a.fr": b"<url>http://x</url>\nOui.\n"},
            "a.en a.fr",
            3,
            "a.en: begins with markup, <url>http://x</url>; remove such lines from both files: grep -vE ",
        ),
        (
            {"a.en": b"<?xml version='1.0'?>\n", "a.fr": b"<URL>\n"},
            "a.en a.fr",
            3,
            "a.en: contains XML or SGML; convert it to TSV",
        ),
        (
            {"a.en.srt": b"1\r\n00:00:01,000 --> 00:00:02,000\r\nYes.\r\n", "a.fr.srt": b"1\n"},
            "a.en.srt a.fr.srt",
            3,
            "a.en.srt: contains subtitles with times; keep the sentences only, one per line",
        ),
        ({"a.xlf": b"<xliff>\n"}, "a.xlf", 3, "a.xlf: .xlf files are not supported; convert it to TSV"),
        ({"a.en": b"\xff\xfea\0\n\0", "a.fr": b"x\n"}, "a.en a.fr", 3, "a.en: UTF-16; convert it: iconv"),
        (
            {"a.en": b"x\n", "a.fr": b"\xe9t\xe9\n"},
            "a.en a.fr",
            3,
            "1 of 1 pairs cannot be read: a.fr:1: not valid UTF-8",
        ),
        (
            {"a.en": gzip.compress(b"x", mtime=0), "a.fr": b"x"},
            "a.en a.fr",
            3,
            "a.en: compressed with gzip; give it",
        ),
        ({"a.csv": b"a,b\n"}, "a.csv", 3, "a.csv: .csv files are not supported; save the table as TSV"),
        ({"a.en.xz": b"x"}, "a.en.xz", 3, "a.en.xz: .xz files are not supported; decompress it"),
        ({"a.json": b'[{"en": "a"}]'}, "a.json", 3, "a.json:1: not JSONL"),
        (
            {"a.tsv": b"a\tb\n", "a.jsonl": b"{}"},
            "a.*",
            3,
            "a.jsonl and a.tsv are of different kinds; give them one by one",
        ),
        (
            {"a.en-fr.tsv": b"A b.\tC d.\n", "a.en-de.tsv": b"A b.\tE f.\n"},
            "a.en-fr.tsv a.en-de.tsv",
            3,
            "a.en-de.tsv: the names say de, not fr; leave them out",
        ),
        ({"a.en": b"x\n"}, "a.en a.en", 2, "a.en: given twice"),
        (
            {"a.en": b"x\n", "a.fr": b"x\n"},
            "a.en a.fr --source-column 1",
            2,
            "need a TSV, JSONL or Parquet file first",
        ),
        ({"a.tsv": b"A b.\tC d.\n"}, "a.tsv --source-column 7", 2, "no column 7; choose from 0, 1"),
        ({"a.en": b"x\n", "a.fr": b"x\n"}, "a.en a.fr --max-minutes -1", 2, "--max-minutes"),
        (
            {"a": b"x\n", "b": b"x\n"},
            "a b",
            2,
            "a and b: the languages are not known; give --source-lang and --target-lang",
        ),
        ({"a": b"x", "b": b"y"}, "a b --max-minutes inf", 2, "--max-minutes inf: must be at most 1000000000"),
        ({"a": b"x", "b": b"y"}, "a b --target-lang d.e", 2, "--target-lang d.e: give a code such as en"),
        ({"a": b"x", "b": b"y"}, f"a b --target-lang en{'_' * 60}!", 2, "!: give a code such as en"),
        ({"a": b"x", "b": b"y"}, "a b --target-lang Farsi", 2, "--target-lang Farsi: give a code such as en"),
        (
            {"a": b"x\n", "b": b"x\n"},
            "a b --target-lang de",
            2,
            "the languages are not known; give --source-lang",
        ),
        (
            {"a": b"This is the same text in one language.\n", "b": b"It is all in English, is it not?\n"},
            "a b",
            2,
            "a and b: both seem to be English",
        ),
        (
            {"a": b"x\n", "b": b"y\n"},
            "a b --source-lang pt --target-lang pt-BR",
            2,
            "pt and pt-BR are the same language; give two different ones",
        ),
        (
            {"a.tsv": b"7\tHello.\n"},
            "a.tsv",
            3,
            "found 1 among 0, 1; choose with --source-column and --target-column",
        ),
        (
            {"a.jsonl": b'{"en": "A b.", "de": "C d.", "fr": "E f."}'},
            "a.jsonl",
            2,
            "found the languages en, de, fr; choose two with --source-lang",
        ),
    ],
)
def test_mistakes_end_in_one_line(mtrain, files, arguments, code, message):
    for name, contents in files.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(contents)
    found, out, err = mtrain("init", *arguments.split(), "--quiet")
    assert (found, out) == (code, "")
    assert message in one_line(err[err.index("error: ") :])
    assert not list(Path().glob("*.yaml"))


def test_what_archives_and_tools_have_besides_a_corpus_is_not_used(mtrain):
    names = text_files("Europarl.en-fr.en", "Europarl.en-fr.fr")
    notes = ["README", "LICENSE", "Europarl.en-fr.ids", "Europarl.en-fr.xml", "train.meta.jsonl.gz"]
    notes += ["train.stats.json", "corpus.best-scores.zst", "corpus.filters.json"]
    for name in notes:
        Path(name).write_text("<x>\n")
    code, _, err = mtrain("init", *notes, *names)
    assert code == 0 and f"not used: {', '.join(notes)}\n" in err
    [corpus] = load_config(CONFIG).data.train
    assert (corpus.source, corpus.target) == names


def test_a_column_in_a_given_language_is_used_although_most_of_its_texts_are_missing(mtrain):
    """As in the TED talks, whose first column has the name of the talk."""
    talks = [f"A talk about {number // 30}" for number in range(len(PAIRS))]
    missing = [target if number % 30 == 0 else "__NULL__" for number, target in enumerate(TARGETS)]
    rows = ["\t".join(row) for row in zip(talks, SOURCES, missing, strict=True)]
    write(Path("ted.tsv"), ["talk_name\ten\taz", *rows])
    code, _, err = mtrain("init", "ted.tsv", "--source-lang", "az", "--target-lang", "en")
    assert code == 0 and "warning: az: 97% of the texts are __NULL__; remove these pairs\n" in err
    [corpus] = load_config(Path("az-en.yaml")).data.train
    assert (corpus.source_column, corpus.target_column) == (2, 1)


def test_without_identification_the_languages_must_be_given(mtrain, monkeypatch):
    monkeypatch.setitem(sys.modules, "py3langid", None)
    sides = text_files("train.src", "train.trg")
    names = text_files("mine.txt", "deren.txt")
    for given in (sides, names):
        code, _, err = mtrain("init", *given)
        assert code == 2 and "give --source-lang and --target-lang; or install language identification" in err
    assert mtrain("init", *names, "--source-lang", "English", "--target-lang", "fra")[0] == 0
    assert train_pairs() == PAIRS


def test_contents_that_contradict_the_names_are_reported(mtrain):
    _, _, err = mtrain("init", *text_files("a.fr", "a.en"))
    assert "warning: a.fr: the text does not seem to be French, but perhaps English\n" in err
    assert "warning: a.en: the text does not seem to be English, but perhaps French\n" in err


def test_options_that_contradict_the_names_are_reported(mtrain):
    code, _, err = mtrain("init", *text_files(), "--source-lang", "de", "--target-lang", "fr")
    assert code == 0 and "warning: corpus.en: its name says en, not de" in err


def test_columns_that_are_guessed_are_reported(mtrain):
    tsv_file("corpus.tsv", SOURCES, TARGETS, TARGETS)
    code, _, err = mtrain("init", "corpus.tsv")
    assert code == 0
    assert "warning: using columns 0 and 1 of 0, 1, 2; --source-column and --target-column choose" in err


def answer(arguments, answers):
    """Run a command in a terminal and answer its questions; returns its exit code and what it showed. An
    answer of None is the end of input."""
    terminal, end = os.openpty()
    child = start_forked(*arguments, streams=[end, end, end])
    os.close(end)
    shown, rest = b"", list(answers)
    while select.select([terminal], [], [], 60)[0]:
        try:
            found = os.read(terminal, 4096)
        except OSError:  # the command has ended
            break
        shown += found
        if found.endswith(b": ") and rest:
            given = rest.pop(0)
            os.write(terminal, b"\x04" if given is None else f"{given}\n".encode())
    os.close(terminal)
    assert not rest, shown
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), shown.decode().replace("\r\n", "\n")


@pytest.mark.parametrize(
    ("answers", "languages", "minutes", "is_exchanged"),
    [
        (("", ""), ("en", "fr"), 60, False),
        (("en fr", "2.5"), ("en", "fr"), 2.5, False),
        (("fr en", "0"), ("fr", "en"), None, True),
        (("Low German, quy", ""), ("nds", "quy"), 60, False),
        (("French, English", "soon", "-1", "1e10", "9"), ("fr", "en"), 9, True),
        (("nds-x", "Anglais French", "it de", ""), ("it", "de"), 60, False),
        (("fr-CA en", ""), ("fr-CA", "en"), 60, True),
        (("en en-GB", "pt-BR", "en-fr", ""), ("en", "fr"), 60, False),
        (("en-ca", ""), ("en", "ca"), 60, False),
        (("zh-hant-tw, EN-us", ""), ("zh-Hant-TW", "en-US"), 60, False),
    ],
)
def test_two_questions_for_text_files(answers, languages, minutes, is_exchanged):
    code, shown = answer(["init", *text_files(), "-o", "c.yaml"], answers)
    assert code == 0, shown
    assert "Languages of source and target, English to French [en fr]: " in shown
    config = load_config("c.yaml")
    assert (config.data.source_lang, config.data.target_lang) == languages
    assert config.training.max_minutes == minutes
    assert train_pairs(Path("c.yaml")) == ([(t, s) for s, t in PAIRS] if is_exchanged else PAIRS)


def test_three_questions_for_a_table():
    file = tsv_file("corpus.tsv", TARGETS, SOURCES, TARGETS)
    code, shown = answer(["init", file], ["1", "1 9", "1 2", "", ""])
    assert code == 0, shown
    assert f"  1: {SOURCES[0]}\n" in shown and "1: give two of them, source and target" in shown
    assert "no column 9; choose from 0, 1, 2" in shown
    assert train_pairs() == PAIRS


def test_names_with_spaces_can_be_chosen():
    records = [{"a text": s, "another text": t, "a third text": s} for s, t in PAIRS]
    write(Path("corpus.jsonl"), [json.dumps(record) for record in records])
    code, shown = answer(["init", "corpus.jsonl", "-o", "c.yaml"], ["a third text, another text", "", ""])
    assert code == 0 and "source and target [a text, another text]" in shown, shown
    assert train_pairs(Path("c.yaml")) == PAIRS


def test_one_of_several_files_is_asked_for():
    for name in ("a.de", "a.en", "a.fr"):
        write(Path(name), SOURCES if name == "a.en" else TARGETS)
    code, shown = answer(["init", "a.de", "a.en", "a.fr"], ["1 2", "", ""])
    assert code == 0, shown
    assert f"  1 (a.en): {SOURCES[0]}\n" in shown
    assert train_pairs() == PAIRS


def test_nothing_is_asked_if_it_is_known_and_nothing_written_without_an_answer():
    known = ["--source-lang", "en", "--target-lang", "fr", "--max-minutes", "5"]
    assert answer(["init", *text_files(), *known], [])[0] == 0
    assert answer(["init", *text_files(), "--yes", "--force"], [])[0] == 0
    code, shown = answer(["init", *text_files(), "-o", "c.yaml"], ["", None])
    assert code == 2 and "error: no answer; nothing was written" in shown and not Path("c.yaml").exists()
