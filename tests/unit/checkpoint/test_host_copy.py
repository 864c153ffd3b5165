"""What a checkpoint is written from while training continues."""

import torch

from mtrain.checkpoint.checkpoint import CheckpointTensors
from mtrain.checkpoint.host_copy import HostCopy


def test_a_copy_keeps_its_values_until_the_next_one():
    weight, moment = torch.randn(3, 4), torch.randn(3, 4)
    tensors = CheckpointTensors({"a": weight}, {"exp_avg.a": moment, "step.a": torch.tensor(7.0)}, {})
    expected, copy = weight.clone(), HostCopy()
    taken = copy.take(tensors)
    copy.wait()
    weight.zero_()
    assert [list(part) for part in taken] == [["a"], ["exp_avg.a", "step.a"], []]
    assert torch.equal(taken.weights["a"], expected) and torch.equal(taken.moments["exp_avg.a"], moment)
    assert taken.moments["step.a"] == 7 and taken.moments["step.a"].shape == ()
    again = copy.take(tensors)
    assert not again.weights["a"].any()
    assert again.weights["a"].data_ptr() == taken.weights["a"].data_ptr()  # its memory is reused


def test_averaged_weights_do_not_replace_the_weights_of_the_same_name():
    tensors = CheckpointTensors({"a": torch.ones(2)}, {}, {"a": torch.zeros(2)})
    taken = HostCopy().take(tensors)
    assert taken.weights["a"].all() and not taken.average["a"].any()


def test_parameters_that_require_gradients_are_copied():
    model = torch.nn.Linear(2, 2)
    taken = HostCopy().take(CheckpointTensors(dict(model.named_parameters()), {}, {}))
    assert torch.equal(taken.weights["bias"], model.bias) and not taken.weights["bias"].requires_grad
