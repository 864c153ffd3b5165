"""The tensors of one micro-batch."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

from mtrain.kernels.cross_entropy import IGNORE
from mtrain.tokenizer.rows import Rows, pad


@dataclass(frozen=True)
class Batch:
    """B sentence pairs, padded on the right. Shapes: see `mtrain.model`."""

    source: Tensor  # (B, S) int64, each row ends in EOS
    source_keep: Tensor  # (B, S) bool, True where there is a token
    target_in: Tensor  # (B, T) int64, BOS and the target without its last token
    labels: Tensor  # (B, T) int64, the target with EOS; padding is IGNORE
    target_tokens: int  # labels that are not padding
    rows: list[int]  # row numbers of the pairs in the encoded corpus

    @classmethod
    def of_size(cls, pairs: int, length: int) -> Self:
        """A batch of pairs of `length` tokens on both sides, to measure memory."""
        ids = torch.zeros(pairs, length, dtype=torch.int64)
        return cls(ids, torch.ones_like(ids, dtype=torch.bool), ids, ids, ids.numel(), [0] * pairs)

    @classmethod
    def without_pairs(cls) -> Self:
        """A batch whose loss and gradient are zero: all of its few positions are padding."""
        batch = cls.of_size(2, 2)
        return replace(batch, labels=torch.full_like(batch.labels, IGNORE), target_tokens=0, rows=[])

    @property
    def positions(self) -> int:
        """Tokens of both sides, including padding."""
        return self.source.numel() + self.labels.numel()

    def split(self, max_positions: float) -> list[Self]:
        """Split in half recursively, until each part has at most `max_positions` positions or one pair."""
        middle = len(self.rows) // 2
        if self.positions <= max_positions or not middle:
            return [self]
        halves = self._part(slice(None, middle)), self._part(slice(middle, None))
        return [part for half in halves for part in half.split(max_positions)]

    def _part(self, part: slice) -> Self:
        batch = self._with(lambda tensor: tensor[part])
        return replace(batch, target_tokens=int((batch.labels != IGNORE).sum()), rows=self.rows[part])

    def to(self, device: torch.device) -> Self:
        """The same batch on a device. Copying a pinned batch to a CUDA device does not block the host."""
        return self._with(lambda tensor: tensor.to(device, non_blocking=device.type == "cuda"))

    def pinned(self) -> Self:
        """The same batch in pinned memory."""
        return self._with(Tensor.pin_memory)

    def _with(self, change: Callable[[Tensor], Tensor]) -> Self:
        return replace(
            self,
            source=change(self.source),
            source_keep=change(self.source_keep),
            target_in=change(self.target_in),
            labels=change(self.labels),
        )


def collate(source: Rows, target: Rows, pad_id: int, bos_id: int, rows: list[int]) -> Batch:
    """Pad encoded pairs into a Batch. Each side ends in EOS."""
    source_ids, source_keep = pad(source, pad_id)
    labels, target_keep = pad(target, IGNORE)
    target_in = np.full_like(labels, bos_id)
    # Masked by position, not by id: BOS or a real token may have the padding id.
    target_in[:, 1:] = np.where(target_keep[:, 1:], labels[:, :-1], pad_id)
    return Batch(
        source=torch.from_numpy(source_ids),
        source_keep=torch.from_numpy(source_keep),
        target_in=torch.from_numpy(target_in),
        labels=torch.from_numpy(labels),
        target_tokens=int(target_keep.sum()),
        rows=rows,
    )
