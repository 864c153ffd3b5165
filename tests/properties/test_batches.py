"""Batches: every pair once, within the budget, and the same number on every rank."""

from tests.support.batches import budgets, lengths, plan_all, rows_of_steps, world_sizes

DRAWN = {"pairs": lengths, "batch_tokens": budgets, "micro_batch_tokens": budgets, "world_size": world_sizes}


def test_every_row_comes_once_at_any_world_size(tried):
    @tried(60, **DRAWN)
    def check(pairs, batch_tokens, micro_batch_tokens, world_size):
        plans, _, _ = plan_all(pairs, batch_tokens, micro_batch_tokens, world_size)
        assert sorted(row for step in rows_of_steps(plans) for row in step) == list(range(len(pairs)))


def test_ranks_agree_on_steps_and_micro_batches(tried):
    @tried(60, **DRAWN)
    def check(pairs, batch_tokens, micro_batch_tokens, world_size):
        plans, _, _ = plan_all(pairs, batch_tokens, micro_batch_tokens, world_size)
        assert len({tuple(map(len, plan.steps)) for plan in plans}) == 1
        assert all(plan.step_tokens == plans[0].step_tokens for plan in plans)
        assert len({plan.padded_tokens for plan in plans}) == 1


def test_budgets_hold_on_both_sides(tried):
    @tried(60, **DRAWN)
    def check(pairs, batch_tokens, micro_batch_tokens, world_size):
        plans, source, target = plan_all(pairs, batch_tokens, micro_batch_tokens, world_size)
        for side in (source, target):
            for rows in rows_of_steps(plans):
                assert len(rows) * side[rows].max() <= batch_tokens
            for plan in plans:
                for part in (part for step in plan.steps for part in step if len(part)):
                    assert len(part) * side[part].max() <= min(batch_tokens, micro_batch_tokens)
