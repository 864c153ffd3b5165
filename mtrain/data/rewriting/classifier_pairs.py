"""The training examples of a pair classifier: good and corrupted pairs, as single sequences with a class.

Bicleaner AI (Zaragoza-Bernabeu et al., LREC 2022) also learns from corrupted pairs.
"""

import random
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from mtrain.config.languages import are_spaced
from mtrain.config.sections.data import DataConfig
from mtrain.data.rewriting.rewrite import BLOCK, Blocks, Key, make_generator
from mtrain.data.store.shards import EncodedCorpus
from mtrain.data.text.writing_systems import script_of
from mtrain.tokenizer.rows import Ids, Indices, Rows
from mtrain.tokenizer.tokenizer import Tokenizer
from mtrain.tokenizer.vocabulary import SPACE

TokenIds = list[int]
Words = list[TokenIds]  # the ids of each word
PairIds = tuple[TokenIds, TokenIds]  # source and target, without EOS
BAD, GOOD = 0, 1  # the classes
_NEIGHBORS = 50  # pairs of the most similar lengths, among which the other pair of a corruption is drawn
_KEPT = (0.2, 0.8)  # share of the words that are left of a truncated side
_REPLACED = (0.3, 0.9)  # share of the words that are replaced
_DIGIT = re.compile(r"\d")
_MOST_DIGITS = 4  # of a number that is inserted, at most


class Example(NamedTuple):
    """A pair in a good and in a corrupted version."""

    good: PairIds
    bad: PairIds


class ExampleMaker:
    """Turns the rows of a window into examples of a pair classifier. The source side of a row becomes source,
    EOS, target, EOS; its target side becomes the class. Half of the pairs are corrupted.

    Examples depend only on the seed, the key and the rows.
    """

    def __init__(self, data: DataConfig, tokenizer: Tokenizer, seed: int):
        """`data.corruptions` must be set."""
        assert data.corruptions is not None
        self._shares = {kind: share for kind, share in data.corruptions if share}
        self._corrupter = Corrupter(tokenizer, data.max_length)
        self._eos, self._seed = tokenizer.special.eos, seed

    def __call__(self, corpus: EncodedCorpus, key: Key, _: Callable[[], bool]) -> Blocks:
        """Yield the examples of the rows of a corpus, in blocks."""
        others = draw_others(corpus.target_lengths, (self._seed, *key))
        for start in range(0, len(corpus), BLOCK):
            rows = np.arange(start, min(start + BLOCK, len(corpus)))
            generator = make_generator("pairs", self._seed, *key, start)
            sequences, classes = [], []
            for pair, other in zip(_pairs(corpus, rows), _pairs(corpus, others[rows]), strict=True):
                example = self._draw(pair, other, generator)
                good = example is None or generator.random() < 0.5
                version = pair if example is None else example.good if good else example.bad
                sequences.append(pair_sequence(version, self._eos))
                classes.append([GOOD if good else BAD])
            yield Rows.from_lists(sequences), Rows.from_lists(classes)

    def _draw(self, pair: PairIds, other: PairIds, generator: random.Random) -> Example | None:
        """Corrupt a pair in a way that is drawn by its share; in another one if the pair would not change."""
        remaining = dict(self._shares)
        while remaining:
            [kind] = generator.choices(list(remaining), list(remaining.values()))
            if (example := self._corrupter.corrupt(kind, pair, other, generator)) is not None:
                return example
            del remaining[kind]
        return None


def draw_others(lengths: Ids, key: Sequence[int]) -> Indices:
    """For each row, another row of similar length."""
    count = len(lengths)
    # With a spawn key of its own, because the batches depend on the same key.
    generator = np.random.default_rng(np.random.SeedSequence(key, spawn_key=(1,)))
    order = np.lexsort((generator.random(count), lengths))
    distances = generator.integers(1, max(2, min(_NEIGHBORS + 1, count)), count)
    distances *= generator.choice([-1, 1], count)
    others: Indices = np.empty(count, np.int64)
    others[order] = order[(np.arange(count) + distances) % count]
    return others


def pair_sequence(pair: PairIds, eos: int) -> TokenIds:
    """The input of a pair classifier: source, EOS, target, EOS."""
    return [*pair[0], eos, *pair[1], eos]


def _pairs(corpus: EncodedCorpus, rows: Indices) -> Iterator[PairIds]:
    sides = (side.to_lists() for side in corpus.fetch(rows))
    return ((source[:-1], target[:-1]) for source, target in zip(*sides, strict=True))


