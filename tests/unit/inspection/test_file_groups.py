"""Files that belong together, by their names."""

from pathlib import Path

import pytest

from mtrain.errors import DataError, UsageError
from mtrain.inspection.file_groups import (
    Group,
    divide_by_role,
    find_siblings,
    group_text_files,
    names_of_test_sets,
)


@pytest.mark.parametrize(
    ("files", "languages"),
    [
        (("train.en", "train.de"), ("en", "de")),
        (("train.de-en.de", "train.de-en.en"), ("de", "en")),
        (("en/train.txt", "de/train.txt"), ("en", "de")),
        (("english.txt", "german.txt"), ("en", "de")),
        (("corpus.en", "other.txt"), ("en", None)),
        (("news.de-en.de.gz", "wmt.de-en.en"), ("de", "en")),
        (("source.txt", "target.txt"), (None, None)),
        (("pt_BR.txt", "en.txt"), ("pt-BR", "en")),
        (("train.es", "train.cni"), ("es", "cni")),
        (("TRAIN.CNI", "TRAIN.ES"), ("cni", "es")),
        (("tatoeba.awa-eng.awa", "tatoeba.awa-eng.eng"), ("awa", "en")),
        (("Tatoeba.en-kab.en", "Tatoeba.en-kab.kab"), ("en", "kab")),
        (("dev/ace_Latn.dev", "dev/eng_Latn.dev"), ("ace-Latn", "en-Latn")),
        (("train.tags.de-en.de", "train.tags.de-en.en"), ("de", "en")),
        (("train.zh-Hant", "train.sr_Latn_RS"), ("zh-Hant", "sr-Latn-RS")),
        (("corpus.csb.gz", "other.pl"), ("csb", "pl")),
        (("kashubian.txt", "polish.txt"), ("csb", "pl")),
        (("newstest2014-deen-src.de", "newstest2014-deen-ref.en"), ("de", "en")),
        (("train.tar", "train.doc"), ("tar", "doc")),
        (("train.en", "train.tok"), ("en", "tok")),  # Toki Pona
        (("train.en.tok", "train.de.tok"), ("en", "de")),
        (("train.en", "train.dev"), ("en", "dev")),  # Domung
        (("corpus.en", "corpus.dev"), ("en", None)),
        (("train.raw", "train.bpe"), (None, None)),
        (("corpus.pt-br", "corpus.en"), ("pt-BR", "en")),
        (("OpenSubtitles.en-zh_cn.en", "OpenSubtitles.en-zh_cn.zh_cn"), ("en", "zh-CN")),
        (("train.zh-tw", "train.en"), ("zh-TW", "en")),
        (("train.sr-latn", "train.ca-valencia"), ("sr-Latn", "ca-valencia")),
        (("train.en-us.txt", "train.de-at.txt"), ("en-US", "de-AT")),
        (("train.en-tc", "train.de-tc"), ("en", "de")),  # truecased
        (("my-file.de", "my-file.en"), ("de", "en")),
        (("a.de-en.txt", "b.de-en"), (None, None)),
        (("train.en", "train.txt"), ("en", None)),
        (("train.src", "train.trg"), (None, None)),
        (("translation.en", "original.de"), ("en", "de")),
        (("/home/src/train.en", "/home/src/train.de"), ("en", "de")),
    ],
)
def test_two_files_are_a_group_and_their_names_tell_the_languages(files, languages):
    assert group_text_files(files) == [Group(files, languages)]


def test_more_files_are_grouped_by_what_their_names_have_in_common():
    files = ["train.en", "val.de", "train.de", "test_2016.de", "val.en", "test_2016.en"]
    groups = group_text_files(files)
    assert groups == [
        Group(("train.en", "train.de"), ("en", "de")),
        Group(("val.de", "val.en"), ("de", "en")),
        Group(("test_2016.de", "test_2016.en"), ("de", "en")),
    ]
    roles = divide_by_role(groups)
    assert (roles.train, roles.validation, roles.test) == (groups[:1], groups[1:2], groups[2:])
    assert names_of_test_sets(roles.test) == ["test_2016"]


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("{}.src", "{}.trg"),
        ("{}.source", "{}.target"),
        ("{}.s1", "{}.s2"),
        ("{}.SRC", "{}.REF"),
        ("src-{}.txt", "tgt-{}.txt"),
        ("{}.src.txt", "{}.ref.txt"),
        ("{}_src.txt", "{}_tgt.txt"),
        ("src/{}.txt.gz", "tgt/{}.txt.gz"),
        ("/src/data/{}.bpe.src", "/src/data/{}.bpe.trg"),
        ("{}.src.en", "{}.trg.de"),
        ("en/{}.en", "de/{}.de"),
        ("cni/{}.txt", "quy/{}.txt"),
        ("{}.cni", "{}.es"),
        ("{}.en.gz", "{}.tok.gz"),
    ],
)
@pytest.mark.parametrize("names", [("train", "dev", "test"), ("ted", "med", "val")])
def test_files_of_several_sets_are_grouped(source, target, names):
    files = [pattern.format(name) for pattern in (source, target) for name in names]
    expected = [(source.format(name), target.format(name)) for name in names]
    assert [group.files for group in group_text_files(files)] == expected


