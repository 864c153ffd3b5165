"""Access to undocumented parts of PyTorch."""

import torch

from mtrain.kernels.undocumented import undocumented
from tests.support.undocumented import documented_only


def test_attributes_are_found_by_dotted_names() -> None:
    assert undocumented("nn.functional.linear") is torch.nn.functional.linear


def test_missing_attributes_are_none() -> None:
    assert undocumented("ops.mkldnn._no_such_operation") is None
    assert undocumented("no_such_module.linear") is None


def test_nothing_is_found_where_only_documented_operations_are_wanted() -> None:
    with documented_only():
        assert undocumented("nn.functional.linear") is None
    assert undocumented("nn.functional.linear") is not None