class Corrupter:
    """Makes one kind of corruption at a time. Only whole words are moved or removed, so each word
    keeps its usual segmentation. In text without spaces, tokens take their place."""

    def __init__(self, tokenizer: Tokenizer, max_length: int):
        """The vocabulary must be joint. Sides are cut at `max_length` tokens, EOS included."""
        self._longest = max_length - 1
        self._vocabulary = tokenizer.source
        self._unknown = tokenizer.source.unlearned()
        pieces = self._vocabulary.pieces
        self._begins_word = [piece.startswith(SPACE) for piece in pieces]
        # The names of byte pieces and of tags may contain digits that are not in the text.
        others = self._unknown | self._vocabulary.symbols
        self._has_digit = [i not in others and bool(_DIGIT.search(piece)) for i, piece in enumerate(pieces)]

    def corrupt(self, kind: str, pair: PairIds, other: PairIds, generator: random.Random) -> Example | None:
        """Corrupt a pair in one way (a key of `data.corruptions`); `other` is another pair of the corpus.
        None if the pair would not change."""
        if kind == "numbers":
            pair = self._with_numbers(pair, generator)
        side = 1 if kind == "misaligned" else generator.randrange(2)
        new = self._change(kind, pair[side], other[side], generator)
        if new is None:
            return None
        if kind not in ("misaligned", "wrong_language"):
            used = [other[side]] if kind in ("extended", "replaced_words") else []
            new = self._as_encoded(new, pair[side], *used)
        # A text in the wrong language takes the place of the other side.
        replaced = 1 - side if kind == "wrong_language" else side
        both = pair, (pair[0], new) if replaced else (new, pair[1])
        good, bad = ((source[: self._longest], target[: self._longest]) for source, target in both)
        return None if good == bad else Example(good, bad)

    def _change(self, kind: str, ids: TokenIds, other: TokenIds, generator: random.Random) -> TokenIds | None:
        """One side of a pair, corrupted; `other` is the same side of another pair. None if that is not
        possible."""
        match kind:
            case "misaligned":
                return other
            case "wrong_language":
                return ids if generator.random() < 0.5 else other
            case "extended":
                return ids + other if generator.random() >= 1 / 3 else other + ids
            case "truncated":
                return _truncated(self._words(ids), generator)
            case "replaced_words":
                return _with_replaced_words(self._words(ids), self._words(other), generator)
            case "word_order":
                words = self._words(ids)
                generator.shuffle(words)
                return _joined(words)
            case _:
                return self._with_other_number(self._words(ids), generator)

    def _words(self, ids: TokenIds) -> Words:
        """The words of a side, or its tokens if there are no words."""
        starts = [i for i, token in enumerate(ids) if i == 0 or self._begins_word[token]]
        if len(starts) < 2:
            return [[token] for token in ids]
        return [ids[start:stop] for start, stop in zip(starts, [*starts[1:], len(ids)], strict=True)]

    def _with_numbers(self, pair: PairIds, generator: random.Random) -> PairIds:
        """A pair with a number on each side. If a side has none, the same one is inserted on both, because
        few pairs of most corpora have any."""
        if all(map(self._contains_digit, pair)):
            return pair
        digits = generator.randint(1, _MOST_DIGITS)
        [number] = self._vocabulary.encode([str(generator.randint(10 ** (digits - 1), 10**digits - 1))])
        return self._inserted(pair[0], number, generator), self._inserted(pair[1], number, generator)

    def _with_other_number(self, words: Words, generator: random.Random) -> TokenIds | None:
        """Replace one or all digits of a number."""
        known = (i for i, word in enumerate(words) if self._unknown.isdisjoint(word))
        candidates = [i for i in known if self._contains_digit(words[i])]
        if not candidates:
            return None
        chosen = generator.choice(candidates)
        [text] = self._vocabulary.decode([words[chosen]])
        [words[chosen]] = self._vocabulary.encode([_changed_number(text, generator)])
        return _joined(words)

    def _contains_digit(self, ids: TokenIds) -> bool:
        return any(map(self._has_digit.__getitem__, ids))

    def _inserted(self, ids: TokenIds, word: TokenIds, generator: random.Random) -> TokenIds:
        words = self._words(ids)
        words.insert(generator.randint(0, len(words)), word)
        return self._as_encoded(_joined(words), ids)

    def _as_encoded(self, new: TokenIds, *origins: TokenIds) -> TokenIds:
        """A side whose tokens were moved or removed, as its text is encoded. This differs in text without
        spaces, where only the first token begins with a space. The side stays as it is if the sides that the
        tokens are from are not encoded as their text is: a token is unknown, or subwords are sampled."""
        if any(self._begins_word[token] for ids in origins for token in ids[1:]):  # whole words were moved
            return new
        text, *others = self._vocabulary.decode([new, *origins])
        if are_spaced(map(script_of, others)):
            return new
        encoded, *again = self._vocabulary.encode([text.replace(" ", ""), *others])
        return encoded if again == [*origins] else new


def _truncated(words: Words, generator: random.Random) -> TokenIds | None:
    if len(words) < 2:
        return None
    kept = min(max(1, round(generator.uniform(*_KEPT) * len(words))), len(words) - 1)
    # More often the end is missing.
    return _joined(words[:kept] if generator.random() < 2 / 3 else words[-kept:])


def _with_replaced_words(words: Words, others: Words, generator: random.Random) -> TokenIds | None:
    if not others:
        return None
    count = max(1, round(generator.uniform(*_REPLACED) * len(words)))
    for position in generator.sample(range(len(words)), min(count, len(words))):
        words[position] = generator.choice(others)
    return _joined(words)


def _joined(parts: Words) -> TokenIds:
    return [token for part in parts for token in part]


def _changed_number(text: str, generator: random.Random) -> str:
    """A text with one digit, or with all digits of one number, replaced by others."""
    numbers = list(re.finditer(r"\d+", text))
    number = generator.choice(numbers)
    places = [generator.randrange(*number.span())] if generator.random() < 0.5 else range(*number.span())
    characters = list(text)
    for place in places:
        value = int(text[place])
        new = generator.choice([digit for digit in range(1, 10) if digit != value])
        characters[place] = chr(ord(text[place]) - value + new)  # a digit of the same script
    return "".join(characters)
