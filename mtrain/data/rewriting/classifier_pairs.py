"""The training examples of a pair classifier: good and corrupted pairs, as single sequences with a class."""

import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mtrain.config.sections.data import DataConfig
from mtrain.data.rewriting.corruption import Corrupter, Example, Pair
from mtrain.data.rewriting.rewrite import BLOCK, Key, ScratchStorage, Sides, from_lists, to_lists
from mtrain.data.rewriting.throttle import Pace
from mtrain.data.store.encoded import EncodedCorpus
from mtrain.tokenizer.rows import Ids, Indices
from mtrain.tokenizer.tokenizer import Tokenizer

BAD, GOOD = 0, 1  # the classes
_NEIGHBORS = 50  # pairs of the most similar lengths, among which the other pair of a corruption is drawn


class ExampleMaker:
    """Turns the rows of a window into examples of a pair classifier. The source side of a row becomes source,
    EOS, target, EOS; its target side becomes the class. Half of the pairs are corrupted.

    Examples depend only on the seed, the key and the rows.
    """

    def __init__(self, data: DataConfig, tokenizer: Tokenizer, seed: int, scratch: Path):
        """`data.corruptions` must be set. Examples are written to temporary files in `scratch`."""
        assert data.corruptions is not None
        self._shares = {kind: share for kind, share in data.corruptions if share}
        self._corrupter = Corrupter(tokenizer, data.max_length)
        self._storage = ScratchStorage(tokenizer, scratch)
        self._eos, self._seed = tokenizer.special.eos, seed

    def __call__(self, corpus: EncodedCorpus, key: Key, pace: Pace) -> EncodedCorpus:
        """The examples of the rows of a corpus. Raises what `ScratchStorage.replace_rows` raises."""
        return self._storage.replace_rows(corpus, self._blocks(corpus, key), pace)

    def _blocks(self, corpus: EncodedCorpus, key: Key) -> Iterator[Sides]:
        others = draw_others(corpus.target_lengths, (self._seed, *key))
        for start in range(0, len(corpus), BLOCK):
            rows = np.arange(start, min(start + BLOCK, len(corpus)))
            generator = random.Random(" ".join(map(str, ("pairs", self._seed, *key, start))))
            sequences, classes = [], []
            for pair, other in zip(_pairs(corpus, rows), _pairs(corpus, others[rows]), strict=True):
                example = _draw_example(self._corrupter, self._shares, pair, other, generator)
                good = example is None or generator.random() < 0.5
                version = pair if example is None else example.good if good else example.bad
                sequences.append(pair_sequence(version, self._eos))
                classes.append([GOOD if good else BAD])
            yield from_lists(sequences), from_lists(classes)


def _draw_example(
    corrupter: Corrupter, shares: Mapping[str, float], pair: Pair, other: Pair, generator: random.Random
) -> Example | None:
    """An example of a kind that is drawn by its share; of another one if that would not change the pair."""
    remaining = dict(shares)
    while remaining:
        [kind] = generator.choices(list(remaining), list(remaining.values()))
        if (example := corrupter.corrupt(kind, pair, other, generator)) is not None:
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
    others: npt.NDArray[np.int64] = np.empty(count, np.int64)
    others[order] = order[(np.arange(count) + distances) % count]
    return others


def pair_sequence(pair: Pair, eos: int) -> list[int]:
    """The input of a pair classifier: source, EOS, target, EOS."""
    return [*pair[0], eos, *pair[1], eos]


def _pairs(corpus: EncodedCorpus, rows: Indices) -> Iterator[Pair]:
    source, target = corpus.rows(rows)
    return ((one[:-1], other[:-1]) for one, other in zip(to_lists(source), to_lists(target), strict=True))
