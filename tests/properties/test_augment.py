"""Augmentation keeps the number of pairs and the limits of their lengths, and is deterministic."""

import random

from hypothesis import strategies as st

from mtrain.config.sections.augment import Augment
from mtrain.config.sections.data import DataConfig
from mtrain.data.rewriting.augment import CHANGES, Side
from mtrain.data.rewriting.augment_pairs import PairAugmenter
from mtrain.tokenizer.vocabulary import pattern_of
from tests.support.tokenizers import texts

PROBABILITIES = st.sampled_from([0.0, 0.3, 1.0])
CORPORA = {"train": {"toy": "train"}, "validation": {"toy": "validation"}}
SECTION = {"source_lang": "en", "target_lang": "fr", **CORPORA}


def test_augmented_pairs_are_deterministic_and_neither_empty_nor_too_long(tried, trained):
    tokenizer = trained(symbols=["<2fr>"], vocab_size=450)

    @tried(
        30,
        pairs=st.lists(st.tuples(texts, texts), max_size=6),
        tagged=st.booleans(),
        probabilities=st.fixed_dictionaries(dict.fromkeys(Augment.model_fields, PROBABILITIES)),
        max_length=st.integers(2, 80),
        seed=st.integers(0, 99),
    )
    def check(pairs, tagged, probabilities, max_length, seed):
        tag = "<2fr> " if tagged else ""
        sides = (
            tokenizer.encode_source([tag + source for source, _ in pairs]),
            tokenizer.encode_target([target for _, target in pairs]),
        )
        encoded = [([*source, 3], [*target, 3]) for source, target in zip(*sides, strict=True)]
        encoded = [pair for pair in encoded if min(map(len, pair)) > 1 and max(map(len, pair)) <= max_length]
        data = DataConfig.model_validate({**SECTION, "max_length": max_length})
        if max_length < 20:  # too small for noise, which is refused
            probabilities = {**probabilities, "noise": 0.0}
        augmenter = PairAugmenter(Augment(**probabilities), data, tokenizer)
        before = [(list(source), list(target)) for source, target in encoded]
        changed = augmenter(encoded, random.Random(seed))
        assert encoded == before and len(changed) == len(encoded)
        assert changed == augmenter(encoded, random.Random(seed))
        noise = augmenter.noise(len(encoded), random.Random(seed))
        assert noise == augmenter.noise(len(encoded), random.Random(seed))
        for source, target in [*changed, *noise]:
            for row in (source, target):
                assert 2 <= len(row) <= max_length and row.index(3) == len(row) - 1
        if not probabilities["merge"] and not any(probabilities[name] for name in CHANGES):
            assert changed == encoded
        if tagged:
            tag_ids = tokenizer.source.tag(tokenizer.encode_source([tag])[0])
            assert all(source[: len(tag_ids)] == tag_ids for source, _ in changed)
            symbol = tag_ids[-1]
            assert all(source.count(symbol) == 1 for source, _ in changed)

    check  # noqa: B018  # run by the decorator


def test_symbols_survive_every_change(tried):
    side = Side("en", pattern_of(["<2de>", "<2d", "<bt>"]))

    @tried(
        100,
        parts=st.lists(texts | st.sampled_from(["<2de>", "<2d", "<bt>", " a word. "]), max_size=8),
        name=st.sampled_from(CHANGES),
        seed=st.integers(0, 99),
    )
    def check(parts, name, seed):
        text = "".join(parts)
        changed = side.change(name, text, random.Random(seed))
        assert changed == side.change(name, text, random.Random(seed))
        assert side.symbols.findall(changed) == side.symbols.findall(text)
        changed.encode()  # no placeholder is left
        assert bool(changed) == bool(text)

    check  # noqa: B018  # run by the decorator
