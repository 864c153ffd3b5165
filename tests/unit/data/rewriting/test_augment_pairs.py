"""Changes to encoded pairs, and windows that contain them."""

import random
from itertools import pairwise
from pathlib import Path

import pytest

from mtrain.config.sections.augment import Augment
from mtrain.data.epochs.schedule import Position
from mtrain.data.preparing import encode_folder
from mtrain.data.rewriting import reencode
from mtrain.data.rewriting.augment_pairs import PairAugmenter
from mtrain.errors import UsageError
from mtrain.processes import pool
from mtrain.tokenizer.tokenizer import Tokenizer
from tests.support import tokenizers
from tests.support.encoding import TOY, config, prepare_data, rows, rows_of, write

ALL = {"uppercase": 0.2, "titlecase": 0.2, "drop_final_punctuation": 0.3, "typos": 0.3, "merge": 0.2}
EOS = 3


def encoded(tokenizer: Tokenizer, pairs) -> list[tuple[list[int], list[int]]]:
    sides = (vocabulary.encode([pair[k] for pair in pairs]) for k, vocabulary in enumerate(both(tokenizer)))
    return [([*source, EOS], [*target, EOS]) for source, target in zip(*sides, strict=True)]


def both(tokenizer: Tokenizer):
    return tokenizer.source, tokenizer.target


def decoded(tokenizer: Tokenizer, pairs) -> list[tuple[str, str]]:
    assert all(row[-1] == EOS and EOS not in row[:-1] for pair in pairs for row in pair)
    sides = (
        vocabulary.decode([pair[k][:-1] for pair in pairs]) for k, vocabulary in enumerate(both(tokenizer))
    )
    return list(zip(*sides, strict=True))


def augment(tokenizer: Tokenizer, tmp_path: Path, pairs, seed: int = 1, max_length: int = 256, **keys):
    """The text of some pairs, changed."""
    data = config(tmp_path, augment=keys, max_length=max_length)
    augmenter = PairAugmenter(Augment(**keys), data, tokenizer)
    return decoded(tokenizer, augmenter(encoded(tokenizer, pairs), random.Random(seed)))


def upper(pair) -> tuple[str, str]:
    return pair[0].upper(), pair[1].upper()


def test_all_pairs_change_with_probability_one(tokenizer: Tokenizer, tmp_path: Path):
    pairs = TOY[:40]
    assert augment(tokenizer, tmp_path, pairs, uppercase=1) == [upper(pair) for pair in pairs]
    assert augment(tokenizer, tmp_path, pairs, uppercase=1, titlecase=1) == [upper(pair) for pair in pairs]
    shortened = augment(tokenizer, tmp_path, pairs, drop_final_punctuation=1)
    assert shortened == [(source.rstrip(".?!"), target.rstrip(".?! ")) for source, target in pairs]
    wrong = augment(tokenizer, tmp_path, pairs, typos=1)
    assert [target for _, target in wrong] == [target for _, target in pairs]
    assert sum(a != b for (a, _), (b, _) in zip(wrong, pairs, strict=True)) > 35


def test_about_as_many_pairs_change_as_configured(tokenizer: Tokenizer, tmp_path: Path):
    changed = augment(tokenizer, tmp_path, TOY, uppercase=0.3)
    assert all(new in (old, upper(old)) for new, old in zip(changed, TOY, strict=True))
    assert 60 < sum(new != tuple(old) for new, old in zip(changed, TOY, strict=True)) < 120
    assert augment(tokenizer, tmp_path, TOY, uppercase=0.3) == changed
    assert augment(tokenizer, tmp_path, TOY, seed=2, uppercase=0.3) != changed
    # Which pairs are chosen for a change does not depend on the other changes.
    with_others = augment(tokenizer, tmp_path, TOY, uppercase=0.3, typos=0.2)
    assert [target for _, target in with_others] == [target for _, target in changed]


def test_a_merged_pair_is_followed_by_its_second_part(tokenizer: Tokenizer, tmp_path: Path):
    pairs = TOY[:6]
    merged = augment(tokenizer, tmp_path, pairs, merge=1, uppercase=1)
    joined = [(f"{a[0]} {b[0]}", f"{a[1]} {b[1]}") for a, b in pairwise(pairs)]
    assert merged == [*map(upper, joined), upper(pairs[-1])]


