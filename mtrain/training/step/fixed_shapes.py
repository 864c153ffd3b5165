"""The shapes of packed micro-batches in CUDA graphs, which are captured once for each of them.

Surplus tokens cost as much as real ones. So there are as many tokens as the largest micro-batch of the plan
has, which is a few percent less than `training.micro_batch_tokens`, padding included. Only attention depends
on the longest sentence: there is a graph for each class of it.
"""

from bisect import bisect_left
from collections.abc import Iterable
from typing import NamedTuple

from mtrain.data.epochs.packed_batch import Layout

CLASSES = (32, 64, 128)  # tokens of the longest sentence; the last class has longer ones
TOKENS, SEQUENCES = 64, 32  # what sizes are multiples of
SURPLUS = 64  # 1/64 more tokens than are known to be needed, once the plan was exceeded


class FixedShapes(NamedTuple):
    """Shapes for micro-batches of up to these sizes."""

    positions: int  # sentences that the model distinguishes are no longer
    source: int = 0  # tokens
    target: int = 0
    longest: int = 0  # tokens of a sentence
    pairs: tuple[int, ...] = (0,) * (len(CLASSES) + 1)  # for each class

    @classmethod
    def of_numbers(cls, positions: int, numbers: list[int]) -> "FixedShapes":
        """The shapes with these `numbers`; empty ones if there are none, or for other classes."""
        if len(numbers) != len(cls(positions).numbers):
            return cls(positions)
        source, target, longest, *pairs = numbers
        return cls(positions, source, target, longest, tuple(pairs))

    @property
    def numbers(self) -> list[int]:
        """All sizes, as a checkpoint has them."""
        return [self.source, self.target, self.longest, *self.pairs]

    def including(self, layouts: Iterable[Layout]) -> "FixedShapes":
        """Shapes that also fit micro-batches of these exact layouts."""
        source, target, longest, pairs = self.source, self.target, self.longest, list(self.pairs)
        for layout in layouts:
            number = bisect_left(CLASSES, layout.longest)
            source, target = max(source, layout.source), max(target, layout.target)
            longest = max(longest, layout.longest)
            pairs[number] = max(pairs[number], layout.sequences)
        source, target = _grown(self.source, source), _grown(self.target, target)
        return FixedShapes(self.positions, source, target, longest, tuple(pairs))

    def fit(self, exact: Layout) -> Layout | None:
        """The layout of a micro-batch whose exact layout is given; None if these shapes do not fit."""
        number = bisect_left(CLASSES, exact.longest)
        fits = exact.source <= self.source and exact.target <= self.target and exact.longest <= self.longest
        return self.layout(number) if fits and exact.sequences <= self.pairs[number] else None

    def layout(self, number: int) -> Layout:
        """The layout of a class."""
        longest = max(self.positions, self.longest)
        if number < len(CLASSES):
            longest = min(longest, CLASSES[number])
        surplus = -(-max(self.source, self.target) // longest)  # sequences for surplus tokens
        return Layout(self.source, self.target, _rounded(self.pairs[number] + surplus, SEQUENCES), longest)


def _grown(old: int, needed: int) -> int:
    if needed <= old:
        return old
    return _rounded(needed + (needed // SURPLUS if old else 0), TOKENS)


def _rounded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
