"""Packed batches have the tokens of padded ones, in exact and in larger layouts."""

import numpy as np
import pytest
import torch

from mtrain.data.epochs.packed_batch import Layout, PackedBatch, pack, split_batches
from mtrain.kernels.cross_entropy import IGNORE
from mtrain.kernels.sequences import Packed
from mtrain.tokenizer.rows import Rows

BOS = 2
SOURCES, TARGETS = [[5, 6, 7, 3], [8, 3], [9, 9, 9, 9, 3]], [[4, 3], [2, 0, 4, 6, 7, 3], [3]]
SIDES = Rows.from_lists(SOURCES), Rows.from_lists(TARGETS)


def lists(x: torch.Tensor, sequences: Packed) -> list[list[int]]:
    """The sequences of numbers x, one list each."""
    return [part.tolist() for part in x.split(sequences.lengths.tolist())]


@pytest.mark.parametrize(
    "layout", [None, Layout(11, 9, 3, 6), Layout(20, 9, 5, 6), Layout(11, 40, 9, 8), Layout(12, 10, 30, 64)]
)
def test_it_has_the_tokens_of_the_pairs_and_ignores_others(layout):
    batch = pack(*SIDES, BOS, [7, 1, 4], layout)
    expected = layout or Layout(11, 9, 3, 6)
    assert batch.layout == expected and len(batch.buffer) == expected.buffer_size
    assert (batch.target_tokens, batch.rows) == (9, [7, 1, 4])
    assert batch.positions == expected.source + expected.target
    inputs, labels = batch.inputs(), batch.labels
    assert lists(inputs.source, inputs.sources)[:3] == SOURCES
    assert lists(labels, inputs.targets)[:3] == TARGETS
    assert lists(inputs.target_in, inputs.targets)[:3] == [[BOS, *ids[:-1]] for ids in TARGETS]
    assert len(inputs.source) == expected.source and len(labels) == expected.target
    assert (labels[9:] == IGNORE).all()
    for sequences, ids in ((inputs.sources, inputs.source), (inputs.targets, inputs.target_in)):
        assert len(sequences.lengths) == expected.sequences and sequences.starts[-1] == len(ids)
        assert sequences.lengths.max() <= sequences.longest == expected.longest
        places = [place for length in sequences.lengths.tolist() for place in range(length)]
        assert sequences.place.tolist() == places
    surplus = {*inputs.source[11:].tolist()} | {*inputs.target_in[9:].tolist()}
    assert surplus <= {0, 2, 3, 4, 5, 6, 7, 8, 9}  # ids of these vocabularies


@pytest.mark.parametrize(
    "layout",
    [
        Layout(10, 9, 4, 6),  # too few source tokens
        Layout(11, 8, 4, 6),  # too few target tokens
        Layout(11, 9, 2, 6),  # too few sequences
        Layout(11, 9, 3, 5),  # a sequence is longer
        Layout(12, 9, 3, 6),  # no sequence for the surplus token
        Layout(11, 16, 4, 6),  # it would be too long
    ],
)
def test_pairs_that_do_not_fit_a_layout_are_an_error(layout):
    with pytest.raises(ValueError, match="do not fit"):
        pack(*SIDES, BOS, [0, 1, 2], layout)


@pytest.mark.parametrize("layout", [None, Layout(20, 30, 9, 8)])
def test_parts_have_the_tokens_of_the_pairs(layout):
    batch = pack(*SIDES, BOS, [7, 1, 4], layout)
    parts = split_batches([batch], 0)
    assert [part.rows for part in parts] == [[7], [1], [4]]
    assert [part.target_tokens for part in parts] == [2, 6, 1]
    for row, part in enumerate(parts):
        source, target = (side.take([row]) for side in SIDES)
        alone = pack(source, target, BOS, [batch.rows[row]])
        assert part.layout == alone.layout and torch.equal(part.buffer, alone.buffer)
        assert split_batches([part], 0) == [part]
    assert split_batches([batch], batch.positions) == [batch]
    assert [part.rows for part in split_batches([pack(*SIDES, BOS, [7, 1, 4])], 14)] == [[7], [1, 4]]
    again = batch.in_layout(Layout(11, 9, 3, 6))
    assert torch.equal(again.buffer, pack(*SIDES, BOS, [7, 1, 4]).buffer)


@pytest.mark.parametrize("layout", [None, Layout(20, 30, 9, 8)])
def test_parts_have_as_many_pairs_as_fit(layout):
    batch = pack(*SIDES, BOS, [7, 1, 4], layout)  # of 4 and 2, 2 and 6, 5 and 1 tokens
    for sizes, expected in {
        (11, 9): [[7, 1, 4]],
        (10, 9): [[7, 1], [4]],
        (11, 8): [[7, 1], [4]],
        (7, 7): [[7], [1, 4]],
        (6, 8): [[7, 1], [4]],
        (1, 1): [[7], [1], [4]],
    }.items():
        parts = batch.divided(*sizes)
        assert [part.rows for part in parts] == expected
        assert all(part.layout == part.exact for part in parts)
        assert sum(part.target_tokens for part in parts) == 9
    empty = PackedBatch.without_pairs()
    assert empty.divided(1, 1) == [empty]


def test_moving_it_is_one_copy_of_int32_numbers():
    batch = pack(*SIDES, BOS, [7, 1, 4])
    assert batch.buffer.dtype == torch.int32
    assert sum(map(len, batch.parts)) == len(batch.buffer)
    moved = batch.to(torch.device("meta"))
    targets = moved.inputs().targets
    assert targets.starts.device.type == targets.place.device.type == "meta"
    assert moved.labels.dtype == torch.int64


def test_batches_to_measure_memory_and_without_pairs():
    batch = PackedBatch.of_size(3, 5)
    assert batch.layout == Layout(15, 15, 3, 5) and len(batch.rows) == 3
    assert batch.target_tokens == 15 == (batch.labels != IGNORE).sum()
    empty = PackedBatch.without_pairs()
    assert not empty.rows and not empty.target_tokens and (empty.labels == IGNORE).all()
    assert split_batches([empty], 0) == [empty]


def test_rows_of_any_integer_type_are_packed():
    source, target = (Rows(side.ids.astype(np.int64), side.lengths.astype(np.int64)) for side in SIDES)
    assert torch.equal(pack(source, target, BOS, [0]).buffer, pack(*SIDES, BOS, [0]).buffer)
