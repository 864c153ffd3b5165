"""Corpora of several languages: tags in encoded pairs, and checks in the languages of each corpus."""

from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from mtrain.config.languages import Direction
from mtrain.config.schema import Config
from mtrain.config.sections.data import DataConfig
from mtrain.data.epochs.mixing import weights_by_size
from mtrain.data.epochs.schedule import Position
from mtrain.data.reading.digests import RawFiles
from mtrain.data.scanning.scanner import CorpusScanner
from mtrain.errors import UsageError
from mtrain.training.setup.lengths import TrainingLengths
from tests.support import tokenizers
from tests.support.checking import check_data
from tests.support.encoding import TOY, config, prepare_data, rows, text_of, write
from tests.support.tokenizers import TYPES

TAGS = ["<en>", "<2fr>", "<fr>", "<2en>"]


@pytest.fixture(scope="module", params=TYPES)
def tokenizer(tmp_path_factory, request):
    """A tokenizer with the tags of both directions."""
    return tokenizers.train(tmp_path_factory.mktemp("tags"), symbols=TAGS, type=request.param)


def both_ways(tmp_path: Path, **keys) -> DataConfig:
    """Both directions of the toy corpus."""
    pairs = [*TOY[:20], ("\u200b", "x"), ("x", " ")]
    there = write(tmp_path / "there.tsv", pairs)
    back = {**write(tmp_path / "back.tsv", [pair[::-1] for pair in pairs])}
    back |= {"source_lang": "fr", "target_lang": "en"}
    return config(tmp_path, train=[there, back], **{"language_tags": "both", **keys})


def test_each_source_begins_with_the_tag_of_its_corpus(tmp_path, tokenizer):
    prepared = prepare_data(both_ways(tmp_path), tokenizer, tmp_path / "data", seed=1)
    expected = [
        (tokenizer.encode_source([f"{tag} {source}"])[0], tokenizer.encode_target([target])[0])
        for tag, turned in (("<en> <2fr>", False), ("<fr> <2en>", True))
        for source, target in (pair[::-1] if turned else pair for pair in TOY[:20])
    ]
    assert sorted(rows(prepared)) == sorted(
        ([*source, tokenizer.special.eos], [*target, tokenizer.special.eos]) for source, target in expected
    )


def test_held_out_pairs_are_in_no_direction_of_training(tmp_path, tokenizer):
    data = both_ways(tmp_path, validation={"holdout": 12})
    prepared = prepare_data(data, tokenizer, tmp_path / "data", seed=1)
    held_out = {text for pair in prepared.validation for text in pair}
    assert not held_out & {text for pair in text_of(prepared, tokenizer) for text in pair}
    assert len(prepared.train) < 40 - 12


def test_held_out_pairs_keep_their_direction(tmp_path, tokenizer):
    data = both_ways(tmp_path, validation={"holdout": 12})
    for _ in range(2):  # the second time from the folder
        prepared = prepare_data(data, tokenizer, tmp_path / "data", seed=1)
        english = {pair[0] for pair in TOY} | {"\u200b"}
        found = [
            Direction("en", "fr") if pair.source in english else Direction("fr", "en")
            for pair in prepared.validation
        ]
        assert prepared.directions == found and len(set(found)) == 2


@pytest.fixture
def one_to_many(tmp_path):
    """The same sources with two target languages."""
    german = {**write(tmp_path / "de.tsv", [(source, f"{source} de") for source, _ in TOY[:40]])}
    return [write(tmp_path / "fr.tsv", TOY[:40]), {**german, "target_lang": "de"}]


def test_pairs_of_each_direction_are_held_out(tmp_path, one_to_many):
    tokenizer = tokenizers.train(tmp_path / "tokenizer", symbols=["<2fr>", "<2de>"])
    data = config(tmp_path, train=one_to_many, language_tags="target", validation={"holdout": 20})
    prepared = prepare_data(data, tokenizer, tmp_path / "data", seed=1)
    counts = Counter(str(direction) for direction in prepared.directions)
    assert counts.keys() == {"en-fr", "en-de"} and min(counts.values()) >= 4
    for pair, direction in zip(prepared.validation, prepared.directions, strict=True):
        assert pair.target.endswith(" de") == (direction.target == "de")


