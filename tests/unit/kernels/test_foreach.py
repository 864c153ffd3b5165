"""Many tensors are changed at a time, with and without the operations of PyTorch for it."""

from contextlib import nullcontext

import pytest
import torch

from mtrain.kernels.foreach import add_all, scale_all
from tests.support.undocumented import documented_only


@pytest.mark.parametrize("context", [nullcontext, documented_only])
def test_many_tensors_are_changed_in_place(context):
    tensors = [torch.ones(3), torch.full((2, 2), 2.0)]
    with context():
        scale_all(tensors, torch.tensor(0.5))
        assert tensors[0].tolist() == [0.5] * 3 and tensors[1].tolist() == [[1.0, 1.0]] * 2
        add_all(tensors, [torch.full((3,), 2.0), torch.full((2, 2), 3.0)])
        scale_all([], torch.tensor(0.5))
        add_all([], [])
    assert tensors[0].tolist() == [2.5] * 3 and tensors[1].tolist() == [[4.0, 4.0]] * 2
