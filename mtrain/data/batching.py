"""Which pairs train together: a pure function of lengths, budget, seed, epoch and rank.

An optimizer step takes pairs of like length, so that little of it is padding. Its pairs do not depend on the
hardware: each step is split into equal micro-batches that fit the memory of the devices, so a recipe gives
the same gradients on one device or eight.
"""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]


class BatchPlan(NamedTuple):
    """One epoch. `steps[i][j]` are the rows of this rank's micro-batch j in optimizer step i; every rank
    has the same number of steps and micro-batches. `step_tokens[i]` are its target tokens over
    all ranks, without padding."""

    steps: list[list[Rows]]
    step_tokens: list[int]
    padded_tokens: int

    @property
    def padding(self) -> float:
        """Share of padding among target positions, over all ranks."""
        return 1 - sum(self.step_tokens) / self.padded_tokens if self.padded_tokens else 0.0


def plan_batches(
    source_lengths: npt.NDArray[np.integer],
    target_lengths: npt.NDArray[np.integer],
    batch_tokens: int,
    micro_batch_tokens: int,
    seed: int,
    epoch: int,
    rank: int = 0,
    world: int = 1,
    weights: npt.NDArray[np.floating] | None = None,
    workers: int = 1,
) -> BatchPlan:
    """Plan an epoch: each row once (or as often as its weight says), in steps of at most `batch_tokens`
    padded tokens on either side and micro-batches of at most `micro_batch_tokens`, in an order shuffled by
    (seed, epoch). In each step, every rank has the same number of micro-batches, a multiple of `workers`.

    A row longer than `micro_batch_tokens` is the caller's error. O(rows log rows).
    """
    generator = np.random.default_rng([seed, epoch])
    rows = np.arange(len(source_lengths))
    if weights is not None:
        rows = np.repeat(rows, np.floor(weights + generator.random(len(rows))).astype(np.int64))
    generator.shuffle(rows)  # so that pairs of equal lengths meet others in each epoch
    rows = rows[np.lexsort((source_lengths[rows], target_lengths[rows]))]
    targets = target_lengths[rows].astype(np.int64)
    longer = np.maximum(source_lengths[rows], targets)
    assert longer.max(initial=0) <= micro_batch_tokens, (
        "the config limits sentences to the size of a micro-batch"
    )

    edges = cut_by_budget(longer, batch_tokens)
    steps, step_tokens, padded_tokens = [], [], 0
    for step in generator.permutation(len(edges) - 1):
        start, stop = edges[step], edges[step + 1]
        runs = _split(longer[start:stop], micro_batch_tokens, world * workers)
        micro_batches = [slice(start + first, start + end) for first, end in runs]
        steps.append([rows[part] for part in micro_batches[rank::world]])
        step_tokens.append(int(targets[start:stop].sum()))
        padded_tokens += sum(len(rows[part]) * int(targets[part].max(initial=0)) for part in micro_batches)
    return BatchPlan(steps, step_tokens, padded_tokens)


def cut_by_budget(lengths: Rows, budget: int) -> list[int]:
    """Boundaries of the longest runs of at most `budget` padded tokens; `lengths` are of the longer sides."""
    edges = [0]
    while edges[-1] < len(lengths):
        start = edges[-1]
        longest = np.maximum.accumulate(lengths[start : start + max(1, budget // int(lengths[start]))])
        padded = longest * np.arange(1, len(longest) + 1)  # ascends, since `longest` does
        edges.append(start + max(1, int(np.searchsorted(padded, budget, side="right"))))
    return edges


def _split(lengths: Rows, budget: int, multiple: int) -> list[tuple[int, int]]:
    """Cut a step into a multiple of `multiple` runs of nearly equal size, none over the budget."""
    needed = -(-int(lengths.sum()) // budget)  # with no padding at all
    parts = -(-needed // multiple) * multiple
    while True:
        runs = list(pairwise(np.linspace(0, len(lengths), parts + 1).round().astype(int).tolist()))
        if all(lengths[start:stop].max(initial=0) * (stop - start) <= budget for start, stop in runs):
            return runs
        parts += multiple
