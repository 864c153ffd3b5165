"""Which pairs train together: a pure function of lengths, budget, seed, epoch and rank.

An optimizer step takes pairs of like length, so that little of it is padding. Its pairs do not depend on the
hardware: a step is cut into as many equal passes as the devices and their memory ask for, so a recipe gives
the same gradients on one device or eight.
"""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]


class BatchPlan(NamedTuple):
    """One epoch. `steps[i][j]` are the rows of this rank's pass j in optimizer step i; every rank has the
    same number of steps and passes. `step_tokens[i]` are its target tokens (non-pad) over all ranks."""

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
    pass_tokens: int,
    seed: int,
    epoch: int,
    rank: int = 0,
    world: int = 1,
    weights: npt.NDArray[np.floating] | None = None,
) -> BatchPlan:
    """Plan an epoch: each row once (or as often as its weight says), in steps of at most `batch_tokens`
    padded tokens on either side and passes of at most `pass_tokens`, in an order shuffled by (seed, epoch).

    A row longer than `pass_tokens` is the caller's error. O(rows log rows).
    """
    generator = np.random.default_rng([seed, epoch])
    rows = np.arange(len(source_lengths))
    if weights is not None:
        times = np.floor(weights + generator.random(len(rows))).astype(np.int64)
        rows = np.repeat(rows, times)
    generator.shuffle(rows)  # so that pairs of equal lengths meet others in each epoch
    sources, targets = source_lengths[rows].astype(np.int64), target_lengths[rows].astype(np.int64)
    order = np.lexsort((sources, targets))
    rows, sources, targets = rows[order], sources[order], targets[order]

    starts = cut_by_budget(sources, targets, batch_tokens)
    steps, step_tokens, padded_tokens = [], [], 0
    for step in generator.permutation(len(starts) - 1):
        span = slice(starts[step], starts[step + 1])
        passes = _split(sources[span], targets[span], pass_tokens, world)
        steps.append([rows[span][part] for part in passes[rank::world]])
        step_tokens.append(int(targets[span].sum()))
        padded_tokens += sum(
            len(targets[span][part]) * int(targets[span][part].max(initial=0)) for part in passes
        )
    return BatchPlan(steps, step_tokens, padded_tokens)


def cut_by_budget(sources: Rows, targets: Rows, budget: int) -> list[int]:
    """Boundaries of the longest runs of at most `budget` padded tokens; `targets` ascends."""
    starts = [0]
    while starts[-1] < len(targets):
        start = starts[-1]
        most = max(1, budget // int(targets[start]))
        longest = np.maximum(
            np.maximum.accumulate(sources[start : start + most]), targets[start : start + most]
        )
        padded = longest * np.arange(1, len(longest) + 1)  # ascends, since `longest` does
        starts.append(start + max(1, int(np.searchsorted(padded, budget, side="right"))))
    return starts


def _split(sources: Rows, targets: Rows, budget: int, world: int) -> list[slice]:
    """Cut a step into a multiple of `world` slices of nearly equal size, none over the budget."""
    longest_sides = np.maximum(sources, targets)
    assert longest_sides.max() <= budget, "the config lets no sentence be longer than a pass"
    needed = -(-int(longest_sides.sum()) // budget)  # with no padding at all
    parts = -(-needed // world) * world
    while True:
        edges = np.linspace(0, len(targets), parts + 1).round().astype(int)
        slices = [slice(a, b) for a, b in pairwise(edges)]
        longest = (
            max(sources[s].max(initial=0), targets[s].max(initial=0)) * (s.stop - s.start) for s in slices
        )
        if all(size <= budget for size in longest):
            return slices
        parts += world
