"""The token streams that mtrain trains on, in the same batches.

For each side, the file of streams holds the concatenated ids (`source_ids`, `target_ids`) and the length of
each sentence; every sentence ends in EOS, which its length includes. `rows` are the pairs of one epoch in the
order of training, split into micro-batches of `micro_batch_sizes` pairs; `step_micro_batches` holds how many
micro-batches each step has.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

IGNORE = -100  # label of padding

Ids = npt.NDArray[np.int64]


class PeerBatch(NamedTuple):
    """B pairs, padded on the right; shapes as in mtrain.data.epochs.batching."""

    source: Tensor  # (B, S) int64
    source_keep: Tensor  # (B, S) bool, True at tokens
    target_in: Tensor  # (B, T) int64, BOS and the target without its EOS
    target_keep: Tensor  # (B, T) bool
    labels: Tensor  # (B, T) int64, IGNORE at padding

    def to(self, device: torch.device) -> "PeerBatch":
        """The same batch on a device."""
        return PeerBatch(*(tensor.to(device, non_blocking=True) for tensor in self))


class Side:
    """The sentences of one language."""

    def __init__(self, ids: npt.NDArray[np.int32], lengths: npt.NDArray[np.int32]):
        self.ids, self.lengths = ids, lengths
        self.starts = np.cumsum(lengths, dtype=np.int64) - lengths

    def __getitem__(self, row: int) -> npt.NDArray[np.int32]:
        return self.ids[self.starts[row] : self.starts[row] + self.lengths[row]]

    def padded(self, rows: Ids, fill: int) -> tuple[Ids, npt.NDArray[np.bool_]]:
        """Sentences as a matrix padded with `fill`, and the mask that is True at tokens."""
        lengths = self.lengths[rows]
        keep = np.arange(lengths.max()) < lengths[:, None]
        matrix = np.full(keep.shape, fill, np.int64)
        matrix[keep] = np.concatenate([self[row] for row in rows])
        return matrix, keep


class Streams:
    """Both sides of the corpus, and the plan of an epoch."""

    def __init__(self, file: str, model: dict[str, Any]):
        data = np.load(file)
        self.source = Side(data["source_ids"], data["source_lengths"])
        self.target = Side(data["target_ids"], data["target_lengths"])
        self.rows: Ids = data["rows"]
        self.micro_batches = np.split(self.rows, np.cumsum(data["micro_batch_sizes"])[:-1])
        self._step_ends = np.cumsum(data["step_micro_batches"]).tolist()
        self._pad, self._bos = model["pad_id"], model["bos_id"]

    def steps(self) -> Iterator[list[PeerBatch]]:
        """The micro-batches of each step, epoch after epoch, without end."""
        while True:
            start = 0
            for end in self._step_ends:
                yield [self.batch(rows) for rows in self.micro_batches[start:end]]
                start = end

    def batch(self, rows: Ids) -> PeerBatch:
        """The tensors of the given pairs."""
        source, source_keep = self.source.padded(rows, self._pad)
        labels, target_keep = self.target.padded(rows, IGNORE)
        before = np.where(target_keep, labels, self._pad)[:, :-1]
        target_in = np.concatenate([np.full((len(rows), 1), self._bos), before], axis=1)
        return PeerBatch(*map(torch.from_numpy, (source, source_keep, target_in, target_keep, labels)))
