"""Batch plans for any number of ranks."""

import numpy as np
from hypothesis import strategies as st

from mtrain.data.epochs.batching import BatchPlan, Division, plan_batches

LONGEST = 40
lengths = st.lists(st.tuples(st.integers(2, LONGEST), st.integers(2, LONGEST)), min_size=1, max_size=120)
budgets = st.integers(LONGEST, 600)
world_sizes = st.integers(1, 5)


def plan_all(
    pairs, batch_tokens: int, micro_batch_tokens: int, world_size: int = 1, seed=1, epoch=1, weights=None
):
    """The plans of all ranks, and the source and target lengths."""
    source, target = np.array(pairs, np.int32).T
    budget = min(batch_tokens, micro_batch_tokens)
    plans = [
        plan_batches((source, target), batch_tokens, division, (seed, epoch), weights)
        for division in (Division(budget, rank=rank, world_size=world_size) for rank in range(world_size))
    ]
    return plans, source, target


def rows_of_steps(plans: list[BatchPlan]) -> list[list[int]]:
    """The rows of each step over all ranks, sorted."""
    return [
        sorted(int(row) for plan in plans for part in plan.steps[i] for row in part)
        for i in range(len(plans[0].steps))
    ]
