"""Fixed shapes fit the micro-batches that they are made for."""

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrain.data.epochs.packed_batch import Layout, PackedBatch, pack
from mtrain.tokenizer.rows import Rows
from mtrain.training.step.fixed_shapes import FixedShapes

POSITIONS = 150
lengths = st.integers(1, POSITIONS)
batches = st.lists(st.lists(st.tuples(lengths, lengths), max_size=8), min_size=1, max_size=6)


def batch_of(pairs) -> PackedBatch:
    """A batch of pairs of these lengths."""
    source, target = [
        Rows(np.ones(side.sum(), np.int32), side) for side in np.array(pairs, np.int32).reshape(-1, 2).T
    ]
    return pack(source, target, 2, list(range(len(pairs))))


@settings(max_examples=30, deadline=None)
@given(batches, batches)
def test_batches_fit_the_shapes_that_include_them(first, later):
    shapes = FixedShapes(POSITIONS)
    for group in (first, later):
        packed = [batch_of(pairs) for pairs in group if pairs]
        smaller, shapes = shapes, shapes.including(batch.layout for batch in packed)
        assert shapes.including(batch.layout for batch in packed) == shapes
        for batch in packed:
            exact = batch.exact
            assert exact == batch.layout
            layout = shapes.layout_for(exact)
            assert layout is not None and layout.longest <= POSITIONS
            fitted = batch.in_layout(layout)
            assert fitted.exact == exact and fitted.target_tokens == batch.target_tokens
            if smaller.layout_for(exact) is None:
                assert smaller != shapes


def test_a_batch_without_pairs_has_surplus_tokens():
    exact, none = PackedBatch.without_pairs().exact, FixedShapes(POSITIONS)
    layout = none.including([exact]).layout_for(exact)
    assert none.layout_for(exact) is None and layout is not None
    assert len(PackedBatch.without_pairs().in_layout(layout).labels) == layout.target == 64


def test_batches_of_a_class_have_one_layout():
    short, long = [(30, 20)] * 4, [(3, 100)]
    layouts = [batch_of(pairs).layout for pairs in ([(5, 9)], short, long)]
    shapes = FixedShapes(POSITIONS).including(layouts)
    fitted = [shapes.layout_for(layout) for layout in layouts]
    assert fitted[0] == fitted[1] == Layout(128, 128, 8 + 4, 32)
    assert fitted[2] == Layout(128, 128, 8 + 1, 128)
    assert shapes.layout_for(batch_of([(1, 1)]).layout) == fitted[0]
    assert shapes.layout_for(batch_of([(3, 128)]).layout) == fitted[2]
    assert shapes.layout_for(batch_of([(30, 20)] * 5).layout) is None  # too many tokens
    assert shapes.layout_for(batch_of([(2, 2)] * 9).layout) is None  # too many pairs
    assert shapes.layout_for(batch_of([(50, 50)]).layout) is None  # another class


def test_the_bound_of_long_sentences_depends_on_those_that_are_known():
    known, longer = (batch_of([(20, length)] * 3).layout for length in (140, 200))
    shapes = FixedShapes(1024).including([known])
    layout = shapes.layout_for(known)
    assert layout is not None and 140 <= layout.longest < 200 and shapes.layout_for(longer) is None
    larger = shapes.including([longer])
    layout = larger.layout_for(longer)
    assert layout is not None and 200 <= layout.longest < 300 and larger.layout_for(known) == layout


def test_shapes_in_a_checkpoint():
    shapes = FixedShapes(POSITIONS).including([batch_of([(3, 100)]).layout])
    assert FixedShapes(POSITIONS).restored(shapes.to_list()) == shapes
    for others in ([], [1, 2, 3]):
        assert shapes.restored(others) == shapes


def test_shapes_within_a_limit_keep_the_proportion_of_both_sides():
    shapes = FixedShapes(POSITIONS).including([batch_of([(30, 20)] * 64).layout])
    assert (shapes.source, shapes.target, shapes.tokens) == (1920, 1280, 3200)
    assert shapes.within(3200) == shapes.within(math.inf) == shapes
    half = shapes.within(1600)
    assert half == shapes._replace(source=960, target=640)
    assert half.within(100).tokens == 128  # no side has fewer than 64
