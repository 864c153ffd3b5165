"""Batch plans: little padding, one plan per seed and epoch, the same steps on any number of devices."""

from collections import Counter
from itertools import chain, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrain.data.epochs.batching import MAX_ROWS, BatchPlan, Division, collate, cut_by_budget, plan_batches
from mtrain.decoding.batches import in_batches
from mtrain.kernels.cross_entropy import IGNORE
from mtrain.tokenizer.rows import Rows
from tests.support.batches import budgets, lengths, plan_all, rows_of_steps, world_sizes

quick = settings(deadline=None, max_examples=60)


def flat(plan: BatchPlan) -> list[list[list[int]]]:
    return [[part.tolist() for part in step] for step in plan.steps]


@pytest.mark.parametrize("world_size", [1, 3])
def test_no_micro_batch_exceeds_its_budget(world_size: int):
    for micro_batch_tokens in range(40, 300):
        plans, source, _ = plan_all([(2, 2)] * 300, 600, micro_batch_tokens, world_size)
        longest = max(len(part) for plan in plans for step in plan.steps for part in step)
        assert longest * source[0] <= micro_batch_tokens


def test_no_micro_batch_has_more_rows_than_attention_kernels_of_gpus_take():
    pairs = np.full(100_000, 2)
    plan = plan_batches((pairs, pairs), 400_000, Division(400_000), (1, 0))
    assert [sum(map(len, step)) for step in plan.steps] == [100_000]
    assert max(len(part) for part in plan.steps[0]) <= MAX_ROWS // 2  # R-Drop computes each row twice
    for hypotheses in (1, 5):
        batches = list(in_batches(pairs.tolist(), 400_000, hypotheses))
        assert sorted(chain.from_iterable(batches)) == list(range(100_000))
        assert MAX_ROWS // 2 < max(map(len, batches)) * hypotheses <= MAX_ROWS


@quick
@given(lengths, budgets, budgets, world_sizes)
def test_tokens_and_padding_of_both_sides_are_counted(pairs, batch_tokens, micro_batch_tokens, world_size):
    plans, source, target = plan_all(pairs, batch_tokens, micro_batch_tokens, world_size)
    assert plans[0].step_tokens == [int(target[rows].sum()) for rows in rows_of_steps(plans)]
    parts = [part for plan in plans for step in plan.steps for part in step if len(part)]
    padded = [sum(len(part) * int(side[part].max()) for part in parts) for side in (source, target)]
    expected = (
        1 - source.sum() / padded[0],
        1 - target.sum() / padded[1],
        1 - (source.sum() + target.sum()) / sum(padded),
    )
    assert all(plan.padding == pytest.approx(expected) for plan in plans)


@quick
@given(lengths, budgets, budgets, budgets, world_sizes, st.integers(0, 2**63 - 1), st.integers(0, 1000))
def test_a_step_does_not_depend_on_the_hardware(pairs, batch_tokens, some, other, world_size, seed, epoch):
    one, _, _ = plan_all(pairs, batch_tokens, some, 1, seed, epoch)
    many, _, _ = plan_all(pairs, batch_tokens, other, world_size, seed, epoch)
    assert rows_of_steps(one) == rows_of_steps(many)


@quick
@given(lengths, budgets, st.integers(0, 2**63 - 1), st.integers(0, 1000))
def test_a_plan_depends_on_seed_and_epoch_only(pairs, batch_tokens, seed, epoch):
    np.random.seed(0)  # noqa: NPY002
    (first,), _, _ = plan_all(pairs, batch_tokens, batch_tokens, 1, seed, epoch)
    np.random.seed(1)  # noqa: NPY002
    (second,), _, _ = plan_all(pairs, batch_tokens, batch_tokens, 1, seed, epoch)
    assert flat(first) == flat(second)


@pytest.mark.parametrize(("seed", "epoch"), [(1, 2), (2, 1)])
def test_each_epoch_and_seed_groups_and_orders_the_pairs_differently(seed: int, epoch: int):
    pairs = [(5 + i % 20, 5 + i % 20) for i in range(400)]
    (first,), _, _ = plan_all(pairs, 200, 200, seed=1, epoch=1)
    (second,), _, _ = plan_all(pairs, 200, 200, seed=seed, epoch=epoch)
    assert first.step_tokens != second.step_tokens  # the order of lengths
    one, two = ({tuple(rows) for rows in rows_of_steps([plan])} for plan in (first, second))
    assert len(one & two) < len(one) / 2  # the pairs that share a step


def test_steps_are_not_sorted_by_length():
    (plan,), _, target = plan_all([(5 + i % 20, 5 + i % 20) for i in range(2000)], 200, 200)
    longest = [int(target[step[0]].max()) for step in plan.steps]
    assert longest not in (sorted(longest), sorted(longest, reverse=True))
    assert abs(np.corrcoef(longest, np.arange(len(longest)))[0, 1]) < 0.3


@quick
@given(lengths, st.integers(1, 4), world_sizes, st.integers(0, 50))
def test_integer_weights_are_exact(pairs, weight, world_size, epoch):
    plans, _, _ = plan_all(pairs, 200, 100, world_size, 1, epoch, weights=np.full(len(pairs), float(weight)))
    counts = Counter(row for step in rows_of_steps(plans) for row in step)
    assert counts == dict.fromkeys(range(len(pairs)), weight)


