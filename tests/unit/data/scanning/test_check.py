"""The data check: what it counts, what it warns about, and how `mtrain check` prints it."""

import json
import logging
import re
import sys
from collections import Counter

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrain.config.schema import Config
from mtrain.config.sections.corpora import Holdout, TextCorpus, ToyCorpus, TsvCorpus
from mtrain.config.sections.filters import Filters
from mtrain.data.pairs import duplicates
from mtrain.data.preparing.check_report import format_report, list_warnings
from mtrain.data.reading.digests import RawFiles
from mtrain.data.reading.files import toy_pairs
from mtrain.data.scanning.block_check import MARKED
from mtrain.data.scanning.check import PairCounts
from mtrain.data.scanning.leaks import Leak
from mtrain.data.scanning.scanner import CorpusScanner
from mtrain.data.text.writing_systems import ScriptFilter, script_of
from mtrain.training.fit import make_trainer
from mtrain.training.setup.prepare_run import prepare_only
from mtrain.training.setup.tokenizer import tokenize
from tests.support.checking import check_data

GOOD = [(f"The {n} cats sleep on mats.", f"Die {n} Katzen schlafen auf Matten.") for n in range(200)]


@pytest.fixture
def corpora(make_config, tmp_path):
    """A config of a training corpus and of a validation and a test set, each given as pairs."""

    def write(train, validation=(("A", "B"),), test=(("C", "D"),)) -> Config:
        files = {}
        for name, pairs in (("train", train), ("val", validation), ("test", test)):
            for index, side in enumerate(("source", "target")):
                text = "".join(f"{pair[index]}\n" for pair in pairs)
                (tmp_path / f"{name}.{side}").write_bytes(text.encode("utf-8", "surrogateescape"))
            files[name] = {side: str(tmp_path / f"{name}.{side}") for side in ("source", "target")}
        data = {"train": files["train"], "validation": files["val"], "test": {"news": files["test"]}}
        return make_config(data=data, tokenizer={"vocab_size": 300})

    return write


def test_clean_data_has_no_warnings(corpora):
    found = check_data(corpora(GOOD).data)
    assert found.sets == {"train": PairCounts(200), "validation": PairCounts(1), "news": PairCounts(1)}
    assert found.duplicates == 0 and found.leaks == {"validation": Leak(), "news": Leak()}
    assert found.scripts == ("LATIN", "LATIN") and list_warnings(found) == []
    assert found.lengths == ([0, 200, 0, 0, 0, 0, 0], [0, 200, 0, 0, 0, 0, 0])
    assert format_report(found).endswith("result: no warnings")


def test_test_sets_may_have_the_names_of_other_sets(corpora):
    data = corpora([*GOOD, ("A", "B")]).data
    [test] = data.test.values()
    found = check_data(data.model_copy(update={"test": {"train": test, "validation": test}}))
    assert found.sets["train"] == PairCounts(201) and found.sets["test.train"] == PairCounts(1)
    assert found.leaks["validation"] == Leak(1, 1, 1) and found.leaks["test.validation"] == Leak()


def test_texts_without_letters_have_no_expected_script(corpora):
    found = check_data(corpora([(f"{n} + {n}", f"{n} * 2") for n in range(2000)] + GOOD).data)
    assert found.scripts == ("", "") and not any("script" in warning for warning in list_warnings(found))


def test_texts_without_visible_characters_count_as_one_word(corpora):
    data = corpora([*GOOD, ("\ufe0f", "An invisible character.")]).data
    found = check_data(data.model_copy(update={"source_lang": "zh"}))
    assert sum(found.lengths[0]) == sum(found.lengths[1]) == 201


def test_unusable_pairs_are_counted(corpora):
    found = check_data(corpora([*GOOD, ("", "leer"), ("a", "  "), ("caf\udce9", "x")]).data)
    assert found.sets["train"] == PairCounts(200, empty=2, bad=1)
    assert list_warnings(found) == [
        "1 training pair(s) cannot be read; set data.bad_lines: skip to drop them"
    ]
    nothing = check_data(corpora([("", "")]).data)
    assert list_warnings(nothing) == ["no training pair is usable"]


