"""Subword regularisation: the words of encoded sentences segmented anew, at random.

`unigram` draws from all segmentations of a word (Kudo, "Subword Regularization", ACL 2018, section 3), `bpe`
leaves out merges (Provilkov et al., "BPE-Dropout", ACL 2020, algorithm 1). SentencePiece does both, but
version 0.2.3 draws differently in each process, whatever the seed, and no epoch could be made again. No piece
spans two words, so a sentence's distribution is that of its words, and its ids tell as much as its text.
"""

import math
import random
from bisect import bisect
from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate, pairwise

from mtrain.tokenizer.vocabulary import SPACE, Vocabulary

WORDS = 2**15  # whose lattices are kept, about 4 KB each
Node = tuple[list[float], list[int], list[int]]  # pieces that start here: cumulative probabilities, ids, ends
Resegment = Callable[[list[int], random.Random], list[int]]


def make_resegment(vocabulary: Vocabulary, strength: float) -> Resegment:
    """A function that draws another segmentation of a row of ids; symbols, bytes, unknowns stay as they are.

    `strength` in (0, 1]: for `unigram` the exponent alpha of a segmentation's probability, for `bpe` the
    probability that a merge is left out.
    """
    names, scores = vocabulary.pieces, vocabulary.scores()
    every = range(len(names))
    # Pieces that were not learnt have no score; the first merge of bpe has -0.0.
    fixed = {i for i in every if str(scores[i]) == "0.0" or i == vocabulary.special.unk}
    ends_word = fixed | {i for i in every if names[i].startswith(SPACE)}
    learnt = {names[i]: i for i in every if i not in fixed}
    rank = {name: -scores[i] for name, i in learnt.items()}
    longest = max(map(len, rank), default=0)

    @lru_cache(WORDS)
    def lattice(word: tuple[int, ...]) -> list[Node]:
        text = "".join(names[i] for i in word)
        nodes: list[Node] = [([], [], [])] * len(text)
        weights = [-math.inf] * len(text) + [0.0]  # log of the sum over all segmentations from here on
        for start in reversed(range(len(text))):
            stops = range(start + 1, min(len(text), start + longest) + 1)
            ends = [stop for stop in stops if text[start:stop] in learnt and weights[stop] > -math.inf]
            ids = [learnt[text[start:end]] for end in ends]
            logs = [strength * scores[i] + weights[end] for i, end in zip(ids, ends, strict=True)]
            if logs:
                total = sum(math.exp(value - max(logs)) for value in logs)
                weights[start] = max(logs) + math.log(total)
                shares = accumulate(math.exp(value - weights[start]) for value in logs)
                nodes[start] = [*shares][:-1], ids, ends  # what is left belongs to the last
        return nodes

    def sample(word: list[int], generator: random.Random) -> list[int]:
        nodes, place, drawn = lattice(tuple(word)), 0, []
        while place < len(nodes):
            shares, ids, ends = nodes[place]
            choice = bisect(shares, generator.random())
            drawn.append(ids[choice])
            place = ends[choice]
        return drawn

    def merge(word: list[int], generator: random.Random) -> list[int]:
        pieces = list("".join(names[i] for i in word))
        if not learnt.keys() >= set(pieces):
            return word  # a character of it has no piece
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
        return [learnt[piece] for piece in pieces]

    draw = merge if all(value.is_integer() for value in rank.values()) else sample  # bpe scores are ranks

    def resegment(row: list[int], generator: random.Random) -> list[int]:
        anew: list[int] = []
        word: list[int] = []
        for i in row:
            if word and i in ends_word:
                anew += draw(word, generator)
                word = []
            (anew if i in fixed else word).append(i)
        return anew + draw(word, generator) if word else anew

    return resegment