def test_pairs_are_held_out_again_if_the_languages_of_a_corpus_are_corrected(tmp_path, one_to_many):
    tokenizer = tokenizers.train(tmp_path / "tokenizer", symbols=["<2fr>", "<2de>"])
    wrong = [{key: value for key, value in each.items() if key != "target_lang"} for each in one_to_many]
    holdout = {"validation": {"holdout": 20}}
    prepare_data(config(tmp_path, train=wrong, **holdout), tokenizer, tmp_path / "data", seed=1)
    data = config(tmp_path, train=one_to_many, language_tags="target", **holdout)
    again, fresh = (prepare_data(data, tokenizer, tmp_path / name, seed=1) for name in ("data", "fresh"))
    assert again.validation == fresh.validation and len(set(again.directions)) == 2


@pytest.mark.parametrize("kind", ["pairs", "source", "target"])
def test_duplicates_are_pairs_of_the_same_direction(tmp_path, one_to_many, kind):
    same = write(tmp_path / "same.tsv", TOY[:5])  # as a whole
    train = [*one_to_many, same, {**same, "target_lang": "de"}]
    data = config(tmp_path, train=train, language_tags="target", filters={"duplicates": kind})
    rejections = CorpusScanner(RawFiles(data), seed=1, for_tokenizer=False).result.rejections
    assert rejections.counts() == {"duplicates": 10 if kind == "source" else 5}


def test_tags_count_as_tokens_of_the_source(tmp_path, tokenizer):
    data = both_ways(tmp_path)
    longest = max(len(ids) + 1 for pair in TOY[:20] for ids in tokenizer.encode_source(list(pair)))
    data = data.model_copy(update={"max_length": longest})
    scanner = CorpusScanner(RawFiles(data), seed=1, check=True, for_tokenizer=False)
    found = check_data(data, tokenizer, scanner).segmentation
    prepared = prepare_data(data, tokenizer, tmp_path / "data", seed=1)
    assert found.too_long == 40 - len(prepared.train) > 0
    given = Config.model_validate({"run_dir": str(tmp_path), "data": data})
    planned = TrainingLengths.of_text(given, scanner, tokenizer)
    assert len(planned.source) == len(prepared.train)


def test_further_directions_do_not_change_what_is_held_out(tmp_path):
    one = config(tmp_path, train=[write(tmp_path / "fr.tsv", TOY[:40])], validation={"holdout": 10})
    german = {**write(tmp_path / "de.tsv", [(f"{a} x", b) for a, b in TOY[:40]]), "target_lang": "de"}
    keys = {"language_tags": "target", "validation": {"holdout": 10}}
    both = config(tmp_path, train=[*one.train, german], **keys)
    drawn = [
        CorpusScanner(RawFiles(data), seed=1, for_tokenizer=False).result.held_out[0] for data in (one, both)
    ]
    assert drawn[1] and set(drawn[1]) < set(drawn[0])


def test_validation_corpora_have_their_own_languages(tmp_path, tokenizer):
    one = write(tmp_path / "one.tsv", TOY[:3])
    other = {**write(tmp_path / "other.tsv", [pair[::-1] for pair in TOY[:2]]), "source_lang": "fr"}
    data = both_ways(tmp_path, validation=[one, {**other, "target_lang": "en"}])
    prepared = prepare_data(data, tokenizer, tmp_path / "data", seed=1)
    assert prepared.directions == [Direction("en", "fr")] * 3 + [Direction("fr", "en")] * 2


def test_a_shared_folder_has_the_same_tags(tmp_path, tokenizer):
    folder = tmp_path / "shared"
    data = both_ways(tmp_path, folder=str(folder))
    prepare_data(data, tokenizer, folder, seed=1, run_dir=tmp_path)
    changed = both_ways(tmp_path, folder=str(folder), language_tags="target")
    with pytest.raises(UsageError, match=r"prepared with other data\.language_tags or languages"):
        prepare_data(changed, tokenizer, folder, seed=1, run_dir=tmp_path)


def test_a_vocabulary_without_a_tag_is_an_error(tmp_path):
    plain = tokenizers.train(tmp_path / "tokenizer", symbols=["<2fr>"])
    data = both_ways(tmp_path, language_tags="target")
    with pytest.raises(UsageError, match="the vocabulary has no language tag <2en>; its symbols are <2fr>"):
        prepare_data(data, plain, tmp_path / "data", seed=1)


