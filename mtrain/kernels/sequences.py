"""Which sequence each of P tokens belongs to.

The model works on tokens (P, E), one after another. It passes an object of this module on to the few
operations that depend on sequences: attention, positions, word dropout, the mean of a sentence.

Symbols in shapes: N sequences, P tokens, T the padded length of a sequence (P = N * T).
"""

from typing import NamedTuple, Self

import torch
from torch import Tensor


class Padded(NamedTuple):
    """Sequences that are padded on the right to the same length, one sequence after another."""

    rows: int  # N
    length: int  # T
    keep: Tensor | None = None  # (N, T), True at real tokens; None if no mask is needed

    @classmethod
    def of(cls, x: Tensor, keep: Tensor | None = None) -> Self:
        """The sequences of ids x (N, T), or of states (N, T, E), and their mask (N, T)."""
        return cls(x.size(0), x.size(1), keep)

    def by_row(self, x: Tensor) -> Tensor:
        """x (P, ..) as (N, T, ..)."""
        return x.view(self.rows, self.length, *x.shape[1:])

    def positions(self, device: torch.device) -> Tensor:
        """The position (T) of each token in its sequence, the same in each row."""
        return torch.arange(self.length, device=device)

    def add(self, x: Tensor, table: Tensor) -> Tensor:
        """x (P, E) plus, for each token, the entry of its position in a table (T, E), or (N, T, E) with a
        table for each row."""
        return (self.by_row(x) + table).flatten(0, 1)

    def first_occurrences(self, ids: Tensor) -> Tensor:
        """For each of the ids (P), the index (P) of the first token with the same id in its sequence."""
        by_row = self.by_row(ids)
        same = by_row[:, :, None] == by_row[:, None, :]  # (N, T, T)
        starts = self.length * torch.arange(self.rows, device=ids.device)
        return (same.int().argmax(dim=-1) + starts[:, None]).flatten()

    def mean(self, x: Tensor) -> Tensor:
        """The mean (N, E) of the tokens x (P, E) of each sequence. The mask leaves out padding."""
        assert self.keep is not None
        keep = self.keep[..., None]
        return (self.by_row(x) * keep).sum(dim=1) / keep.sum(dim=1)


class Packed(NamedTuple):
    """Sequences one after another, without padding. If shapes are fixed, the last sequences may be empty."""

    starts: Tensor  # (N + 1) int32: the first token of each sequence, and the end of the last one
    place: Tensor  # (P) int32: the position of each token in its sequence
    longest: int  # no sequence has more tokens