@quick
@given(lengths, st.data(), world_sizes, st.integers(0, 50))
def test_fractional_weights_are_within_one(pairs, data, world_size, epoch):
    weights = np.array([data.draw(st.floats(0.01, 5)) for _ in pairs])
    plans, _, target = plan_all(pairs, 200, 100, world_size, 1, epoch, weights=weights)
    counts = Counter(row for step in rows_of_steps(plans) for row in step)
    assert all(abs(counts[row] - weight) < 1 for row, weight in enumerate(weights))
    assert sum(plans[0].step_tokens) == sum(int(target[row]) * count for row, count in counts.items())


def test_fractional_weights_draw_different_pairs_in_each_epoch():
    weights = np.full(1000, 0.3)
    drawn = []
    for epoch in range(10):
        (plan,), _, _ = plan_all([(5, 5)] * 1000, 200, 200, epoch=epoch, weights=weights)
        drawn.append({row for rows in rows_of_steps([plan]) for row in rows})
    assert np.mean([len(rows) for rows in drawn]) == pytest.approx(300, rel=0.1)
    assert len(set.union(*drawn)) > 900  # nearly every pair is drawn in some epoch: 1 - 0.7 ** 10


@pytest.mark.parametrize("world_size", [1, 3])
def test_an_epoch_without_pairs_has_an_empty_plan(world_size: int):
    plans, _, _ = plan_all([(5, 5)] * 2, 200, 200, world_size, weights=np.full(2, 1e-9))
    assert all(plan.steps == [] and plan.step_tokens == [] for plan in plans)
    assert plans[0].padding == (0, 0, 0)


def padding_of(rows: np.ndarray, source: np.ndarray, target: np.ndarray) -> float:
    """The share of padding on both sides, if rows are batched in this order, 4,096 tokens at a time."""
    edges = cut_by_budget(np.maximum(source, target)[rows], 4096)
    padded = sum(
        (end - start) * (source[rows[start:end]].max() + target[rows[start:end]].max())
        for start, end in pairwise(edges)
    )
    return 1 - (source.sum() + target.sum()) / padded


@pytest.mark.parametrize("batch_tokens", [4096, 25_000])
def test_padding_is_low_on_realistic_lengths(batch_tokens: int):
    rng = np.random.default_rng(0)
    target = np.clip(rng.lognormal(3.1, 0.55, 30_000), 2, 256).astype(int)  # mean 26, as subwords of news
    source = np.clip(target * rng.lognormal(0, 0.2, len(target)), 2, 256).astype(int)
    pairs = list(zip(source, target, strict=True))
    (plan,), _, _ = plan_all(pairs, batch_tokens, 4096)
    assert 0 < plan.padding.both < 0.06 and max(plan.padding) < 0.06
    assert plan.padding.both < 0.75 * padding_of(np.lexsort((source, target)), source, target)
    used = sum(len(rows) * max(source[rows].max(), target[rows].max()) for rows in rows_of_steps([plan]))
    assert used / len(plan.steps) > 0.85 * batch_tokens


# ---------------------------------------------------------------------------------------------------- collate

PAD, BOS, EOS = 0, 2, 3
ids = st.lists(st.integers(0, 50), max_size=9).map(lambda row: [*row, EOS])


@quick
@given(st.lists(st.tuples(ids, ids), min_size=1, max_size=6), st.integers(0, 50), st.integers(0, 50))
def test_collate_keeps_every_row(pairs, pad_id, bos_id):
    sources, targets = map(list, zip(*pairs, strict=True))
    batch = collate(
        Rows.from_lists(sources), Rows.from_lists(targets), pad_id, bos_id, list(range(len(pairs)))
    )
    assert batch.source.shape == (len(pairs), max(map(len, sources)))
    assert batch.labels.shape == batch.target_in.shape == (len(pairs), max(map(len, targets)))
    assert batch.target_tokens == sum(map(len, targets))
    assert batch.rows == list(range(len(pairs)))
    for i, (source, target) in enumerate(pairs):
        s, t = len(source), len(target)
        assert batch.source[i].tolist() == source + [pad_id] * (batch.source.shape[1] - s)
        assert batch.source_keep[i].tolist() == [True] * s + [False] * (batch.source.shape[1] - s)
        assert batch.target_in[i, :t].tolist() == [bos_id, *target[:-1]]
        assert (batch.target_in[i, t:] == pad_id).all()
        assert batch.labels[i].tolist() == target + [IGNORE] * (batch.labels.shape[1] - t)


def test_collate_where_bos_and_a_real_token_equal_pad():
    batch = collate(
        Rows.from_lists([[0, 5, 3], [3]]),
        Rows.from_lists([[7, 0, 0, 3], [0, 3]]),
        pad_id=0,
        bos_id=0,
        rows=[8, 4],
    )
    assert batch.source_keep.tolist() == [[True, True, True], [True, False, False]]
    assert batch.target_in.tolist() == [[0, 7, 0, 0], [0, 0, 0, 0]]
    assert batch.labels.tolist() == [[7, 0, 0, 3], [0, 3, -100, -100]]
    assert batch.target_tokens == 6
    assert batch.rows == [8, 4]


def test_collate_types_and_device():
    batch = collate(Rows.from_lists([[5, 3]]), Rows.from_lists([[6, 3]]), PAD, BOS, [0])
    assert batch.source.dtype == batch.target_in.dtype == batch.labels.dtype == torch.int64
    assert batch.source_keep.dtype == torch.bool
    moved = batch.to(torch.device("cpu"))
    assert torch.equal(moved.labels, batch.labels)
    assert (moved.target_tokens, moved.rows) == (batch.target_tokens, batch.rows)


def test_a_rank_without_rows_has_an_empty_batch():
    batch = collate(Rows.from_lists([]), Rows.from_lists([]), PAD, BOS, [])
    assert batch.target_tokens == 0
    assert batch.source.shape[0] == batch.labels.shape[0] == 0