def test_unusable_validation_and_test_sets_are_warned_of(corpora):
    bad = ("caf\udce9", "x")
    assert list_warnings(check_data(corpora(GOOD, [bad, ("A", "B")], [bad]).data)) == [
        "1 validation pair(s) cannot be read; set data.bad_lines: skip to drop them",
        "1 pair(s) of news cannot be read; it cannot be scored until they are corrected",
        "news has no usable pair",
    ]


def test_a_corpus_without_usable_pairs_is_warned_of(corpora):
    data = corpora([("", "leer")]).data
    data = data.model_copy(update={"train": [*data.train, ToyCorpus(toy="train")]})
    assert f"{data.names[0]} has no usable pair" in list_warnings(check_data(data))
    data = data.model_copy(
        update={"train": [*data.train, ToyCorpus(toy="train")], "filters": Filters(duplicates="pairs")}
    )
    assert f"{data.names[0]} has no usable pair" in list_warnings(check_data(data))


def test_a_corpus_of_other_columns_than_sentences_is_warned_of(corpora):
    addresses = [(f"https://example.com/{n}", source) for n, (source, _) in enumerate(GOOD)]
    [warning] = list_warnings(check_data(corpora(addresses).data))
    wrong = "train.source: the {} seem not to be sentences; check the files and columns"
    assert warning.endswith(wrong.format("sources"))
    numbers = [(f"{n}", f"{n}.5") for n in range(100, 300)]
    assert any(
        warning.endswith(wrong.format("sources and targets"))
        for warning in list_warnings(check_data(corpora(numbers).data))
    )


def test_the_first_unreadable_pairs_are_listed_with_reasons(corpora, tmp_path):
    bad = [("caf\udce9", "x")] * 7
    found = check_data(corpora([*GOOD, *bad], [("A", "B"), *bad[:1]]).data)
    reason = "not valid UTF-8 (byte 4 of the line)"
    assert found.unreadable == {
        "train": [f"{tmp_path}/train.source:{201 + n}: {reason}" for n in range(5)],
        "validation": [f"{tmp_path}/val.source:2: {reason}"],
    }
    report = format_report(found).split("\n")
    assert report[1:3] == [f"  unreadable: {tmp_path}/train.source:{201 + n}: {reason}" for n in range(2)]
    assert report[6] == "  unreadable: 2 more" and report[8].startswith("  unreadable: ")


def test_shifted_lines_are_warned_of(corpora, tmp_path):
    sources, targets = (list(side) for side in zip(*toy_pairs("train")[:2000], strict=True))
    pairs = [*zip(sources, [*targets[:1000], "Une ligne de trop.", *targets[1000:-1]], strict=True)]
    data = corpora(pairs).data.model_copy(update={"target_lang": "fr"})
    place = f"{tmp_path}/train.source"
    warning = (
        f"{place}:1001 to {place}:2000: the targets seem to be 1 line below their sources; "
        f"look for a missing or additional line at or shortly before {place}:1001"
    )
    assert list_warnings(check_data(data)) == [warning]
    filtered = data.model_copy(update={"filters": Filters(max_ratio=1.5)})
    assert warning in list_warnings(check_data(filtered))
    corpora([*zip(sources[3:], targets, strict=False)])
    assert "the targets seem to be 3 lines below their sources" in list_warnings(check_data(data))[0]


def test_shifted_lines_are_warned_of_after_many_files_that_are_not_shifted(corpora, tmp_path):
    sources, targets = (list(side) for side in zip(*toy_pairs("train")[:2000], strict=True))
    for number in range(12):
        written = ["Une ligne de trop.", *targets[:-1]] if number == 11 else targets
        for side, lines in (("source", sources), ("target", written)):
            (tmp_path / f"part-{number:02}.{side}").write_text("".join(f"{line}\n" for line in lines))
    files = {side: str(tmp_path / f"part-*.{side}") for side in ("source", "target")}
    data = corpora(GOOD).data.model_copy(update={"train": [TextCorpus(**files)], "target_lang": "fr"})
    [warning] = [each for each in list_warnings(check_data(data)) if "below their sources" in each]
    assert f"{tmp_path}/part-11.source:1 to " in warning


