"""Padded sequences: positions, repeated words and means, against loops over sentences."""

import torch

from mtrain.kernels.sequences import Padded

KEEP = torch.tensor([[True, True, True, True], [True, True, False, False], [True, False, False, False]])
IDS = torch.tensor([[5, 7, 5, 5], [7, 7, 0, 0], [5, 0, 0, 7]])


def test_tokens_are_the_rows_one_after_another() -> None:
    sequences, x = Padded.of(IDS, KEEP), torch.randn(3, 4, 2)
    assert (sequences.rows, sequences.length) == (3, 4)
    assert torch.equal(sequences.by_row(x.flatten(0, 1)), x)


def test_positions_are_added_to_the_tokens_of_each_row() -> None:
    x, shared, of_rows = torch.randn(3, 4, 2), torch.randn(4, 2), torch.randn(3, 4, 2)
    sequences, tokens = Padded.of(IDS), x.flatten(0, 1)
    assert sequences.positions(x.device).tolist() == [0, 1, 2, 3]
    assert torch.equal(sequences.add(tokens, shared), torch.cat([row + shared for row in x]))
    assert torch.equal(sequences.add(tokens, of_rows), (x + of_rows).flatten(0, 1))


def test_the_first_occurrence_of_a_word_is_in_the_same_row() -> None:
    first = Padded.of(IDS).first_occurrences(IDS.flatten())
    expected = [4 * row + words.index(word) for row, words in enumerate(IDS.tolist()) for word in words]
    assert first.tolist() == expected


def test_the_mean_leaves_out_padding() -> None:
    x = torch.randn(3, 4, 2)
    mean = Padded.of(IDS, KEEP).mean(x.flatten(0, 1))
    expected = torch.stack([row[keep].mean(dim=0) for row, keep in zip(x, KEEP, strict=True)])
    torch.testing.assert_close(mean, expected)
