"""Subword sampling: segmentations of the same text, with the distributions of the papers."""

import math
from collections import Counter
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtrain.config.sections.tokenizer import TokenizerConfig
from mtrain.data.reading.files import toy_pairs
from mtrain.tokenizer.learn import train_tokenizer
from mtrain.tokenizer.sampling import make_resegment
from mtrain.tokenizer.tokenizer import Tokenizer
from tests.support.tokenizers import resegmented

TEXT = [pair.target for pair in toy_pairs("train")[:2000]]
# Words of syllables. Unigram keeps syllables as pieces, but of the few words of `TEXT` only whole words.
SYLLABLES = [consonant + vowel for consonant in "krmt" for vowel in "aeio"]
COMPOUNDS = [" ".join(map("".join, product(SYLLABLES, [second], SYLLABLES))) for second in SYLLABLES]
SYMBOLS = ["<bt>", "<a,b>", "@@", "ünï"]
KINDS = ["unigram", "bpe"]


@cache
def learned(kind: str, byte_fallback: bool = True, size: int = 480) -> Tokenizer:
    config = TokenizerConfig(type=kind, vocab_size=size, byte_fallback=byte_fallback, symbols=SYMBOLS)
    with TemporaryDirectory() as folder:
        train_tokenizer(config, lambda: TEXT, lambda: COMPOUNDS, Path(folder), 1)
        return Tokenizer(Path(folder))


def sampled(tokenizer: Tokenizer, texts: list[str], strength: float, seed: int = 1) -> list[list[int]]:
    resegment = make_resegment(tokenizer.target, strength)
    return resegmented(resegment, tokenizer.encode_target(texts), np.random.default_rng(seed))


def pieces(tokenizer: Tokenizer, row: list[int]) -> tuple[str, ...]:
    return tuple(tokenizer.target.pieces[i] for i in row)


@given(
    texts=st.lists(
        st.sampled_from(TEXT) | st.text(st.characters(codec="utf-8", exclude_characters="\0")), max_size=4
    ),
    strength=st.floats(0.001, 1),
    kind=st.sampled_from(KINDS),
    byte_fallback=st.booleans(),
)
def test_every_segmentation_spells_the_same_text(texts, strength, kind, byte_fallback):
    tokenizer = learned(kind, byte_fallback, 480 if byte_fallback else 220)
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
    resegment, generator = make_resegment(tokenizer.target, 0.5), np.random.default_rng(1)
    for special in ([[2, 1, 0, 3]], [[], [3], []], []):
        assert resegmented(resegment, special, generator) == special


@pytest.mark.parametrize("kind", KINDS)
def test_sampling_depends_only_on_the_generator(kind):
    tokenizer = learned(kind)
    first = sampled(tokenizer, TEXT, 0.3)
    assert sampled(tokenizer, TEXT, 0.3) == first != sampled(tokenizer, TEXT, 0.3, seed=2)


WORD = "karimote"


def draw(tokenizer: Tokenizer, strength: float, draws: int = 20_000) -> Counter[tuple[str, ...]]:
    """How often `WORD` is segmented in each way, among other words."""
    rows = sampled(tokenizer, [WORD] * draws + TEXT, strength)
    return Counter(pieces(tokenizer, row) for row in rows[:draws])


def assert_follows(counts: Counter[tuple[str, ...]], shares: dict[tuple[str, ...], float]) -> None:
    """Each share differs from the expected one by at most 5 standard errors."""
    assert len(shares) > 10 and counts.keys() <= shares.keys() and sum(shares.values()) == pytest.approx(1)
    for parts, share in shares.items():
        error = math.sqrt(share / counts.total())
        assert counts[parts] / counts.total() == pytest.approx(share, abs=5 * error + 1e-4)


@pytest.mark.parametrize("alpha", [0.2, 1.0])
def test_unigram_draws_from_all_segmentations_by_their_probability(alpha):
    """Compared with all segmentations of a word, enumerated (Kudo 2018, section 3.2)."""
    tokenizer = learned("unigram")
    model, word = tokenizer.target.processor, "\u2581" + WORD
    weights = {}
    for cuts in range(2 ** (len(word) - 1)):
        places = [0, *(i for i in range(1, len(word)) if cuts >> (i - 1) & 1), len(word)]
        parts = tuple(word[a:b] for a, b in pairwise(places))
        ids = [model.piece_to_id(part) for part in parts]
        if model.unk_id() not in ids:
            weights[parts] = math.exp(alpha * sum(model.get_score(ids)))
    total = sum(weights.values())
    assert_follows(draw(tokenizer, alpha), {parts: weight / total for parts, weight in weights.items()})


def test_unigram_draws_as_sentencepiece_does():
    """Which cannot be given a seed, so the tolerance is large."""
    tokenizer, draws = learned("unigram"), 20_000
    options = {"out_type": str, "enable_sampling": True, "alpha": 0.2, "nbest_size": -1}
    theirs = Counter(tuple(tokenizer.target.processor.encode(WORD, **options)) for _ in range(draws))
    ours = draw(tokenizer, 0.2, draws)
    assert len(theirs) > 10
    for parts in theirs | ours:
        difference = abs(theirs[parts] - ours[parts])
        assert difference < 7 * math.sqrt(theirs[parts] + ours[parts]) + 10


@pytest.mark.parametrize("dropout", [0.1, 0.5])
def test_bpe_draws_as_the_algorithm_of_the_paper_does(dropout):
    """Compared with the exact probabilities (Provilkov et al. 2020, algorithm 1)."""
    tokenizer, shares = learned("bpe"), Counter()
    ids = {piece: i for i, piece in enumerate(tokenizer.target.pieces)}
    ranks = {piece: -score for piece, score in zip(ids, tokenizer.target.scores(), strict=True)}

    def follow(parts: tuple[str, ...], probability: float) -> None:
        merges = sorted((ranks[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ids)
        for skipped, (_, i) in enumerate(merges):
            merged = (*parts[:i], parts[i] + parts[i + 1], *parts[i + 2 :])
            follow(merged, probability * dropout**skipped * (1 - dropout))
        shares[parts] += probability * dropout ** len(merges)

    follow(tuple("\u2581" + WORD), 1.0)
    assert_follows(draw(tokenizer, dropout), shares)


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
