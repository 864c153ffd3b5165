"""Fixed shapes fit the micro-batches that they are made for."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrain.data.epochs.packed_batch import PackedBatch, pack
from mtrain.tokenizer.rows import Rows
from mtrain.training.step.fixed_shapes import FixedShapes

POSITIONS = 150
lengths = st.integers(1, POSITIONS)
batches = st.lists(st.lists(st.tuples(lengths, lengths), max_size=8), min_size=1, max_size=6)


def batch_of(pairs) -> PackedBatch:
    """A batch of pairs of these lengths."""
    sides = [Rows(np.ones(side.sum(), np.int32), side) for side in np.array(pairs, np.int32).reshape(-1, 2).T]
    return pack(*sides, 2, list(range(len(pairs))))


@settings(max_examples=30, deadline=None)
@given(batches, batches)
def test_batches_fit_the_shapes_that_include_them(first, later):
    shapes = FixedShapes(POSITIONS)
    for group in (first, later):
        packed = [batch_of(pairs) for pairs in group if pairs]
        smaller, shapes = shapes, shapes.including(batch.layout for batch in packed)
        assert shapes.including(batch.layout for batch in packed) == shapes
        for batch in packed:
            exact = batch.exact_layout()
            assert exact == batch.layout
            layout = shapes.fit(exact)
            assert layout is not None and layout.longest <= POSITIONS
            fitted = batch.in_layout(layout)
            assert fitted.exact_layout() == exact and fitted.target_tokens == batch.target_tokens
            if smaller.fit(exact) is None:
                assert smaller != shapes


def test_batches_of_a_class_have_one_layout():
    short, long = [(30, 20)] * 4, [(3, 100)]
    layouts = [batch_of(pairs).layout for pairs in ([(5, 9)], short, long)]
    shapes = FixedShapes(POSITIONS).including(layouts)
    fitted = [shapes.fit(layout) for layout in layouts]
    assert fitted[0] == fitted[1] and fitted[1]._replace(sequences=32, longest=128) == fitted[2]
    assert shapes.source == 128 and shapes.target == 128  # multiples of 64
    assert shapes.fit(batch_of([(30, 20)] * 5).layout) is None  # too many tokens, and pairs
    assert shapes.fit(batch_of([(3, 101)]).layout) is None  # a longer sentence
    assert shapes.fit(batch_of([(1, 1)]).layout) == fitted[0]
