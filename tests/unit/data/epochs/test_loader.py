"""The kind of batch that the loader makes suits the device."""

import torch

from mtrain.data.epochs.batching import Batch, collate
from mtrain.data.epochs.loader import make_batch
from mtrain.data.epochs.packed_batch import Layout, batch_type
from mtrain.kernels.cross_entropy import IGNORE
from mtrain.tokenizer.rows import Rows

BOS, PAD = 2, 0
SIDES = (
    Rows.from_lists([[5, 6, 7, 3], [8, 3], [9, 9, 9, 9, 3]]),
    Rows.from_lists([[4, 3], [2, 0, 4, 6, 7, 3], [3]]),
)


def test_a_cuda_device_gets_packed_batches_of_the_same_pairs():
    arguments = *SIDES, PAD, BOS, [7, 1, 4]
    packed, padded = (make_batch(torch.device(device), *arguments) for device in ("cuda", "cpu"))
    assert isinstance(packed, batch_type(torch.device("cuda"))) and isinstance(padded, Batch)
    expected = collate(*arguments)
    keep = expected.labels != IGNORE
    assert torch.equal(padded.labels, expected.labels) and packed.rows == padded.rows
    assert torch.equal(packed.labels, expected.labels[keep])
    assert torch.equal(packed.inputs().target_in, expected.target_in[keep].int())
    assert torch.equal(packed.inputs().source, expected.source[expected.source_keep].int())


def test_a_batch_may_be_made_in_another_layout():
    gpu, larger = torch.device("cuda"), Layout(20, 19, 5, 8)
    fitted = make_batch(gpu, *SIDES, PAD, BOS, [0, 1, 2], lambda exact: larger)
    exact = make_batch(gpu, *SIDES, PAD, BOS, [0, 1, 2], lambda exact: None)
    assert fitted.layout == larger and exact.layout == Layout(11, 9, 3, 6)
    assert fitted.exact == exact.exact == exact.layout
    assert torch.equal(fitted.buffer, exact.in_layout(larger).buffer)