def test_the_source_is_first_if_the_names_say_so():
    [group] = group_text_files(["train.trg.de", "train.src.en"])
    assert group == Group(("train.src.en", "train.trg.de"), ("en", "de"))
    assert group_text_files(["tgt.txt", "src.txt"]) == [Group(("src.txt", "tgt.txt"), (None, None))]


@pytest.mark.parametrize("code", ["qxx", "src", "dev"])
def test_given_languages_are_recognized_in_names(code):
    files = [f"train.{code}", f"val.{code}", "train.en", "val.en"]
    groups = group_text_files(files, {code, "en"})
    assert [group.files for group in groups] == [(files[0], files[2]), (files[1], files[3])]
    assert {group.languages for group in groups} == {(code, "en")}


def test_a_file_without_a_partner_is_an_error():
    with pytest.raises(DataError, match=r"^b\.en: no file of the same name in another language is given"):
        group_text_files(["a.en", "a.de", "b.en"])
    with pytest.raises(DataError, match=r"^one: "):
        group_text_files(["one", "two", "three"])


def test_one_group_is_for_training_whatever_its_name():
    group = Group(("dev.tsv",), ())
    assert divide_by_role([group]).train == [group]
    with pytest.raises(UsageError, match="--validation and --test"):
        divide_by_role([group, Group(("test.tsv",), ())])


def test_the_folder_tells_the_role_if_the_name_does_not():
    groups = [Group((f"data/{name}/en.txt",), ()) for name in ("train", "dev", "test")]
    assert [len(found) for found in divide_by_role(groups)] == [1, 1, 1]


def test_validation_and_test_files_are_found_beside_training_files(tmp_path: Path):
    for name in ("train", "val", "validation", "test", "test_2016", "newstest2014.x", "value", "traintest"):
        for language in ("en", "de"):
            (tmp_path / f"{name}.{language}").touch()
    (tmp_path / "dev.en").touch()  # without a German file
    names = tuple(str(tmp_path / f"train.{language}") for language in ("de", "en"))
    found = find_siblings(Group(names, ("de", "en")))
    assert [[Path(file).name for file in group.files] for group in found.validation] == [["val.de", "val.en"]]
    assert [Path(group.files[0]).name for group in found.test] == [
        "test.de",
        "test_2016.de",
        "newstest2014.x.de",
    ]
    assert names_of_test_sets(found.test) == ["test", "test_2016", "newstest2014"]
    assert find_siblings(Group((str(tmp_path / "val.en"),), ())) == ([], [], [])


def test_validation_and_test_files_beside_training_files_with_sides_in_their_names(tmp_path: Path):
    for role in ("train", "dev", "test"):
        for side in ("src", "tgt"):
            (tmp_path / f"{side}-{role}.txt").touch()
    found = find_siblings(
        Group(tuple(f"{tmp_path}/{side}-train.txt" for side in ("src", "tgt")), (None, None))
    )
    files = [Path(file).name for roles in found for group in roles for file in group.files]
    assert files == ["src-dev.txt", "tgt-dev.txt", "src-test.txt", "tgt-test.txt"]
    assert names_of_test_sets(found.test) == ["test"]


@pytest.mark.parametrize(
    ("name", "role"),
    [
        *(
            (name, "validation")
            for name in ("UNv1.0.devset.en", "kyoto-tune.en", "newsdiscussdev2015-enfr-src.en")
        ),
        *((name, "test") for name in ("UNv1.0.testset.en", "newssyscomb2009.en", "eval.en", "heldout.en")),
        *(("dev.newstest2013.en", "validation"), ("fine-tuning.en", "train")),
        *(("devel_test.hsb-de.de", "test"), ("generaltest2022.en-de.src.en", "test"), ("latest.en", "train")),
        *(("dev_test/dev.en", "validation"), ("devtest/eng_Latn.devtest", "test")),
    ],
)
def test_words_that_name_validation_and_test_sets(name, role):
    roles = divide_by_role([Group(("train.en",), ("en",)), Group((name,), ("en",))])
    assert [each.files[0] for each in getattr(roles, role)][-1] == name


@pytest.mark.parametrize(
    ("train", "others"),
    [
        ("train.src.gz", ["dev.src", "test.src.zst"]),
        ("train.src", ["dev.src.gz", "test.src"]),
        (
            "train-00000-of-00002.parquet",
            ["validation-00000-of-00001.parquet", "test-00000-of-00002.parquet"],
        ),
        ("train.src", ["dev.src", "devel_test.src"]),
    ],
)
def test_validation_and_test_files_may_be_compressed_or_divided_otherwise(tmp_path: Path, train, others):
    for name in (train, *others):
        (tmp_path / name).touch()
    found = find_siblings(Group((f"{tmp_path}/{train}",), (None,)))
    assert [Path(group.files[0]).name for groups in found for group in groups] == others


def test_test_sets_have_distinct_names_without_languages():
    groups = [Group((name,), ()) for name in ("a/test.en", "b/test.en", "en-de.tsv", "test_de_en.jsonl")]
    groups.append(Group(("test_cni.txt", "test_es.txt"), ("cni", "es")))
    assert names_of_test_sets(groups) == ["test", "test-2", "test-3", "test-4", "test-5"]
