"""Subword sampling: segmentations of the same text, with the distributions of the papers."""

import math
import random
from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtrain.config.tokenizer import TokenizerConfig
from mtrain.data.toy import toy_pairs
from mtrain.tokenizer.learn import train_tokenizer
from mtrain.tokenizer.sampling import make_resegment
from mtrain.tokenizer.tokenizer import Tokenizer

TEXT = [pair.target for pair in toy_pairs("train")[:2000]]
SYMBOLS = ["<bt>", "<a,b>", "@@", "ünï"]
KINDS = ["unigram", "bpe"]


@cache
def learned(kind: str, byte_fallback: bool = True, size: int = 420) -> Tokenizer:
    config = TokenizerConfig(type=kind, vocab_size=size, byte_fallback=byte_fallback, symbols=SYMBOLS)
    with TemporaryDirectory() as folder:
        train_tokenizer(config, lambda: TEXT, lambda: TEXT, Path(folder), 1)
        return Tokenizer(Path(folder))


def sampled(tokenizer: Tokenizer, texts: list[str], strength: float, seed: int = 1) -> list[list[int]]:
    resegment, generator = make_resegment(tokenizer.target, strength), random.Random(seed)
    return [resegment(row, generator) for row in tokenizer.encode_target(texts)]


def pieces(tokenizer: Tokenizer, row: list[int]) -> tuple[str, ...]:
    return tuple(tokenizer.target.pieces[i] for i in row)


@given(
    texts=st.lists(st.sampled_from(TEXT) | st.text(st.characters(exclude_characters="\0")), max_size=4),
    strength=st.floats(0.001, 1),
    kind=st.sampled_from(KINDS),
    byte_fallback=st.booleans(),
)
def test_every_segmentation_spells_the_same_text(texts, strength, kind, byte_fallback):
    tokenizer = learned(kind, byte_fallback, 420 if byte_fallback else 160)
    for old, new in zip(tokenizer.encode_target(texts), sampled(tokenizer, texts, strength), strict=True):
        assert "".join(pieces(tokenizer, old)) == "".join(pieces(tokenizer, new))
        assert tokenizer.decode([new]) == tokenizer.decode([old])


@pytest.mark.parametrize("kind", KINDS)
def test_symbols_and_special_tokens_are_not_segmented(kind):
    tokenizer = learned(kind)
    texts = [f"{symbol} {text}{symbol}" for symbol in SYMBOLS for text in TEXT[:200]]
    rows = sampled(tokenizer, texts, 0.05 if kind == "unigram" else 0.9)
    for text, row in zip(texts, rows, strict=True):
        assert pieces(tokenizer, row).count(text.split()[0]) == 2
    resegment = make_resegment(tokenizer.target, 0.5)
    assert resegment([2, 1, 0, 3], random.Random(1)) == [2, 1, 0, 3] and resegment([], random.Random(1)) == []


@pytest.mark.parametrize("kind", KINDS)
def test_sampling_depends_only_on_the_generator(kind):
    tokenizer = learned(kind)
    first = sampled(tokenizer, TEXT, 0.3)
    assert sampled(tokenizer, TEXT, 0.3) == first != sampled(tokenizer, TEXT, 0.3, seed=2)


@pytest.mark.parametrize("alpha", [0.2, 1.0])
def test_unigram_draws_from_all_segmentations_by_their_probability(alpha):
    """Compared with all segmentations of a word, enumerated (Kudo 2018, section 3.2)."""
    tokenizer = learned("unigram")
    model, word = tokenizer.target.processor, "\u2581veulent"
    weights = {}
    for cuts in range(2 ** (len(word) - 1)):
        places = [0, *(i for i in range(1, len(word)) if cuts >> (i - 1) & 1), len(word)]
        parts = tuple(word[a:b] for a, b in pairwise(places))
        ids = [model.piece_to_id(part) for part in parts]
        if model.unk_id() not in ids:
            weights[parts] = math.exp(alpha * sum(model.get_score(ids)))
    draws = 20_000
    counts = Counter(pieces(tokenizer, row) for row in sampled(tokenizer, ["veulent"] * draws, alpha))
    assert len(weights) > 10 and counts.keys() <= weights.keys()
    for parts, weight in weights.items():
        share = weight / sum(weights.values())
        assert counts[parts] / draws == pytest.approx(share, abs=5 * math.sqrt(share / draws) + 1e-4)


def test_bpe_without_dropout_is_bpe_and_without_merges_is_characters():
    tokenizer = learned("bpe")
    plain = tokenizer.encode_target(TEXT)
    assert sampled(tokenizer, TEXT, 1e-12) == plain
    for row, new in zip(plain, sampled(tokenizer, TEXT, 1.0), strict=True):
        assert pieces(tokenizer, new) == tuple("".join(pieces(tokenizer, row)))


def test_bpe_drops_each_merge_with_the_probability():
    """In a word with one merge; in a longer word each merge is drawn again at every step."""
    tokenizer = learned("bpe")
    word = next(w for w in ("\u2581a", "\u2581d", "\u2581l") if w in tokenizer.target.pieces)
    counts = Counter(len(row) for row in sampled(tokenizer, [word[1]] * 10_000, 0.3))
    assert counts[2] / 10_000 == pytest.approx(0.3, abs=0.02) and counts.keys() == {1, 2}