def test_pairs_that_are_repeated_where_filters_are_off_are_counted(corpora, tmp_path):
    """Whatever the number of pairs that a repeated source removes elsewhere."""
    config = corpora([(f"The {n % 50} cats", f"Die {n} Katzen") for n in range(200)])
    [first] = config.data.train
    table = tmp_path / "off.tsv"
    table.write_text("".join(f"A dog {n % 30}\tEin Hund {n % 30}\n" for n in range(60)))
    data = config.data.model_copy(
        update={
            "train": [first, TsvCorpus(tsv=str(table), filters="off")],
            "filters": Filters(duplicates="source"),
        }
    )
    scanner = CorpusScanner(RawFiles(data), seed=0, check=True, for_tokenizer=False)
    found = check_data(data, None, scanner)
    assert found.rejected == {"duplicates": 150} and found.duplicates == 30


def test_a_holdout_that_takes_a_pair_of_each_source_leaves_nothing(mtrain, raw_config, tmp_path):
    table = tmp_path / "train.tsv"
    table.write_text("".join(f"A dog {n % 20}\tEin Hund {n}\n" for n in range(100)))
    data = {**raw_config["data"], "train": {"tsv": str(table)}, "validation": {"holdout": 30}}
    (tmp_path / "c.yaml").write_text(yaml.dump({**raw_config, "run_dir": str(tmp_path / "r"), "data": data}))
    code, _, err = mtrain("check", tmp_path / "c.yaml")
    assert code == 3 and "no training pair is left: data.validation.holdout takes all of them" in err
    data["validation"] = {"holdout": 10}
    (tmp_path / "c.yaml").write_text(yaml.dump({**raw_config, "run_dir": str(tmp_path / "r"), "data": data}))
    assert mtrain("check", tmp_path / "c.yaml")[0] == 0


@pytest.mark.parametrize("name", ["train", "toy"])
@pytest.mark.parametrize("words", [3, 100])
def test_exchanged_sides_are_warned_of(corpora, name, words):
    """Each corpus is checked separately; sentences may be short."""
    exchanged = [
        tuple(" ".join(text.split()[:words]) for text in (target, source))
        for source, target in toy_pairs("train")[:200]
    ]
    data = corpora(exchanged).data.model_copy(update={"target_lang": "fr"})
    others = {"train": [], "toy": [ToyCorpus(toy="train")]}[name]
    data = data.model_copy(update={"train": [*others, *data.train]})
    found = check_data(data)
    wrong = "the sources seem to be in fr and the targets in en; exchange the two sides"
    assert f"{data.names[-1]}: {wrong}" in list_warnings(found) and len(found.languages) == 1


@pytest.mark.parametrize("is_installed", [True, False])
def test_a_part_with_exchanged_sides_is_warned_of(corpora, tmp_path, monkeypatch, is_installed):
    if not is_installed:
        monkeypatch.setitem(sys.modules, "py3langid", None)
    pairs = toy_pairs("train")[:4000]
    exchanged = [(target, source) for source, target in pairs]
    data = corpora([*pairs[:2000], *exchanged[2000:3000], *pairs[3000:]]).data
    data = data.model_copy(update={"target_lang": "fr"})
    place = f"{tmp_path}/train.source"
    found = check_data(data).languages
    where = f"pairs from about {place}:2101 to {place}:3130"
    wrong = f"the sides of {where} seem to be exchanged, compared with the first pairs"
    assert found == {place: wrong}
    corpora(pairs)
    assert check_data(data).languages == {}


def test_quoted_fields_are_warned_of(corpora, tmp_path):
    lines = [f'"Two ""{n}"" dogs sleep."\t"Zwei ""{n}"" Hunde schlafen."\n' for n in range(20)]
    (tmp_path / "q.tsv").write_text("".join(lines))
    quoted = TsvCorpus(tsv=str(tmp_path / "q.tsv"))
    data = corpora(GOOD).data.model_copy(update={"validation": [quoted]})
    warning = "the fields seem to be in quotes, as csv writers write them; set quotes: true for it"
    assert list_warnings(check_data(data)) == [f"{tmp_path}/q.tsv: {warning}"]
    data = data.model_copy(update={"train": [*data.train, quoted]})
    assert check_data(data).quoted == [f"{tmp_path}/q.tsv"]
    read = quoted.model_copy(update={"quotes": True})
    assert check_data(data.model_copy(update={"train": [read], "validation": [read]})).quoted == []


