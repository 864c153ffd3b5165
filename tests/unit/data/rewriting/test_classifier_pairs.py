"""Corrupted pairs, and the examples that a pair classifier is trained on."""

import random
import re
import tempfile
from concurrent.futures import CancelledError
from pathlib import Path

import numpy as np
import pytest

from mtrain.config.sections.corruptions import Corruptions
from mtrain.data.epochs.schedule import Position
from mtrain.data.rewriting.classifier_pairs import (
    BAD,
    GOOD,
    Corrupter,
    ExampleMaker,
    draw_others,
    pair_sequence,
)
from mtrain.data.rewriting.rewrite import never, replace_rows
from mtrain.tokenizer.tokenizer import Tokenizer
from tests.support.encoding import prepare_data
from tests.support.tokenizers import train
from tests.support.training import PAIRS

KINDS = list(Corruptions.model_fields)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    """One whose vocabulary has digits."""
    text = [*(side for pair in PAIRS for side in pair), "0 1 2 3 4 5 6 7 8 9 In 1999 2000 cats Katzen"]
    text += ["٠ ١ ٢ ٣ ٤ ٥ ٦ ٧ ٨ ٩ عام"]
    return train(
        tmp_path_factory.mktemp("tokenizer"), text, text, vocab_size=104, type="bpe", byte_fallback=False
    )


def encoded(tokenizer, *texts: str):
    return tuple(tokenizer.source.encode([text])[0] for text in texts)


def corrupted(tokenizer, kind: str, pair=PAIRS[3], other=PAIRS[6], count: int = 30):
    """Examples of a kind as text: the good and the bad pair of each."""
    corrupter, generator = Corrupter(tokenizer, 64), random.Random(1)
    made = [
        corrupter.corrupt(kind, encoded(tokenizer, *pair), encoded(tokenizer, *other), generator)
        for _ in range(count)
    ]
    return [
        tuple(tuple(tokenizer.decode([ids])[0] for ids in version) for version in each)
        for each in made
        if each is not None
    ]


def test_misaligned_pairs_have_the_target_of_the_other(tokenizer):
    assert set(corrupted(tokenizer, "misaligned")) == {(PAIRS[3], (PAIRS[3][0], PAIRS[6][1]))}


def test_pairs_in_the_wrong_language_have_one_language(tokenizer):
    (s, t), (s2, t2) = PAIRS[3], PAIRS[6]
    bad = {bad for _, bad in corrupted(tokenizer, "wrong_language")}
    assert bad == {(s, s), (t, t), (s, s2), (t2, t)}


def test_truncated_sides_lack_the_beginning_or_the_end(tokenizer):
    ends = set()
    for good, bad in corrupted(tokenizer, "truncated"):
        [side] = [side for side in (0, 1) if bad[side] != good[side]]
        words, left = good[side].split(), bad[side].split()
        assert 0 < len(left) < len(words)
        ends.add((side, "end" if words[: len(left)] == left else "beginning"))
        assert left in (words[: len(left)], words[-len(left) :])
    assert len(ends) == 4


def test_extended_sides_have_those_of_the_other_pair(tokenizer):
    pairs = {0: (PAIRS[3][0], PAIRS[6][0]), 1: (PAIRS[3][1], PAIRS[6][1])}
    expected = {(side, " ".join(texts[::step])) for side, texts in pairs.items() for step in (1, -1)}
    made = corrupted(tokenizer, "extended")
    found = {(side, bad[side]) for good, bad in made for side in (0, 1) if bad[side] != good[side]}
    assert found == expected


def test_words_are_replaced_and_moved(tokenizer):
    for good, bad in corrupted(tokenizer, "replaced_words"):
        [side] = [side for side in (0, 1) if bad[side] != good[side]]
        old, new, others = good[side].split(), bad[side].split(), PAIRS[6][side].split()
        assert len(old) == len(new) and all(b == a or b in others for a, b in zip(old, new, strict=True))
    for good, bad in corrupted(tokenizer, "word_order"):
        assert all(sorted(a.split()) == sorted(b.split()) for a, b in zip(good, bad, strict=True))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("misaligned", "wrong_language")])
