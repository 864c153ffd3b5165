"""Batches without padding, for CUDA devices, and the kind of batch that suits a device.

A packed batch is one buffer of int32 numbers, so that moving it to the device is one copy. `Layout` says
where its parts are. Shapes fit the pairs exactly, or are fixed, with more tokens and sequences than the
pairs have: the surplus tokens then form sequences whose labels are ignored, and change neither loss nor
gradient.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Generic, NamedTuple, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mtrain.data.epochs.batching import Batch, ModelInputs
from mtrain.kernels.cross_entropy import IGNORE
from mtrain.kernels.sequences import Packed
from mtrain.tokenizer.rows import Ids, Rows

Int32 = npt.NDArray[np.int32]
Buffer = TypeVar("Buffer", Tensor, Int32)


class Parts(NamedTuple, Generic[Buffer]):
    """The parts of a buffer, which share its memory. There are P source tokens, R target tokens, and N
    sequences on each side."""

    source: Buffer  # (P) ids of the sources, each with EOS
    target_in: Buffer  # (R) BOS and the target without its last token
    source_place: Buffer  # (P) the position of each token in its sequence
    target_place: Buffer  # (R)
    labels: Buffer  # (R) the target with EOS; surplus tokens are IGNORE
    source_starts: Buffer  # (N + 1) the first token of each sequence, and the end of the last one
    target_starts: Buffer  # (N + 1)


class Layout(NamedTuple):
    """The shapes of a packed batch."""

    source: int  # source tokens
    target: int  # target tokens
    sequences: int  # on each side
    longest: int  # no sequence has more tokens; at most as many as the model has positions

    @classmethod
    def of(cls, source: Ids, target: Ids) -> Self:
        """The layout that fits pairs with these lengths exactly."""
        longest = max(int(side.max(initial=0)) for side in (source, target))
        return cls(int(source.sum()), int(target.sum()), len(source), longest)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of elements of each part."""
        starts = self.sequences + 1
        return self.source, self.target, self.source, self.target, self.target, starts, starts

    @property
    def buffer_size(self) -> int:
        """The number of elements of all parts."""
        return sum(self.sizes)

    def parts(self, buffer: Buffer) -> Parts[Buffer]:
        """The parts of a buffer. They may start anywhere: no kernel is compiled for aligned parts only."""
        edges = accumulate(self.sizes, initial=0)
        return Parts(*(buffer[start:end] for start, end in pairwise(edges)))


ChooseLayout = Callable[[Layout], Layout | None]  # for the exact layout of a batch; None: that one


@dataclass(frozen=True)
class PackedBatch:
    """Sentence pairs, one after another. It has the methods of `Batch`."""

    buffer: Tensor  # (layout.buffer_size) int32
    layout: Layout
    exact: Layout  # the one that fits the pairs exactly
    rows: list[int]  # row numbers of the pairs in the encoded corpus

    @classmethod
    def of_size(cls, pairs: int, length: int) -> "PackedBatch":
        """A batch of pairs of `length` tokens on both sides, to measure memory."""
        side = Rows(np.zeros(pairs * length, np.int32), np.full(pairs, length, np.int32))
        return pack(side, side, 0, [0] * pairs)

    @classmethod
    def without_pairs(cls) -> "PackedBatch":
        """A batch whose loss and gradient are zero: all of its few tokens are surplus."""
        return pack(Rows.from_lists([]), Rows.from_lists([]), 0, [], Layout(4, 4, 2, 2))

    @property
    def parts(self) -> Parts[Tensor]:
        """Views of the buffer, one for each part."""
        return self.layout.parts(self.buffer)

    @property
    def labels(self) -> Tensor:
        """Ids (R) int64 of the targets, each with EOS; IGNORE for surplus tokens."""
        return self.parts.labels.long()

    def inputs(self) -> ModelInputs:
        """The arguments of a model."""
        parts, longest = self.parts, self.layout.longest
        sources = Packed(parts.source_starts, parts.source_place, longest)
        targets = Packed(parts.target_starts, parts.target_place, longest)
        return ModelInputs(parts.source, sources, parts.target_in, targets)

    @property
    def target_tokens(self) -> int:
        """Labels that are not IGNORE."""
        return self.exact.target

    @property
    def positions(self) -> int:
        """Tokens of both sides, including surplus ones."""
        return self.layout.source + self.layout.target

    def in_layout(self, layout: Layout) -> "PackedBatch":
        """The same pairs in another layout. Raises ValueError if they do not fit."""
        return self.part(0, len(self.rows), layout)

    def divided(self, source: int, target: int) -> "list[PackedBatch]":
        """Consecutive parts with at most so many source and target tokens, or one pair; at least one part."""
        sides = [
            (starts.numpy(), size) for starts, size in zip(self.parts[-2:], (source, target), strict=True)
        ]
        count, edges = len(self.rows), [0]
        while (start := edges[-1]) < count:
            stops = (np.searchsorted(starts, starts[start] + size, "right") - 1 for starts, size in sides)
            edges.append(max(start + 1, min(count, *map(int, stops))))
        return [self.part(start, stop) for start, stop in pairwise(edges)] or [self]

    def part(self, start: int, stop: int, layout: Layout | None = None) -> "PackedBatch":
        """The pairs from `start` to `stop`, by default in the layout that fits them exactly."""
        parts: Parts[Int32] = self.layout.parts(self.buffer.numpy())

        def side(ids: Int32, starts: Int32) -> Rows:
            return Rows(ids[starts[start] : starts[stop]], np.diff(starts[start : stop + 1]))

        source, target = side(parts.source, parts.source_starts), side(parts.labels, parts.target_starts)
        part = pack(source, target, int(parts.target_in[0]), self.rows[start:stop], layout)
        return part.pinned() if self.buffer.is_pinned() else part

    def to(self, device: torch.device) -> Self:
        """The same batch on a device. Copying a pinned batch to a CUDA device does not block the host."""
        return replace(self, buffer=self.buffer.to(device, non_blocking=device.type == "cuda"))

    def pinned(self) -> Self:
        """The same batch in pinned memory."""
        return replace(self, buffer=self.buffer.pin_memory())