def test_fit_logs_the_places_of_the_pairs_that_it_skips(corpora, caplog, tmp_path):
    config = corpora([*GOOD, ("caf\udce9", "x")])
    data = config.data.model_copy(update={"bad_lines": "skip"})
    make_trainer(config.model_copy(update={"data": data}), device="cpu")
    assert f"data: unreadable: {tmp_path}/train.source:201: not valid UTF-8" in caplog.text


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        (
            "train",
            {"jsonl": "f.jsonl", "source_field": "en", "target_field": "de"},
            "no pair of train can be",
        ),
        (
            "train",
            {"tsv": "empty.tsv"},
            "no training pair can be used; 1 are empty, and data.filters rejects 0",
        ),
        ("validation", {"tsv": "empty.tsv"}, "no pair of validation can be used; 1 are empty"),
        (
            "validation",
            {"holdout": 1000},
            "no training pair is left: data.validation.holdout takes all of them; lower it",
        ),
        (
            "validation",
            {"tsv": "f.jsonl"},
            "no pair of validation can be used; the first that cannot be read: ",
        ),
        (
            "test",
            {"news": {"tsv": "f.jsonl"}},
            "no pair of news can be used; the first that cannot be read: ",
        ),
    ],
)
@pytest.mark.parametrize("json_", [(), ("--json",)])
def test_a_set_without_usable_pairs_is_a_data_error(
    mtrain, raw_config, tmp_path, monkeypatch, key, value, error, json_
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "f.jsonl").write_text('{"src": "a", "tgt": "b"}\n')
    (tmp_path / "empty.tsv").write_text("a\t \n")
    raw = {**raw_config, "run_dir": "run", "data": {**raw_config["data"], key: value}}
    (tmp_path / "c.yaml").write_text(yaml.dump(raw))
    code, out, err = mtrain("check", "c.yaml", *json_)
    assert code == 3 and out and err.startswith(f"error: {error}") and err.count("\n") == 1
    if "jsonl" in value:
        assert err.endswith("f.jsonl:1: no field 'en'; available fields: src, tgt\n")


def test_shares_are_those_of_the_pairs_before_duplicates_are_left_out(corpora):
    data = corpora([*GOOD, *[("Tom", "Tom")] * 300]).data
    filtered = data.model_copy(update={"filters": Filters(duplicates="pairs")})
    scanner = CorpusScanner(RawFiles(filtered), seed=0, check=True, for_tokenizer=False)
    assert "300 training pairs (60.0%) have a copied source" in list_warnings(
        check_data(filtered, None, scanner)
    )


def test_bad_lines_are_counted_with_automatic_sizes(mtrain, raw_config, tmp_path):
    bad = tmp_path / "bad.en"
    bad.write_bytes(b"caf\xe9\n" + b"A cat sleeps.\n" * 30)
    data = {**raw_config["data"], "train": {"source": str(bad), "target": str(bad)}}
    raw = {**raw_config, "run_dir": str(tmp_path / "r"), "data": data, "model": {"preset": "auto"}}
    (tmp_path / "auto.yaml").write_text(yaml.dump(raw))
    code, out, err = mtrain("check", tmp_path / "auto.yaml")
    assert code == 0 and err == ""
    assert "1 training pair(s) cannot be read; set data.bad_lines: skip to drop them" in out


def test_skipping_bad_lines_is_not_advised_where_it_is_set(mtrain, raw_config, tmp_path):
    """The pairs are counted all the same."""
    bad = tmp_path / "bad.en"
    bad.write_bytes(b"caf\xe9\n" + b"A cat sleeps.\n" * 30)
    data = {**raw_config["data"], "train": {"source": str(bad), "target": str(bad)}, "bad_lines": "skip"}
    (tmp_path / "c.yaml").write_text(yaml.dump({**raw_config, "run_dir": str(tmp_path / "r"), "data": data}))
    code, out, _ = mtrain("check", tmp_path / "c.yaml")
    assert code == 0 and "1 training pair(s) cannot be read; they are skipped" in out
    assert "data.bad_lines" not in out


def test_punctuation_alone_is_not_a_leak(corpora):
    found = check_data(corpora([*GOOD, ("?", "?")], validation=[("!!!", "!")]).data)
    assert found.leaks["validation"] == Leak()


