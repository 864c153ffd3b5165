"""Filters blocks of training pairs by the rules of `data.filters`.

Each pair gets a code: 0 if it is kept, otherwise one more than the index of the reason in REASONS. Duplicates
are found by comparing all blocks; see `rejections.py`.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mtrain.config.data import DataConfig
from mtrain.config.filters import RULES
from mtrain.config.languages import Direction
from mtrain.data.pairs.rules import Pairs, Rule, make_rules
from mtrain.data.reading.parse import Block
from mtrain.data.text.hashes import Hashes, hash_pairs, hash_texts

REASONS = ("bad", "empty", *RULES)  # bad: unreadable; empty: a side is blank
BAD, EMPTY, DUPLICATE = (REASONS.index(reason) + 1 for reason in ("bad", "empty", "duplicates"))
Codes = npt.NDArray[np.uint8]


class FilteredBlock(NamedTuple):
    """The result of filtering a block. Both arrays include the unreadable pairs."""

    codes: Codes
    keys: Hashes  # the same for duplicates; empty if duplicates are kept


class BlockFilter:
    """Applies the rules of `data.filters` to blocks of training pairs."""

    def __init__(self, data: DataConfig):
        """`data.filters` must be given. Raises what `make_rules` raises."""
        assert data.filters is not None
        rules: dict[Direction, dict[str, Rule]] = {}
        self._rules: list[dict[str, Rule]] = []  # of each corpus
        for corpus in data.train:
            direction = data.direction_of(corpus)
            if corpus.filters == "off":
                self._rules.append({})
                continue
            if direction not in rules:
                rules[direction] = make_rules(data.filters, direction)
            self._rules.append(rules[direction])
        self._duplicates = data.filters.duplicates
        self._directions = np.zeros(len(data.train), np.uint64)  # a hash of that of each corpus
        if data.has_several_directions:
            self._directions = hash_texts(list(map(str, data.directions)))

    def apply(self, block: Block, corpus: int) -> FilteredBlock:
        """Filter a block of corpus number `corpus` (from 0). With `filters: off`, only unreadable and empty
        pairs are rejected."""
        count, readable = len(block.numbers) + len(block.errors), rows_of(block)
        codes = np.full(count, BAD, np.uint8)
        codes[readable] = self._judge(block, self._rules[corpus])
        keys = np.zeros(0 if self._duplicates == "off" else count, np.uint64)
        if len(keys):
            keys[readable] = self._hash(block) ^ self._directions[corpus]
        return FilteredBlock(codes, keys)

    def _judge(self, block: Block, rules: dict[str, Rule]) -> Codes:
        """The codes of the readable pairs."""
        codes = np.zeros(len(block.sources), np.uint8)
        blank = [np.fromiter((not text.strip() for text in side), np.bool_, len(side)) for side in block[:2]]
        codes[blank[0] | blank[1]] = EMPTY
        filled = np.flatnonzero(codes == 0)
        if len(filled) < len(codes):
            block = block.select(codes == 0)
        pairs, rows = Pairs(block.sources, block.targets, block.scores), np.arange(len(filled))
        for name, rule in rules.items():
            rejected = rule(pairs, rows)
            codes[filled[rows[rejected]]] = REASONS.index(name) + 1
            rows = rows[~rejected]
        return codes

    def _hash(self, block: Block) -> Hashes:
        if self._duplicates == "pairs":
            return hash_pairs(hash_texts(block.sources), hash_texts(block.targets))
        return hash_texts(block.sources if self._duplicates == "source" else block.targets)


def rows_of(block: Block) -> npt.NDArray[np.int64]:
    """The places of the readable pairs of a block among all its pairs, from 0."""
    return np.asarray(block.numbers, np.int64) - block.first