def test_sides_without_spaces_are_encoded_as_their_text(tmp_path, kind):
    """Otherwise, the space before the first token would tell the versions apart."""
    pairs = [("我有5个苹果。", "我有5个苹果。"), ("今天下雨。", "今天下雨。")]
    text = [*(side for pair in pairs for side in pair), *"0123456789"]
    tokenizer = train(tmp_path, text, text, vocab_size=32, type="bpe", byte_fallback=False)
    corrupter, generator = Corrupter(tokenizer, 64), random.Random(1)
    first, other = (encoded(tokenizer, *pair) for pair in pairs)
    for pair in (first, other):
        made = [
            corrupter.corrupt(kind, pair, first if pair is other else other, generator) for _ in range(30)
        ]
        versions = [version for example in made if example is not None for version in example]
        assert len(versions) > 30
        for side in (side for version in versions for side in version):
            [text] = tokenizer.decode([side])
            assert tokenizer.encode_source([text]) == [side] and " " not in text


def test_a_side_without_spaces_does_not_depend_on_another_with_spaces(tmp_path):
    pair, other = ("今天下雨了。", "我有5个苹果。"), ("我有 iPhone 5 。", "下雨 了")
    text = [*pair, *other, *"0123456789"]
    tokenizer = train(tmp_path, text, text, vocab_size=48, type="bpe", byte_fallback=False)
    for kind in ("truncated", "word_order", "numbers"):
        for good, bad in corrupted(tokenizer, kind, pair, other):
            assert not any(" " in side for side in (*good, *bad)), (good, bad)


def test_sampled_subwords_stay_sampled(tokenizer, tmp_path):
    """Otherwise, the usual segmentation would tell the corrupted sides."""
    text = ["今天下雨了。", "今天下雨", "今天"]
    tokenizer = train(tmp_path, text, text, vocab_size=16, type="bpe", byte_fallback=False)
    single = [tokenizer.source.pieces.index(piece) for piece in "▁今天下雨了。"]
    assert single != encoded(tokenizer, text[0])[0]
    corrupter, generator = Corrupter(tokenizer, 64), random.Random(1)
    pair = (single, single)
    for _ in range(20):
        example = corrupter.corrupt("truncated", pair, pair, generator)
        assert example is not None and {token for side in example.bad for token in side} <= {*single}


def numbers(text: str) -> list[str]:
    return re.findall(r"\d+", text)


def masked(text: str) -> str:
    """A text with zeros in place of digits."""
    return re.sub("[٠-٩]", "٠", re.sub("[0-9]", "0", text))


@pytest.mark.parametrize(
    "pair",
    [PAIRS[3], ("In 1999 it rains.", "1999 regnet es."), ("2 cats", "zwei Katzen"), ("عام ١٩٩٩", "In 1999")],
)
def test_numbers_differ_in_one_side_only(tokenizer, pair):
    """A pair without numbers on both sides is given the same one, in the good version too."""
    made = corrupted(tokenizer, "numbers", pair, count=60)
    assert len(made) > 50
    for good, bad in made:
        [side] = [side for side in (0, 1) if bad[side] != good[side]]
        assert numbers(bad[side]) != numbers(good[side])
        assert masked(bad[side]) == masked(good[side])
        assert {*map(int, numbers(good[0]))} & {*map(int, numbers(good[1]))}
        if all(map(numbers, pair)):
            assert good == pair
    assert len({bad for _, bad in made}) > 10


@pytest.mark.parametrize("kind", sorted({*KINDS} - {"numbers"}))
def test_a_kind_that_changes_nothing_makes_no_example(tokenizer, kind):
    """The pair is given as the other one, too; what is cut off does not count as a change."""
    corrupter, generator = Corrupter(tokenizer, 2), random.Random(1)
    [ids] = tokenizer.source.encode(["Hi"])
    pair = (ids[:1], ids[:1])
    assert all(corrupter.corrupt(kind, pair, pair, generator) is None for _ in range(20))


