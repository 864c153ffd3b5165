"""Sampling of unigram segmentations: Kudo, "Subword Regularization", ACL 2018, section 3.

All words are processed at the same time, with NumPy. The text of all distinct words is one array of
characters, in which an end mark follows each word. The nodes of the lattice of a word are its characters and
its end mark. An edge is a piece, which leads from its first character to the node after its last one.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mtrain.tokenizer.code_points import code_points
from mtrain.tokenizer.rows import Floats, Indices, Rows

_END = 0x110000  # the end mark of a word; greater than all code points
_BITS = 21  # of a code point
_SHARES = 2**32  # the precision of probabilities


class UnigramSampler:
    """Samples from all segmentations of words into some pieces."""

    def __init__(self, names: Sequence[str], scores: Floats, learned: Sequence[int], strength: float):
        """`names` and `scores` (log-probabilities) cover all pieces, by id. `learned` has the ids of
        the pieces to use, and `strength` is the exponent alpha of the probability of a segmentation."""
        self._scores = strength * scores
        self._trie = _Trie([names[i] for i in learned], learned)
        lengths = np.array([*map(len, names), 1])
        # The characters of each piece, and the end mark as the last piece.
        self._text = Rows(np.append(code_points("".join(names)), _END), lengths)

    def __call__(self, words: Rows, generator: np.random.Generator) -> Rows:
        """New segmentations of words, which are rows of pieces."""
        distinct, which = words.distinct()
        end_mark = len(self._text.lengths) - 1
        pieces = np.insert(distinct.ids, distinct.starts[1:], end_mark)
        text = self._text.take(pieces).ids.astype(np.int64)
        ends = np.flatnonzero(text == _END)
        edges = self._edges(text, ends)
        active, node = np.arange(len(which)), np.append(0, ends + 1)[which]
        steps = []  # the words that a piece is drawn for, and the pieces
        while len(active):
            drawn = edges.draw(node, generator)
            steps.append((active, edges.ids[drawn]))
            node = edges.stops[drawn]
            going = text[node] != _END
            active, node = active[going], node[going]
        lengths = np.bincount(np.concatenate([drawn_for for drawn_for, _ in steps]))
        sampled = Rows(np.empty(lengths.sum(), words.ids.dtype), lengths)
        starts = sampled.starts
        for number, (drawn_for, ids) in enumerate(steps):
            sampled.ids[starts[drawn_for] + number] = ids
        return sampled

    def _edges(self, text: Indices, ends: Indices) -> "_Edges":
        """The edges of the lattices of some words in `text`, whose end nodes are `ends`."""
        starts, stops, ids = self._trie.find(text)
        scores = self._scores[ids]
        sizes = np.diff(ends, prepend=-1)
        to_end = np.repeat(ends, sizes) - np.arange(len(text))  # characters
        weights = np.where(to_end, -np.inf, 0.0)  # of nodes: log of the sum over segmentations up to the end
        level = to_end[starts].astype(np.min_scalar_type(sizes.max()))  # small integers are sorted faster
        order = np.argsort(level, kind="stable")
        levels = np.searchsorted(level, np.arange(1, sizes.max() + 1), sorter=order)
        for edges in map(order.__getitem__, map(slice, levels[:-1], levels[1:])):
            if len(edges):
                nodes, firsts = np.unique(starts[edges], return_index=True)
                values = scores[edges] + weights[stops[edges]]
                weights[nodes] = np.logaddexp.reduceat(values, firsts)
        reach_end = np.isfinite(weights[stops])
        starts, stops = starts[reach_end], stops[reach_end]
        shares = np.exp(scores[reach_end] + weights[stops] - weights[starts])
        return _Edges.of(starts, stops, ids[reach_end], shares)


class _Edges(NamedTuple):
    """The pieces that can be drawn at each node. The edges are sorted by node."""

    firsts: Indices  # the first edge of each node
    bounds: Indices  # _SHARES times the sum of the shares of the edges of the node up to this one
    stops: Indices  # the node after the piece
    ids: Indices  # of the piece

    @classmethod
    def of(cls, starts: Indices, stops: Indices, ids: Indices, shares: Floats) -> "_Edges":
        """`shares` are the probabilities of the edges of each node, which are consecutive."""
        counts = np.bincount(starts)
        firsts = np.cumsum(counts) - counts
        rank = np.arange(len(starts)) - firsts[starts]
        # More precise than differences of the cumulative sum of all edges.
        for number in range(1, rank.max(initial=0) + 1):
            edges = np.flatnonzero(rank == number)
            shares[edges] += shares[edges - 1]
        shares[rank + 1 == counts[starts]] = 1.0  # the remaining probability
        return cls(firsts, (shares * _SHARES).astype(np.int64), stops, ids)

    def draw(self, nodes: Indices, generator: np.random.Generator) -> Indices:
        """Draw an edge for each of `nodes`."""
        chosen = generator.integers(_SHARES, size=len(nodes), dtype=np.uint32)
        edges, undecided = self.firsts[nodes], np.arange(len(nodes))
        # Most nodes have few edges, so that looking at one after another is faster than a binary search.
        while len(undecided := undecided[self.bounds[edges[undecided]] <= chosen[undecided]]):
            edges[undecided] += 1
        return edges


class _Trie:
    """Finds pieces in text. The root is state 0; the states at each depth are numbered one after another."""

    def __init__(self, names: Sequence[str], ids: Sequence[int]):
        """`ids` are the ids of the pieces `names`."""
        lengths = np.array(list(map(len, names)), np.int64)
        starts, text = np.cumsum(lengths) - lengths, code_points("".join(names))
        state, total = np.zeros(len(names), np.int64), 1
        # Of each depth: the first state that is reached from it, and its transitions in the order of the
        # states that they reach. A transition is a state and a code point.
        self._levels: list[tuple[int, Indices]] = []
        for depth in range(lengths.max(initial=0)):
            longer = np.flatnonzero(lengths > depth)
            found = state[longer] << _BITS | text[starts[longer] + depth]
            transitions, which = np.unique(found, return_inverse=True)
            state[longer] = total + which
            self._levels.append((total, transitions))
            total += len(transitions)
        self._ids = np.full(total, -1)  # of the piece that each state spells, if any
        self._ids[state] = ids

    def find(self, text: Indices) -> tuple[Indices, Indices, Indices]:
        """Start, end and id of all occurrences of pieces in code points, sorted by start and then by end. The
        last code point must not be part of a piece."""
        start, state = np.arange(len(text)), np.zeros(len(text), np.int64)
        found = []
        for length, (first, transitions) in enumerate(self._levels, 1):
            wanted = state << _BITS | text[start + length - 1]
            place = np.searchsorted(transitions, wanted)
            place[place == len(transitions)] = 0
            exists = transitions[place] == wanted
            start, state = start[exists], first + place[exists]
            ids = self._ids[state]
            spelled = ids >= 0
            found.append((start[spelled], start[spelled] + length, ids[spelled]))
        starts, stops, ids = (np.concatenate(column) for column in zip(*found, strict=True))
        order = np.argsort(starts, kind="stable")
        return starts[order], stops[order], ids[order]