AnyBatch = Batch | PackedBatch


def batch_type(device: torch.device) -> type[Batch] | type[PackedBatch]:
    """The kind of batch that suits a device."""
    return PackedBatch if device.type == "cuda" else Batch


def split_batches(batches: Iterable[AnyBatch], max_positions: float) -> list[AnyBatch]:
    """The batches, each split in half recursively until a part has at most `max_positions` positions, or one
    pair."""
    found: list[AnyBatch] = []
    for batch in batches:
        middle = len(batch.rows) // 2
        if batch.positions <= max_positions or not middle:
            found.append(batch)
        else:
            halves = batch.part(0, middle), batch.part(middle, len(batch.rows))
            found += split_batches(halves, max_positions)
    return found


def pack(
    source: Rows, target: Rows, bos_id: int, rows: list[int], layout: Layout | None = None
) -> PackedBatch:
    """Pack encoded pairs, each side of which ends in EOS. Without a layout, in the one that fits exactly.

    Surplus tokens are spread evenly over the sequences that `layout` has more than there are pairs. They
    repeat the ids of the pairs: the gradient of embeddings would take long if a single id were frequent.
    Raises ValueError if the pairs do not fit.
    """
    exact = Layout.of(source.lengths, target.lengths)
    layout = layout or exact
    buffer = torch.zeros(layout.buffer_size, dtype=torch.int32)
    parts: Parts[Int32] = layout.parts(buffer.numpy())
    _write_sequences(source.lengths, layout, parts.source_starts, parts.source_place)
    parts.source[:] = np.resize(source.ids, layout.source)
    filled = _write_sequences(target.lengths, layout, parts.target_starts, parts.target_place)
    ids = np.resize(target.ids, layout.target)
    parts.target_in[1:] = ids[:-1]
    parts.target_in[parts.target_starts[:-1][filled]] = bos_id
    parts.labels[:] = ids
    parts.labels[len(target.ids) :] = IGNORE
    return PackedBatch(buffer, layout, exact, rows)


def _write_sequences(lengths: Ids, layout: Layout, starts: Int32, place: Int32) -> npt.NDArray[np.bool_]:
    """Write where sequences of these lengths and surplus ones start, and the position of each token in its
    sequence. Returns which sequences have tokens."""
    surplus, spare = len(place) - int(lengths.sum()), layout.sequences - len(lengths)
    fits = 0 <= surplus <= spare * layout.longest and lengths.max(initial=0) <= layout.longest
    if spare < 0 or not fits:
        raise ValueError(f"{len(lengths)} sequences with {int(lengths.sum())} tokens do not fit {layout}")
    shares = (surplus + np.arange(spare)[::-1]) // max(spare, 1)
    counts = np.concatenate([lengths, shares])
    starts[1:] = np.cumsum(counts)
    place[:] = np.arange(len(place)) - np.repeat(starts[:-1], counts)
    return counts > 0