@pytest.mark.parametrize("part", [4_000_000, 7])
def test_repeated_pairs(corpora, monkeypatch, part):
    monkeypatch.setattr(duplicates, "_PART", part)  # pairs that are compared at a time
    found = check_data(corpora(GOOD + GOOD[:30]).data)
    assert found.duplicates == 30
    assert list_warnings(found) == ["30 training pairs (13.0%) are duplicates"]


def test_leaks_are_the_first_warnings(corpora):
    validation = [GOOD[3], (GOOD[4][0], "Etwas anderes."), ("the 5 CATS sleep, on mats", "x"), ("New", "Neu")]
    found = check_data(corpora(GOOD, validation, test=[("C", "D"), GOOD[7], GOOD[7]]).data)
    assert found.leaks == {"validation": Leak(1, 2, 3), "news": Leak(2, 2, 2)}
    first, second = list_warnings(found)
    assert first == (
        "LEAK: 3 of the 4 sources of validation are in the training corpus (2 exactly, 1 with the same "
        "target); its scores will be too high"
    )
    assert second.startswith("LEAK: 2 of the 3 sources of news")
    assert "result: 2 warnings" in format_report(found)


def test_pairs_like_held_out_ones_that_remain_in_training_are_a_leak(corpora):
    """Encoding drops the pairs with exactly the same source."""
    config = corpora(GOOD + GOOD)
    holdout = config.data.model_copy(update={"validation": Holdout(holdout=20)})
    found = check_data(holdout)
    assert found.sets == {"train": PairCounts(400), "validation": PairCounts(20), "news": PairCounts(1)}
    assert found.leaks == {"validation": Leak(), "news": Leak()}
    copies = [(source.upper(), target) for source, target in GOOD]
    corpora([*copies, *GOOD])
    scanner = CorpusScanner(RawFiles(holdout), seed=0, check=True)
    drawn = Counter(pair.source.casefold() for pair in scanner.result.held_out[0])
    leaked = list(drawn.values()).count(1)  # of the others, both spellings were drawn
    found = check_data(holdout, scanner=scanner)
    assert leaked > 10 and found.leaks["validation"] == Leak(normalized=leaked)
    assert list_warnings(found)[0] == (
        f"LEAK: {leaked} of the 20 sources of validation are in the training corpus (0 exactly, 0 with the "
        "same target); its scores will be too high"
    )
    assert "validation: 20 pairs (empty: 0, unreadable: 0)" in format_report(found)


def test_suspicious_pairs_are_listed_with_their_locations(corpora, tmp_path):
    odd = [
        ("Copied as it was.", "Copied as it was."),
        ("A sentence that is long.", "Kurz"),
        ("Ja.", "Ein Satz, der viel zu lang ist für das."),
        ("A sentence.", "Это предложение."),
        ("12 + 3", "12 + 3"),  # no words: nothing to translate
        ("Yes", "Jawohl, mein Herr"),  # short ones differ in length by nature
        ("It &apos;s a cat .", "Es ist eine Katze ."),
        ("A well-known cat .", "Eine wohl @-@ bekannte Katze ."),
        ("A co@@ met fell .", "Ein Komet fiel ."),
        ("Ask R&D, a@b.example & @me, 50@@5.", "Frag R&D, a@b.example & @me @daheim."),
    ]
    found = check_data(corpora(GOOD + odd).data)
    places = {kind: suspicious.places for kind, suspicious in found.suspicious.items()}
    line = f"{tmp_path}/train.source:"
    assert places == {
        "a copied source": [f"{line}201"],
        "an extreme length ratio": [f"{line}202", f"{line}203"],
        "an unexpected script": [f"{line}204"],
        MARKED: [f"{line}{number}" for number in (207, 208, 209)],
    }
    many = check_data(corpora(GOOD + odd[:1] * 20).data)
    assert many.suspicious["a copied source"].count == 20
    assert len(many.suspicious["a copied source"].places) == 5
    assert "20 training pairs (9.1%) have a copied source" in list_warnings(many)
    assert f"{line}205, ..." in format_report(many)


