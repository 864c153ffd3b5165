"""Which sequence each of P tokens belongs to.

The model works on tokens (P, E), one after another. It passes an object of this module on to the few
operations that depend on sequences: attention, positions, word dropout, the mean of a sentence. Sequences are
`Packed` on a CUDA device in training, in losses of validation and in the encoder that decoding uses, and
`Padded` otherwise. Both have the methods that the model calls, so that it does not know which one it gets;
only attention does.

Symbols in shapes: N sequences, P tokens, T the padded length of a sequence (P = N * T if padded).
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor


class Padded(NamedTuple):
    """Sequences that are padded on the right to the same length, one sequence after another."""

    rows: int  # N
    longest: int  # T: no sequence has more tokens
    keep: Tensor | None = None  # (N, T), True at real tokens; None if no mask is needed

    @classmethod
    def of(cls, x: Tensor, keep: Tensor | None = None) -> Self:
        """The sequences of ids x (N, T), or of states (N, T, E), and their mask (N, T)."""
        return cls(x.size(0), x.size(1), keep)

    def twice(self) -> Self:
        """All sequences, followed by the same sequences once more."""
        return type(self)(2 * self.rows, self.longest, None if self.keep is None else self.keep.repeat(2, 1))

    def by_row(self, x: Tensor) -> Tensor:
        """x (P, ..) as (N, T, ..)."""
        return x.view(self.rows, self.longest, *x.shape[1:])

    def pad(self, x: Tensor) -> Tensor:
        """x (P, ..) as (N, T, ..): it is padded already."""
        return self.by_row(x)

    def positions(self, device: torch.device) -> Tensor:
        """The position (T) of each token in its sequence, the same in each row."""
        return torch.arange(self.longest, device=device)

    def add(self, x: Tensor, table: Tensor) -> Tensor:
        """x (P, E) plus, for each token, the entry of its position in a table (T, E), or its own entry in a
        table (N, T, E)."""
        return (self.by_row(x) + table).flatten(0, 1)

    def first_occurrences(self, ids: Tensor) -> Tensor:
        """For each of the ids (P), the index (P) of the first token with the same id in its sequence."""
        by_row = self.by_row(ids)
        same = by_row[:, :, None] == by_row[:, None, :]  # (N, T, T)
        starts = self.longest * torch.arange(self.rows, device=ids.device)
        return (same.int().argmax(dim=-1) + starts[:, None]).flatten()

    def sum_before(self, x: Tensor) -> Tensor:
        """For each of the numbers x (P), the sum of the earlier numbers in its sequence."""
        by_row = self.by_row(x)
        return (by_row.cumsum(dim=1) - by_row).flatten()

    def first(self, x: Tensor, empty: int) -> Tensor:
        """The first (N) of the numbers x (P) in each sequence; `empty` for a sequence without any."""
        return self.by_row(x)[:, 0]

    def mean(self, x: Tensor) -> Tensor:
        """The mean (N, E) of the tokens x (P, E) of each sequence. The mask leaves out padding."""
        assert self.keep is not None
        keep = self.keep[..., None]
        return (self.by_row(x) * keep).sum(dim=1) / keep.sum(dim=1)


@dataclass
class Packed:
    """Sequences one after another, without padding. If shapes are fixed, the last sequences may be empty.

    No method makes the host wait for the device, and shapes of results depend on shapes only.
    """

    starts: Tensor  # (N + 1) int32: the first token of each sequence, and the end of the last one, P
    place: Tensor  # (P) int32: the position of each token in its sequence
    longest: int  # no sequence has more tokens

    def twice(self) -> Self:
        """All sequences, followed by the same sequences once more."""
        starts = torch.cat([self.starts, self.starts[1:] + len(self.place)])
        return type(self)(starts, self.place.repeat(2), self.longest)

    def by_row(self, x: Tensor) -> Tensor:
        """x (P, ..) as one row (1, P, ..), for operations on all tokens and `positions`."""
        return x[None]

    def positions(self, device: torch.device) -> Tensor:
        """The position (P) of each token in its sequence."""
        return self.place

    def add(self, x: Tensor, table: Tensor) -> Tensor:
        """x (P, E) plus, for each token, the entry of its position in a table (T, E), or its own entry in a
        table (1, P, E)."""
        return x + (F.embedding(self.place, table) if table.dim() == 2 else table[0])

    @property
    def lengths(self) -> Tensor:
        """The number of tokens (N) of each sequence."""
        return self.starts.diff()

    def sequence(self) -> Tensor:
        """The sequence (P) int64 of each token, from 0."""
        tokens = torch.arange(len(self.place), dtype=torch.int32, device=self.place.device)
        return torch.searchsorted(self.starts, tokens, right=True) - 1

    def first_occurrences(self, ids: Tensor) -> Tensor:
        """For each of the ids (P), the index (P) of the first token with the same id in its sequence."""
        words = (self.sequence() << 32) + ids  # the same number for the same id in the same sequence
        ordered, tokens = words.sort(stable=True)
        return tokens[torch.searchsorted(ordered, words)]

    def sum_before(self, x: Tensor) -> Tensor:
        """For each of the numbers x (P), the sum of the earlier numbers in its sequence."""
        before = x.cumsum(0) - x
        firsts = torch.arange(len(x), device=x.device) - self.place
        return before - before[firsts]

    def first(self, x: Tensor, empty: int) -> Tensor:
        """The first (N) of the numbers x (P) in each sequence; `empty` for a sequence without any."""
        found = x[self.starts[:-1].clamp(max=len(x) - 1)]
        return found.where(self.lengths > 0, empty)

    def mean(self, x: Tensor) -> Tensor:
        """The mean (N, E) of the tokens x (P, E) of each sequence; 0 for one without tokens."""
        return self.pad(x).sum(dim=1) / self.lengths.clamp(min=1)[:, None]

    @cached_property
    def slots(self) -> Tensor:
        """Where (P) int64 each token is in N rows of `longest` tokens, which several attentions need."""
        return self.sequence() * self.longest + self.place

    def pad(self, x: Tensor) -> Tensor:
        """x (P, E) in rows (N, longest, E), padded with zeros."""
        count, width = len(self.starts) - 1, x.size(1)
        rows = x.new_zeros(count * self.longest, width).index_copy(0, self.slots, x)
        return rows.view(count, self.longest, width)

    def as_padded(self, masked: bool = False) -> Padded:
        """The sequences of padded rows, if `masked` with their mask. A sequence without tokens keeps one,
        which is zero: attention to none might be NaN."""
        places = torch.arange(self.longest, device=self.place.device)
        keep = places < self.lengths.clamp(min=1)[:, None] if masked else None
        return Padded(len(self.starts) - 1, self.longest, keep)


Sequences = Padded | Packed
