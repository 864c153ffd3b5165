"""Batches of sentences of similar length, as padded matrices."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from mtrain.data.epochs.batching import MAX_ROWS, cut_by_budget
from mtrain.model.incremental import DecodingTransformer
from mtrain.model.transformer import Transformer
from mtrain.tokenizer.rows import Rows, pad


def in_batches(lengths: Sequence[int], budget: int, hypotheses: int = 1) -> Iterator[list[int]]:
    """Yield batches of indices of rows of similar length, within a budget of padded tokens, longest first.
    Each row has `hypotheses` hypotheses; a batch has at most MAX_ROWS of them."""
    array = np.array(lengths, dtype=np.int64)
    order = np.argsort(array, kind="stable")
    edges = cut_by_budget(array[order], budget, max(1, MAX_ROWS // hypotheses))
    for start, end in reversed(list(pairwise(edges))):
        yield order[start:end].tolist()


def padded(
    rows: Sequence[Sequence[int]], fill: int, device: torch.device, multiple: int = 1, most: int | None = None
) -> tuple[Tensor, Tensor]:
    """Rows of ids as a padded matrix on the device, and a mask that is True at tokens. The width is the
    length of the longest row, rounded up to a multiple of `multiple`, but to no more than `most`."""
    longest = max(map(len, rows))
    width = longest + -longest % multiple
    if most is not None:
        width = min(width, most)
    matrix, keep = pad(Rows.from_lists(rows), fill, width)
    return torch.from_numpy(matrix).to(device), torch.from_numpy(keep).to(device)


def position_limit(models: Sequence[Transformer | DecodingTransformer]) -> int | None:
    """The number of positions for which all models have embeddings; None if no model has learned ones."""
    learned = (model.config.max_positions for model in models if model.config.positions == "learned")
    return min(learned, default=None)