@pytest.fixture(scope="module")
def tagging(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer with tags of target languages."""
    return tokenizers.train(tmp_path_factory.mktemp("tags"), symbols=["<2fr>", "<2es>"])


def test_tags_stay_as_they_are_and_begin_a_merged_pair_once(tagging: Tokenizer, tmp_path: Path):
    pairs = [("<2fr> a cat.", "un chat."), ("<2fr> a dog.", "un chien."), ("<2es> a cow.", "una vaca.")]
    assert augment(tagging, tmp_path, pairs, merge=1, uppercase=1) == [
        ("<2fr> A CAT. A DOG.", "UN CHAT. UN CHIEN."),
        ("<2fr> A DOG.", "UN CHIEN."),  # the next pair is in another language
        ("<2es> A COW.", "UNA VACA."),
    ]


def test_a_pair_that_would_become_too_long_or_empty_is_not_changed(tokenizer: Tokenizer, tmp_path: Path):
    pairs = [*TOY, ("...", "..."), (". ", ".")]
    limit = max(len(row) for pair in encoded(tokenizer, TOY) for row in pair)
    changed = augment(tokenizer, tmp_path, pairs, max_length=limit, uppercase=1, drop_final_punctuation=1)
    lengths = [max(map(len, pair)) for pair in encoded(tokenizer, [upper(pair) for pair in pairs])]
    assert min(lengths) <= limit < max(lengths)
    kept = [new == tuple(map(str.strip, old)) for new, old in zip(changed, pairs, strict=True)]
    assert any(kept[:-2]) and not all(kept[:-2]) and kept[-2:] == [True, True]
    assert all(length > limit - 3 for length, same in zip(lengths[:-2], kept[:-2], strict=True) if same)
    assert max(len(row) for pair in encoded(tokenizer, changed) for row in pair) <= limit


def test_pairs_with_unknown_characters_are_not_changed(tmp_path: Path):
    """The text of such pairs is not known."""
    without_bytes = tokenizers.train(tmp_path / "tokenizer", byte_fallback=False, vocab_size=200)
    pairs = [
        ("the cat sees 猫.", "le chat."),
        ("the cat sleeps.", "le chat dort."),
        ("a dog 猫.", "un chien."),
    ]
    ids = encoded(without_bytes, pairs)
    assert without_bytes.special.unk in ids[0][0]
    data = config(tmp_path, augment={"drop_final_punctuation": 1})
    keys = Augment(drop_final_punctuation=1, merge=1)
    changed = PairAugmenter(keys, data, without_bytes)(ids, random.Random(1))
    assert changed == ids  # the second pair would be merged with the third one
    augmenter = PairAugmenter(Augment(drop_final_punctuation=1), data, without_bytes)
    assert decoded(without_bytes, augmenter(ids, random.Random(1)))[1] == ("the cat sleeps", "le chat dort")
    with pytest.raises(UsageError, match=r"data\.augment\.noise: the vocabulary lacks its characters"):
        PairAugmenter(Augment(noise=0.0005), data, without_bytes)


def test_languages_without_spaces_are_merged_without_one(tmp_path: Path):
    chinese = ["猫在睡觉。", "下雨了。"]
    tokenizer = tokenizers.train(tmp_path / "tokenizer", target=chinese * 100, vocab_size=350)
    data = config(tmp_path).model_copy(update={"target_lang": "zh"})
    pairs = list(zip(["the cat sleeps.", "it rains."], chinese, strict=True))
    merged = PairAugmenter(Augment(merge=1), data, tokenizer)(encoded(tokenizer, pairs), random.Random(1))
    assert decoded(tokenizer, merged)[0] == ("the cat sleeps. it rains.", "猫在睡觉。下雨了。")


def test_pairs_are_changed_in_the_language_of_their_tag(tmp_path: Path):
    """Turkish has another capital i; noise has a tag."""
    symbols = ["<2tr>", "<2fr>"]
    tokenizer = tokenizers.train(tmp_path / "tokenizer", vocab_size=350, symbols=symbols)
    train = [{"toy": "train", "target_lang": language} for language in ("tr", "fr")]
    data = config(tmp_path, train=train, language_tags="target")
    pairs = [("<2tr> it rains.", "bir dil."), ("<2fr> it rains.", "bir dil.")]
    augmenter = PairAugmenter(Augment(uppercase=1, noise=1), data, tokenizer)
    changed = decoded(tokenizer, augmenter(encoded(tokenizer, pairs), random.Random(1)))
    assert changed == [("<2tr> IT RAINS.", "BİR DİL."), ("<2fr> IT RAINS.", "BIR DIL.")]
    noise = decoded(tokenizer, augmenter.noise(50, random.Random(1)))
    assert {source.partition(" ")[0] for source, _ in noise} == set(symbols)


def test_pairs_with_one_tag_may_have_several_languages(tmp_path: Path):
    tags = ["<fr>", "<zh>", "<2en>"]
    tokenizer = tokenizers.train(tmp_path / "tokenizer", vocab_size=350, symbols=tags)
    train = [{"toy": "train", "source_lang": language, "target_lang": "en"} for language in ("fr", "zh")]
    data = config(tmp_path, train=train, language_tags="target").model_copy(update={"target_lang": "en"})
    pairs = [("<2en> le chat.", "the cat."), ("<2en> le chien.", "the dog.")]
    augmenter = PairAugmenter(Augment(uppercase=1, merge=1), data, tokenizer)
    changed = decoded(tokenizer, augmenter(encoded(tokenizer, pairs), random.Random(1)))
    assert changed == [("<2en> LE CHAT. LE CHIEN.", "THE CAT. THE DOG."), ("<2en> LE CHIEN.", "THE DOG.")]


@pytest.mark.parametrize("seed", range(3))
def test_typing_errors_do_not_change_tags(tmp_path: Path, seed: int):
    tags = ["<en>", "<2fr>", "<bt>"]
    tokenizer = tokenizers.train(tmp_path / "tokenizer", vocab_size=350, symbols=tags)
    data = config(tmp_path, language_tags="both")
    pairs = [(f"<en> <2fr> <bt> {source}", target) for source, target in TOY]
    ids = encoded(tokenizer, pairs)
    changed = PairAugmenter(Augment(typos=1), data, tokenizer)(ids, random.Random(seed))
    tag = tokenizer.encode_source(["<en> <2fr> <bt>"])[0]
    assert changed != ids
    for new, old in zip(changed, ids, strict=True):
        assert new[0][: len(tag)] == old[0][: len(tag)] == tag
        assert tokenizer.source.pieces[new[0][len(tag)]].startswith("\u2581")


# --------------------------------------------------------------------------------------------------- windows


def test_every_epoch_has_other_changes_and_lengths_are_those_of_the_changed_pairs(
    tokenizer: Tokenizer, tmp_path: Path
):
    plain = prepare_data(config(tmp_path), tokenizer, tmp_path / "plain", seed=1)
    prepared = prepare_data(config(tmp_path, augment=ALL), tokenizer, tmp_path / "data", seed=1)
    assert prepared.fingerprint == plain.fingerprint and rows(prepared) == rows(plain)
    assert prepared.validation == plain.validation
    epochs = [prepared.train.open(Position(epoch)) for epoch in range(2)]
    for corpus in epochs:
        found = rows_of(corpus)
        changed = sum(new != old for new, old in zip(found, rows(plain), strict=True))
        assert 150 < changed < 290
        assert corpus.source_lengths.tolist() == [len(source) for source, _ in found]
        assert corpus.target_lengths.tolist() == [len(target) for _, target in found]
        assert corpus.locate([0, 299]) == plain.train.encoded().locate([0, 299])
    assert rows_of(epochs[0]) != rows_of(epochs[1])
    assert rows(prepared, 1) == rows_of(epochs[1])
    other = prepare_data(config(tmp_path, augment=ALL), tokenizer, tmp_path / "other", seed=2)
    assert rows(other, 1) != rows_of(epochs[1])


def test_worker_processes_change_pairs_like_this_one(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch, caplog
):
    monkeypatch.setattr(reencode, "BLOCK", 130)
    data = config(tmp_path, augment={**ALL, "noise": 0.02}, subword_sampling=0.2)
    found = rows(prepare_data(data, tokenizer, tmp_path / "data", seed=1), 5)
    assert "cannot start" not in caplog.text

    def refuse(*_):
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(pool, "WorkerProcess", refuse)
    assert rows(prepare_data(data, tokenizer, tmp_path / "data", seed=1), 5) == found
    assert "cannot start" in caplog.text


def test_noise_is_added_after_the_pairs_of_the_corpus(tokenizer: Tokenizer, tmp_path: Path):
    section = config(tmp_path, [{**write(tmp_path / "t.tsv", TOY), "weight": 0.5}], augment={"noise": 0.2})
    train = prepare_data(section, tokenizer, tmp_path / "data", seed=1).train
    corpus = train.open(Position())
    added = rows_of(corpus)[300:]
    assert 20 <= len(added) <= 31 and len(train) == 300
    assert all(source == target for source, target in added)
    assert corpus.weights.tolist() == [0.5] * 300 + [1.0] * len(added)
    assert corpus.locate([0, 300]) == [f"{tmp_path}/t.tsv:1", "data.augment.noise"]
    assert rows_of(corpus)[:300] == rows_of(train.encoded())
    assert rows_of(train.open(Position(1)))[300:] != added == rows_of(train.open(Position()))[300:]


def test_noise_is_a_share_of_each_window(tokenizer: Tokenizer, tmp_path: Path, monkeypatch):
    """So that the windows of an epoch add up to one epoch."""
    monkeypatch.setattr(encode_folder, "BUCKET", 30)
    section = config(tmp_path, [write(tmp_path / "t.tsv", TOY)], augment={"noise": 0.5}, window_pairs=100)
    train = prepare_data(section, tokenizer, tmp_path / "data", seed=1).train
    windows = [train.open(Position(0, window)) for window in range(train.count_windows())]
    assert len(windows) > 1
    assert sum(map(train.share_of_epoch, windows)) == pytest.approx(1, abs=0.05)


def test_changed_pairs_are_segmented_by_sampling(tokenizer: Tokenizer, tmp_path: Path):
    keys = {"augment": {"uppercase": 1}, "max_length": 200}
    plain = prepare_data(config(tmp_path, **keys), tokenizer, tmp_path / "data", seed=1)
    sampled = prepare_data(
        config(tmp_path, **keys, subword_sampling=0.3), tokenizer, tmp_path / "other", seed=1
    )
    one, two = rows(plain, 0), rows(sampled, 0)
    assert one != two
    assert decoded(tokenizer, one) == decoded(tokenizer, two) == [upper(pair) for pair in TOY]