@pytest.fixture
def training_pairs(make_config, tokenizer, tmp_path):
    """The config of a classifier, its encoded pairs, and those as text by their ids."""
    config = make_config(
        model={"head": "pair_classifier", "decoder_layers": 0},
        data={"max_length": 24},
        training={"batch_tokens": 256},
    )
    data = prepare_data(config.data, tokenizer, tmp_path / "data", config.seed)
    return config, data.train


def examples(config, tokenizer, corpus, key=(0,), seed=1, cancelled=never):
    """The sequences and the classes of the examples of an epoch."""
    raw = corpus.encoded()
    blocks = ExampleMaker(config.data, tokenizer, seed)(raw, key, cancelled)
    source, target = replace_rows(raw, blocks, Path(tempfile.gettempdir()), cancelled).fetch(range(len(raw)))
    return source.to_lists(), [label for [label] in target.to_lists()]


def test_examples_depend_on_the_seed_the_epoch_and_the_row_alone(training_pairs, tokenizer):
    config, corpus = training_pairs
    first = examples(config, tokenizer, corpus)
    assert examples(config, tokenizer, corpus) == first
    assert all(
        examples(config, tokenizer, corpus, **other) != first for other in ({"key": (1,)}, {"seed": 2})
    )
    with pytest.raises(CancelledError):
        examples(config, tokenizer, corpus, cancelled=lambda: True)
    opened = corpus.open(Position()).fetch(range(len(corpus)))  # as the training loader does
    assert opened[0].to_lists() == first[0]


def test_half_of_the_pairs_are_corrupted_and_the_others_are_as_they_were(training_pairs, tokenizer):
    """Each sequence is "source EOS target EOS" within the limits; good pairs are in the corpus, but for an
    inserted number."""
    config, corpus = training_pairs
    eos, classes = tokenizer.special.eos, []
    raw = [side.to_lists() for side in corpus.encoded().fetch(range(len(corpus)))]
    for epoch in range(60):
        sequences, labels = examples(config, tokenizer, corpus, key=(epoch,))
        classes += labels
        for row, (sequence, label) in enumerate(zip(sequences, labels, strict=True)):
            assert sequence.count(eos) == 2 and sequence[-1] == eos
            split = sequence.index(eos) + 1
            assert max(split, len(sequence) - split) <= config.data.max_length
            is_original = sequence == raw[0][row] + raw[1][row]
            has_number = any(map(str.isdigit, tokenizer.decode([sequence])[0]))
            assert is_original or label == BAD or has_number
            assert not (is_original and label == BAD)
    assert 0.4 < np.mean(np.array(classes) == GOOD) < 0.6


def test_only_the_given_kinds_are_made(training_pairs, tokenizer):
    config, corpus = training_pairs
    only = {kind: float(kind == "misaligned") for kind in KINDS}
    data = config.data.model_copy(update={"corruptions": Corruptions(**only)})
    raw = [side.to_lists() for side in corpus.encoded().fetch(range(len(corpus)))]
    for epoch in range(5):
        sequences, _ = examples(config.model_copy(update={"data": data}), tokenizer, corpus, (epoch,))
        for row, sequence in enumerate(sequences):
            assert sequence in [raw[0][row] + target for target in raw[1]]


def test_the_other_pair_has_a_similar_length_and_is_another():
    lengths = np.random.default_rng(1).integers(3, 60, 5000)
    others = draw_others(lengths, (1, 0))
    assert (others != np.arange(5000)).all() and np.abs(lengths[others] - lengths).mean() < 1
    assert (draw_others(lengths, (1, 1)) != others).mean() > 0.9
    assert draw_others(lengths[:2], (1,)).tolist() == [1, 0] and draw_others(lengths[:1], (1,)).tolist() == [
        0
    ]


def test_sequences_have_both_sides():
    assert pair_sequence(([5, 7], [6]), 3) == [5, 7, 3, 6, 3]
