"""Padded and packed sequences: positions, repeated words and means, against loops over sentences."""

import pytest
import torch
from torch import Tensor

from mtrain.kernels.sequences import Packed, Padded, Sequences

KEEP = torch.tensor([[True, True, True, True], [True, True, False, False], [True, False, False, False]])
IDS = torch.tensor([[5, 7, 5, 5], [7, 7, 0, 0], [5, 0, 0, 7]])
# The same sequences without padding, with empty ones between them and at the end.
LENGTHS = [4, 0, 2, 1, 0, 0]
STARTS = torch.tensor([0, 4, 4, 6, 7, 7, 7], dtype=torch.int32)
PACKED = Packed(STARTS, torch.tensor([0, 1, 2, 3, 0, 1, 0], dtype=torch.int32), 5)

KINDS = [
    pytest.param(Padded.of(IDS), IDS.flatten(), [4, 4, 4], id="padded"),
    pytest.param(PACKED, IDS[KEEP], LENGTHS, id="packed"),
    pytest.param(Padded.of(IDS).twice(), IDS.repeat(2, 1).flatten(), [4, 4, 4] * 2, id="padded twice"),
    pytest.param(PACKED.twice(), IDS[KEEP].repeat(2), LENGTHS * 2, id="packed twice"),
]


def split(x: Tensor, lengths: list[int]) -> list[list[float]]:
    return [part.tolist() for part in x.split(lengths)]


def test_tokens_of_padded_sequences_are_the_rows_one_after_another() -> None:
    sequences, x = Padded.of(IDS, KEEP), torch.randn(3, 4, 2)
    assert (sequences.rows, sequences.longest) == (3, 4)
    assert torch.equal(sequences.by_row(x.flatten(0, 1)), x)


@pytest.mark.parametrize(("sequences", "ids", "lengths"), KINDS)
def test_positions_are_added_to_the_tokens_of_each_sequence(
    sequences: Sequences, ids: Tensor, lengths: list[int]
) -> None:
    x, table = torch.randn(len(ids), 2), torch.randn(sequences.longest, 2)
    expected = torch.cat([part + table[: len(part)] for part in x.split(lengths)])
    assert torch.equal(sequences.add(x, table), expected)
    own = torch.randn(len(ids), 2)
    assert torch.equal(sequences.add(x, sequences.by_row(own)), x + own)
    places = [place for length in lengths for place in range(length)]
    rows = sequences.by_row(ids)
    assert sequences.positions(ids.device).expand_as(rows).flatten().tolist() == places


@pytest.mark.parametrize(("sequences", "ids", "lengths"), KINDS)
def test_the_first_occurrence_of_a_word_is_in_the_same_sequence(
    sequences: Sequences, ids: Tensor, lengths: list[int]
) -> None:
    expected, start = [], 0
    for words in split(ids, lengths):
        expected += [start + words.index(word) for word in words]
        start += len(words)
    assert sequences.first_occurrences(ids).tolist() == expected


@pytest.mark.parametrize(("sequences", "ids", "lengths"), KINDS)
def test_sums_and_first_numbers_are_those_of_each_sequence(
    sequences: Sequences, ids: Tensor, lengths: list[int]
) -> None:
    of_each = split(ids, lengths)
    expected = [sum(numbers[:i]) for numbers in of_each for i in range(len(numbers))]
    assert sequences.sum_before(ids).tolist() == expected
    assert sequences.first(ids, -1).tolist() == [numbers[0] if numbers else -1 for numbers in of_each]


def test_the_mean_leaves_out_padding() -> None:
    x = torch.randn(3, 4, 2)
    expected = torch.stack([row[keep].mean(dim=0) for row, keep in zip(x, KEEP, strict=True)])
    for padded in (Padded.of(IDS, KEEP), Padded.of(IDS, KEEP).twice()):
        mean = padded.mean(x.flatten(0, 1).repeat(padded.rows // 3, 1))
        torch.testing.assert_close(mean, expected.repeat(padded.rows // 3, 1))
    mean = PACKED.mean(x[KEEP])
    torch.testing.assert_close(mean[[0, 2, 3]], expected)
    assert not mean[[1, 4, 5]].any()


def test_packed_sequences_can_be_padded() -> None:
    x = torch.randn(3, 4, 2)
    rows = PACKED.pad(x[KEEP])
    assert rows.shape == (6, 5, 2)
    assert torch.equal(rows[[0, 2, 3], :4], x * KEEP[..., None]) and not rows[:, 4].any()
    assert torch.equal(rows.flatten(0, 1)[PACKED.slots], x[KEEP])
