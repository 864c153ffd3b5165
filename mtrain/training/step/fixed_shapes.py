"""The shapes of packed micro-batches in CUDA graphs, which are captured once for each of them.

Surplus tokens cost as much as real ones. So there are as many tokens as the largest micro-batch of the plan
has, which is a few percent less than `training.micro_batch_tokens`, padding included. Only attention depends
on the longest sentence: there is a graph for each class of lengths. Where attention needs padding, its memory
grows with the square of the longest length, so the last class ends just above the plan's longest sentence.
"""

from bisect import bisect_left
from collections.abc import Iterable
from typing import NamedTuple

from mtrain.data.epochs.packed_batch import Layout

CLASSES = (32, 64, 128)  # tokens of the longest sentence of a class; one more class has longer ones
TOKENS, PAIRS = 64, 8  # what sizes are multiples of
# Shares that are added to what a plan needs: of tokens once the plan of the first window does not suffice; of
# pairs always, because other epochs group them differently, and surplus pairs cost little. The share of pairs
# also applies to the longest length.
SURPLUS_TOKENS, SURPLUS_PAIRS = 1 / 64, 1 / 8


class FixedShapes(NamedTuple):
    """Shapes for micro-batches of up to these sizes. Ranks may have different ones. A checkpoint has those of
    rank 0, which a resumed run then uses on all ranks."""

    max_positions: int  # of a sentence; at first, as many as the model distinguishes
    longest: int = CLASSES[-1]  # tokens of a sentence of the last class, unless `max_positions` are fewer
    source: int = 0  # tokens
    target: int = 0
    pairs: tuple[int, ...] = (0,) * (len(CLASSES) + 1)  # for each class

    @property
    def tokens(self) -> int:
        """Tokens of both sides, including surplus ones."""
        return self.source + self.target

    def to_list(self) -> list[int]:
        """All sizes, as a checkpoint has them."""
        return [*self[:-1], *self.pairs]

    def restored(self, sizes: list[int]) -> "FixedShapes":
        """The shapes of which `to_list` returned these sizes; the current ones if there are none, or if the
        number of classes was another."""
        if len(sizes) != len(self.to_list()):
            return self
        max_positions, longest, source, target, *pairs = sizes
        return FixedShapes(max_positions, longest, source, target, tuple(pairs))

    def including(self, layouts: Iterable[Layout]) -> "FixedShapes":
        """Shapes that also fit micro-batches of these exact layouts."""
        longest, source, target, pairs = 1, 1, 1, [0] * len(self.pairs)
        for layout in layouts:
            number = bisect_left(CLASSES, layout.longest)
            source, target = max(source, layout.source), max(target, layout.target)
            longest, pairs[number] = max(longest, layout.longest), max(pairs[number], layout.sequences)
        share = SURPLUS_TOKENS if self.source else 0
        sides = (self.source, source), (self.target, target)
        source, target = (_grown(*sizes, share, TOKENS) for sizes in sides)
        grown = (_grown(*sizes, SURPLUS_PAIRS, PAIRS) for sizes in zip(self.pairs, pairs, strict=True))
        positions = max(self.max_positions, longest)
        longest = _grown(self.longest, longest, SURPLUS_PAIRS, TOKENS)
        return FixedShapes(positions, longest, source, target, tuple(grown))

    def within(self, limit: float) -> "FixedShapes":
        """Shapes with at most `limit` tokens, or as few as possible, in the same proportion of both sides."""
        if self.tokens <= limit:
            return self
        share = limit / self.tokens
        source, target = (max(1, int(side * share) // TOKENS) * TOKENS for side in (self.source, self.target))
        return self._replace(source=source, target=target)

    def layout_for(self, exact: Layout) -> Layout | None:
        """The layout of a micro-batch whose exact layout is given; None if these shapes do not fit."""
        number = bisect_left(CLASSES, exact.longest)
        needed = (exact.longest, max(1, exact.source), max(1, exact.target), exact.sequences)
        sizes = (min(self.max_positions, self.longest), self.source, self.target, self.pairs[number])
        fits = all(a <= b for a, b in zip(needed, sizes, strict=True))
        return self.layout_of_class(number) if fits else None

    def layout_of_class(self, number: int) -> Layout:
        """The layout of a class."""
        longest = min(self.max_positions, (*CLASSES, self.longest)[number])
        surplus = -(-max(self.source, self.target) // longest)  # sequences for surplus tokens
        return Layout(self.source, self.target, self.pairs[number] + surplus, longest)


def _grown(old: int, needed: int, share: float, multiple: int) -> int:
    """`old` if it suffices, or else what is needed, and a share of it."""
    return old if needed <= old else -(-int(needed * (1 + share)) // multiple) * multiple
