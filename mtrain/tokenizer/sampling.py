"""Subword regularization: samples new segmentations of encoded sentences.

`unigram` samples from all segmentations of a word (Kudo, "Subword Regularization", ACL 2018, section 3), and
`bpe` skips merges at random (Provilkov et al., "BPE-Dropout", ACL 2020, algorithm 1). SentencePiece's
own sampling is not used: version 0.2.3 ignores the seed, so an epoch could not be reproduced on resume. No
piece spans two words, so words are sampled independently, from the ids alone.
"""

import math
import random
from bisect import bisect
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

from mtrain.tokenizer.vocabulary import SPACE, Vocabulary

CACHED_WORDS = 2**15  # each has a lattice of about 4 KB
Node = tuple[list[float], list[int], list[int]]  # cumulative probabilities, ids and ends of pieces
Resegment = Callable[[list[int], random.Random], list[int]]


def make_resegment(vocabulary: Vocabulary, strength: float) -> Resegment:
    """A function that samples a segmentation of the text of a row of ids. Symbols, bytes and <unk> are kept.

    `strength`, in (0, 1], is the exponent alpha of the probability of a segmentation for `unigram`, and the
    probability that a merge is skipped for `bpe`.
    """
    names, scores = vocabulary.pieces, vocabulary.scores()
    all_ids = range(len(names))
    # Pieces that were not learned have the score 0.0; the first merge of bpe has -0.0.
    fixed = {i for i in all_ids if str(scores[i]) == "0.0" or i == vocabulary.special.unk}
    ends_word = fixed | {i for i in all_ids if names[i].startswith(SPACE)}
    learned = {names[i]: i for i in all_ids if i not in fixed}
    is_bpe = all(scores[i].is_integer() for i in learned.values())  # scores of bpe are ranks of merges
    draw = (_bpe_sampler if is_bpe else _unigram_sampler)(names, scores, learned, strength)

    def resegment(row: list[int], generator: random.Random) -> list[int]:
        sampled: list[int] = []
        word: list[int] = []
        for i in row:
            if word and i in ends_word:
                sampled += draw(word, generator)
                word = []
            (sampled if i in fixed else word).append(i)
        return sampled + draw(word, generator) if word else sampled

    return resegment


def _unigram_sampler(
    names: Sequence[str], scores: Sequence[float], learned: dict[str, int], strength: float
) -> Resegment:
    """A function that samples from all segmentations of a word into `learned` pieces. `names` and `scores`
    (log-probabilities) are those of all pieces, by id."""
    longest = max(map(len, learned), default=0)

    @lru_cache(CACHED_WORDS)
    def lattice(word: tuple[int, ...]) -> list[Node]:
        text = "".join(names[i] for i in word)
        nodes: list[Node] = [([], [], [])] * len(text)
        weights = [-math.inf] * len(text) + [0.0]  # log of the sum over segmentations of text[i:]
        for start in reversed(range(len(text))):
            stops = range(start + 1, min(len(text), start + longest) + 1)
            ends = [stop for stop in stops if text[start:stop] in learned and weights[stop] > -math.inf]
            ids = [learned[text[start:end]] for end in ends]
            logs = [strength * scores[i] + weights[end] for i, end in zip(ids, ends, strict=True)]
            if logs:
                total = sum(math.exp(value - max(logs)) for value in logs)
                weights[start] = max(logs) + math.log(total)
                shares = accumulate(math.exp(value - weights[start]) for value in logs)
                nodes[start] = [*shares][:-1], ids, ends  # the last piece gets the remaining probability
        return nodes

    def sample(word: list[int], generator: random.Random) -> list[int]:
        nodes, place, drawn = lattice(tuple(word)), 0, []
        while place < len(nodes):
            shares, ids, ends = nodes[place]
            choice = bisect(shares, generator.random())
            drawn.append(ids[choice])
            place = ends[choice]
        return drawn

    return sample


def _bpe_sampler(
    names: Sequence[str], scores: Sequence[float], learned: dict[str, int], strength: float
) -> Resegment:
    """A function that merges the characters of a word again, skipping merges at random. The arguments are
    those of `_unigram_sampler`, but a score is the negative rank of a merge."""
    rank = {name: -scores[i] for name, i in learned.items()}

    def merge(word: list[int], generator: random.Random) -> list[int]:
        pieces = list("".join(names[i] for i in word))
        if not learned.keys() >= set(pieces):
            return word  # one of its characters has no piece
        ranks = [rank.get(left + right) for left, right in pairwise(pieces)]
        while kept := [
            (value, i)
            for i, value in enumerate(ranks)
            if value is not None and generator.random() >= strength
        ]:
            _, i = min(kept)
            pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
            around = slice(max(0, i - 1), i + 2)
            ranks[around] = [rank.get(left + right) for left, right in pairwise(pieces[around])]
        return [learned[piece] for piece in pieces]

    return merge