def test_each_corpus_is_checked_and_filtered_in_its_languages(tmp_path):
    greek = [("a cat", "μια γάτα"), ("a dog", "ένας σκύλος"), ("a cow", "a cow.")]
    train = [write(tmp_path / "fr.tsv", TOY[:20]), {**write(tmp_path / "el.tsv", greek), "target_lang": "el"}]
    found = check_data(config(tmp_path, train=train, language_tags="target"))
    assert found.suspicious["an unexpected script"].count == 1
    data = config(tmp_path, train=train, language_tags="target", filters={"script": True})
    assert check_data(data).rejected == {"script": 1}


def test_pairs_are_filtered_again_in_another_language(tmp_path):
    greek = write(tmp_path / "el.tsv", [("μια γάτα", "un chat"), ("a dog", "un chien")])
    plain = tokenizers.train(tmp_path / "tokenizer")
    for keys, kept in (({}, 1), ({"source_lang": "el"}, 1), ({"filters": "off"}, 2)):
        data = config(tmp_path, train={**greek, **keys}, filters={"script": True})
        corpus = prepare_data(data, plain, tmp_path / "data", seed=1)
        assert len(corpus.train) == kept
        if keys == {"source_lang": "el"}:
            assert text_of(corpus, plain) == [("μια γάτα", "un chat")]
    for language in ("en", "el"):  # of all corpora
        data = config(tmp_path, train=greek, filters={"script": True})
        data = data.model_copy(update={"source_lang": language})
        corpus = prepare_data(data, plain, tmp_path / "data", seed=1)
        assert (text_of(corpus, plain) == [("μια γάτα", "un chat")]) == (language == "el")


# ----------------------------------------------------------------------------------------------- temperature


@given(st.lists(st.integers(0, 10**8), min_size=1, max_size=6).filter(any), st.floats(1, 100))
def test_a_temperature_keeps_the_number_of_pairs_and_favors_small_corpora(sizes, temperature):
    weights = weights_by_size(sizes, temperature)
    pairs = [size * weight for size, weight in zip(sizes, weights, strict=True)]
    assert sum(pairs) == pytest.approx(sum(sizes))
    filled = sorted(
        (size, weight, count) for size, weight, count in zip(sizes, weights, pairs, strict=True) if size
    )
    for (small, more, few), (large, less, many) in pairwise(filled):
        assert less <= more * (1 + 1e-9)
        assert few / many == pytest.approx((small / large) ** (1 / temperature))
    assert weights_by_size(sizes, 1) == pytest.approx([1.0] * len(sizes))


def test_training_and_the_vocabulary_use_the_weights(tmp_path, caplog):
    caplog.set_level("INFO", logger="mtrain")
    pairs = [write(tmp_path / "large.tsv", TOY[:256]), write(tmp_path / "small.tsv", TOY[256:272])]
    data = config(tmp_path, train=pairs, temperature=2)
    scanner = CorpusScanner(RawFiles(data), seed=1)
    text = scanner.result.text
    assert text.sizes(2) == [256, 16]
    weights = weights_by_size([256, 16], 2)  # 4 : 1 instead of 16 : 1
    assert [round(size * weight, 1) for size, weight in zip((256, 16), weights, strict=True)] == [217.6, 54.4]
    sides = [list(text.side(index, weights)) for index in (0, 1)]
    small = {pair.source for pair in TOY[256:272]}
    assert sum(source in small for source in sides[0]) in range(48, 65)
    assert set(zip(*sides, strict=True)) <= set(TOY)
    plain = tokenizers.train(tmp_path / "tokenizer")
    corpus = prepare_data(data, plain, tmp_path / "data", seed=1).train
    assert corpus.open(Position()).weights.tolist() == pytest.approx([weights[0]] * 256 + [weights[1]] * 16)
    unweighted = prepare_data(data.model_copy(update={"temperature": None}), plain, tmp_path / "data", seed=1)
    assert unweighted.train.open(Position()).weights.tolist() == [1.0] * 272
    assert caplog.text.count("encoding the corpus") == 1  # the encoded pairs are the same


@pytest.mark.parametrize(
    "keys", [{"train": {"toy": "train", "weight": 2}}, {"stages": [{"shares": {"x": 1}}]}]
)
def test_temperature_excludes_other_mixtures(tmp_path, keys):
    train = {"toy": "train", "name": "x"}
    with pytest.raises(ValidationError, match="are mutually exclusive; give one of them"):
        config(tmp_path, temperature=5, **{"train": train, **keys})