def test_a_length_ratio_is_extreme_if_it_is_not_typical_of_the_corpus(corpora):
    """Chinese texts have a third of the characters of English ones."""
    chinese = [(f"All of the {n} cats were sleeping.", f"那{n}只猫都睡了。") for n in range(100, 400)]
    concise = ("The representatives unanimously agreed.", "代表们一致同意。")
    long, short = ("A cat.", "这一天所有的猫都在垫子上睡觉,没有一只醒来。"), (concise[0] * 3, "同意。")
    for swapped in (False, True):
        pairs = [pair[::-1] if swapped else pair for pair in (*chinese, concise, long, short)]
        found = check_data(corpora(pairs).data).suspicious["an extreme length ratio"]
        assert [place.rpartition(":")[2] for place in found.places] == ["302", "303"]


def test_length_ratios_of_a_wrong_column_are_extreme(corpora):
    wrong = [(f"{n} cats", f"Die {n} Katzen schlafen seit gestern auf den Matten.") for n in range(200)]
    assert check_data(corpora(GOOD[:50] + wrong).data).suspicious["an extreme length ratio"].count == 200


def test_a_script_is_unexpected_if_most_lines_have_a_different_one(corpora):
    russian = [(f"Кошка номер {n} спит на коврике.", f"猫{n}号はマットの上で寝ている。") for n in range(100)]
    found = check_data(corpora(russian).data)
    assert found.scripts == ("CYRILLIC", "CJK") and found.suspicious["an unexpected script"].count == 0
    found = check_data(corpora([*russian, ("Latin here.", "猫")]).data)
    assert found.suspicious["an unexpected script"].count == 1


@settings(deadline=None)
@given(
    texts=st.lists(st.text(st.sampled_from("aéß1ªµ .ЖщΩ日カの😀ー"), max_size=6)),
    script=st.sampled_from(["LATIN", "CYRILLIC", "CJK", ""]),
)
def test_the_script_filter_finds_the_texts_with_another_script(texts: list[str], script: str):
    filter_ = ScriptFilter(script)
    unexpected = set(filter_.unexpected(texts))
    assert unexpected == set(filter_.unexpected(texts))
    for i, text in enumerate(texts):
        letters = Counter(script_of(letter) for letter in text)
        del letters[""]
        ties = [name for name, count in letters.items() if count == max(letters.values())]
        if script not in ties or ties == [script]:
            assert (i in unexpected) == (bool(ties) and ties != [script])


def test_a_sample_is_segmented_with_the_tokenizer(corpora):
    config = corpora(GOOD)
    tokenizer = tokenize(config)
    found = check_data(config.data, tokenizer).segmentation
    assert found is not None and found.pairs == 200 and found.too_long == 0
    assert found.unknown == [0, 0] and min(found.tokens_per_word) >= 1
    strange = corpora([*GOOD, *[("猫" * 90, "猫" * 20)] * 50])
    findings = check_data(strange.data, tokenizer)
    assert findings.segmentation is not None and findings.segmentation.too_long == 50
    assert findings.segmentation.unknown[0] > 0.5
    assert any("unknown or bytes" in warning for warning in list_warnings(findings))
    assert "tokens per word" in format_report(findings)


@pytest.mark.parametrize("text", ["猫" * 20, "猫 " * 20])
def test_tokens_per_word_count_characters_in_scripts_without_spaces(corpora, text):
    config = corpora([(f"cat {n}", f"{text}{n}") for n in range(300)])
    found = check_data(config.data, tokenize(config)).segmentation
    assert found is not None and found.tokens_per_word[1] < 1.1


def test_in_scripts_without_spaces_each_character_counts_as_a_word(corpora):
    pairs = [("猫在睡觉。" * 5, "the cat sleeps " * 4)] * 3 + [("ภาษา ไทย", "Thai")]
    found = check_data(corpora(pairs).data)
    assert found.lengths == ([0, 1, 0, 3, 0, 0, 0], [1, 0, 3, 0, 0, 0, 0])


def test_fit_checks_the_data_before_it_first_encodes_it(corpora, caplog):
    config = corpora(GOOD, validation=GOOD[:2])
    for expected in (1, 0):
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="mtrain"):
            make_trainer(config, device="cpu")
        assert caplog.text.count("data: LEAK: 2 of the 2 sources of validation") == expected
        cost = r"data: read and checked 200 pairs in [\d.]+ m?s \([\d,]+ pairs/s\), 1 warning"
        assert len(re.findall(cost, caplog.text)) == expected


