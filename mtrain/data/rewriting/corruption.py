"""Corrupts sentence pairs, as token ids, to train a pair classifier.

Bicleaner AI (Zaragoza-Bernabeu et al., LREC 2022) also learns from such pairs.
"""

import random
import re
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from mtrain.tokenizer.tokenizer import Tokenizer
from mtrain.tokenizer.vocabulary import SPACE

Ids = list[int]  # without EOS
Pair = tuple[Ids, Ids]  # source, target
_KEPT = (0.2, 0.8)  # share of the words that are left of a truncated side
_REPLACED = (0.3, 0.9)  # share of the words that are replaced
_DIGIT = re.compile(r"[0-9]")
_MOST_DIGITS = 4  # of a number that is inserted, at most


class Example(NamedTuple):
    """A pair in a good and in a corrupted version."""

    good: Pair
    bad: Pair


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
        self._encode = lru_cache(20_000)(self._encode_word)  # each call of SentencePiece starts threads
        self._kinds: dict[str, Callable[[Pair, Pair, random.Random], Example | None]] = {
            "misaligned": self._misaligned,
            "truncated": self._truncated,
            "extended": self._extended,
            "wrong_language": self._wrong_language,
            "numbers": self._numbers,
            "replaced_words": self._replaced_words,
            "word_order": self._word_order,
        }

    def corrupt(self, kind: str, pair: Pair, other: Pair, generator: random.Random) -> Example | None:
        """Corrupt a pair in one way (a key of `data.corruptions`); `other` is another pair of the corpus.
        None if the pair would not change."""
        example = self._kinds[kind](pair, other, generator)
        if example is None:
            return None
        good, bad = ((source[: self._longest], target[: self._longest]) for source, target in example)
        return None if good == bad else Example(good, bad)

    def _misaligned(self, pair: Pair, other: Pair, _: random.Random) -> Example:
        return Example(pair, (pair[0], other[1]))

    def _wrong_language(self, pair: Pair, other: Pair, generator: random.Random) -> Example:
        side = generator.randrange(2)  # that is kept
        same_language = pair[side] if generator.random() < 0.5 else other[side]
        return Example(pair, _with_side(pair, 1 - side, same_language))

    def _truncated(self, pair: Pair, _: Pair, generator: random.Random) -> Example | None:
        side = generator.randrange(2)
        words = self._words(pair[side])
        if len(words) < 2:
            return None
        kept = min(max(1, round(generator.uniform(*_KEPT) * len(words))), len(words) - 1)
        # More often the end is missing.
        rest = words[:kept] if generator.random() < 2 / 3 else words[-kept:]
        return Example(pair, _with_side(pair, side, _joined(rest)))

    def _extended(self, pair: Pair, other: Pair, generator: random.Random) -> Example:
        side = generator.randrange(2)
        parts = [pair[side], other[side]]
        if generator.random() < 1 / 3:
            parts.reverse()
        return Example(pair, _with_side(pair, side, _joined(parts)))

    def _replaced_words(self, pair: Pair, other: Pair, generator: random.Random) -> Example | None:
        side = generator.randrange(2)
        words, others = self._words(pair[side]), self._words(other[side])
        if not others:
            return None
        count = max(1, round(generator.uniform(*_REPLACED) * len(words)))
        for position in generator.sample(range(len(words)), min(count, len(words))):
            words[position] = generator.choice(others)
        return Example(pair, _with_side(pair, side, _joined(words)))

    def _word_order(self, pair: Pair, _: Pair, generator: random.Random) -> Example:
        side = generator.randrange(2)
        words = self._words(pair[side])
        generator.shuffle(words)
        return Example(pair, _with_side(pair, side, _joined(words)))

    def _words(self, ids: Ids) -> list[Ids]:
        """The words of a side, or its tokens if there are no words."""
        starts = [i for i, token in enumerate(ids) if i == 0 or self._begins_word[token]]
        if len(starts) < 2:
            return [[token] for token in ids]
        return [ids[start:stop] for start, stop in zip(starts, [*starts[1:], len(ids)], strict=True)]

    # ------------------------------------------------------------------------------------------------ numbers

    def _numbers(self, pair: Pair, _: Pair, generator: random.Random) -> Example | None:
        """Replace one or all digits of a number on one side. If a side has no number, the same one is first
        inserted on both sides, because few pairs of most corpora have any."""
        if not all(any(map(self._has_digit.__getitem__, ids)) for ids in pair):
            number = self._encode(_random_number(generator))
            pair = self._inserted(pair[0], number, generator), self._inserted(pair[1], number, generator)
        side = generator.randrange(2)
        words = self._words(pair[side])
        candidates = [
            i
            for i, word in enumerate(words)
            if any(map(self._has_digit.__getitem__, word)) and self._unknown.isdisjoint(word)
        ]
        if not candidates:
            return None
        chosen = generator.choice(candidates)
        [text] = self._vocabulary.decode([words[chosen]])
        words[chosen] = self._encode(_changed_number(text, generator))
        return Example(pair, _with_side(pair, side, _joined(words)))

    def _inserted(self, ids: Ids, word: Ids, generator: random.Random) -> Ids:
        words = self._words(ids)
        words.insert(generator.randint(0, len(words)), word)
        return _joined(words)

    def _encode_word(self, text: str) -> Ids:
        [ids] = self._vocabulary.encode([text])
        return ids


def _with_side(pair: Pair, side: int, ids: Ids) -> Pair:
    return (pair[0], ids) if side else (ids, pair[1])


def _joined(parts: list[Ids]) -> Ids:
    return [token for part in parts for token in part]


def _random_number(generator: random.Random) -> str:
    digits = generator.randint(1, _MOST_DIGITS)
    return str(generator.randint(10 ** (digits - 1), 10**digits - 1))


def _changed_number(text: str, generator: random.Random) -> str:
    """A text with one digit, or with all digits of one number, replaced by others."""
    numbers = list(re.finditer("[0-9]+", text))
    number = generator.choice(numbers)
    places = [generator.randrange(*number.span())] if generator.random() < 0.5 else range(*number.span())
    characters = list(text)
    for place in places:
        characters[place] = generator.choice([digit for digit in "123456789" if digit != text[place]])
    return "".join(characters)