def test_characters_that_normalization_changes_are_listed(corpora, mtrain, tmp_path):
    lines = [("10\u00a0m²", "一，二，"), ("می\u200cخواهم", "e\u0301\ufeff"), ("é", "\u0958ทำ½")]
    config = tmp_path / "normalized.yaml"
    settings = corpora([*GOOD, *lines]).model_dump(mode="json", exclude_unset=True)
    config.write_text(yaml.safe_dump(settings), encoding="utf-8")

    def check(rule: str, *options: str) -> str:
        code, out, err = mtrain("check", config, "--set", f"tokenizer.normalization={rule}", *options)
        assert code == 0, err
        return out

    found = json.loads(check("nmt_nfkc", "--json"))
    assert found["changes"]["source"] == {
        "count": 3,
        "examples": [["\u00a0", " ", 1], ["²", "2", 1], ["\u200c", " ", 1]],
    }
    assert found["warnings"][-1] == (
        "normalization changes 7 target characters, which the model can never write: ， → , (2), "
        "e\u0301 U+0065 U+0301 → U+00E9 (1), U+FEFF ZERO WIDTH NO-BREAK SPACE → a space (1), "
        "\u0958 U+0958 → U+0915 U+093C (1), "
        "ำ → U+0E4D THAI CHARACTER NIKHAHIT U+0E32 THAI CHARACTER SARA AA (1), ...; "
        "only tokenizer.normalization: identity keeps them"
    )
    shown = "U+00A0 NO-BREAK SPACE → a space (1), ² → 2 (1), U+200C ZERO WIDTH NON-JOINER → a space (1)"
    assert f"normalization changes 3 source characters: {shown}\n" in check("nmt_nfkc")
    assert "normalization" not in check("identity") and not json.loads(check("identity", "--json"))["changes"]


@pytest.mark.parametrize(("rule", "count"), [("nfkc", 1), ("identity", 0)])
@pytest.mark.parametrize("is_own", [False, True])
def test_the_normalization_of_an_existing_tokenizer_counts(
    corpora, caplog, tmp_path, rule: str, count: int, is_own: bool
):
    config = corpora([*GOOD, ("one…", "one…")])
    tokenizer = config.tokenizer.model_copy(update={"normalization": rule})
    tokenize(config.model_copy(update={"tokenizer": tokenizer}))
    settings = config.model_dump(mode="json", exclude_unset=True)
    if is_own:  # what the config does not say comes from the tokenizer
        settings |= {"tokenizer": {}, "model": {"preset": "auto"}}
    else:
        settings |= {"tokenizer": {"path": config.run_dir}, "run_dir": str(tmp_path / "second")}
    prepare_only(Config.model_validate(settings))
    message = (
        "data: normalization changes 1 target character, which the model can never write: … → ... (1); only"
    )
    assert caplog.text.count(message) == count


def test_the_command_prints_a_report_or_json(mtrain, config_file):
    code, out, _ = mtrain("check", config_file)
    assert code == 0 and "train: 8 pairs (empty: 0, unreadable: 0)" in out
    assert "words, source" in out and "#####" in out
    assert "warning: LEAK: 8 of the 8 sources of validation are in the training corpus" in out
    code, out, _ = mtrain("check", config_file, "--json")
    found = json.loads(out)
    assert code == 0 and found["sets"]["train"] == {"usable": 8, "empty": 0, "bad": 0}
    assert found["leaks"]["seen"]["pairs"] == 8 and len(found["warnings"]) == 2
    code, _, err = mtrain("check", config_file, "--set", "data.train.source=nowhere.en")
    assert code == 3 and err.startswith("error: nowhere.en: no such file") and err.count("\n") == 1


def test_a_run_that_starts_from_a_model_is_checked_with_its_tokenizer(mtrain, raw_config, run_dir, tmp_path):
    raw = {**raw_config, "run_dir": str(tmp_path / "tuned"), "model": {}, "tokenizer": {}}
    raw["training"] = {**raw["training"], "init_from": str(run_dir)}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(raw), encoding="utf-8")
    code, out, _ = mtrain("check", tmp_path / "config.yaml", "--json")
    found = json.loads(out)
    # With the tokenizer of that model: this run has none.
    assert code == 0 and min(found["segmentation"]["tokens_per_word"]) >= 1
    assert not (tmp_path / "tuned").exists()
