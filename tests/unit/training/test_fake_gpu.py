"""Steps on a GPU that has no data: tensors and types match, and nothing waits for the device."""

import json
import subprocess
import sys

import pytest
from torch.utils import backend_registration

from tests.support.fake_gpu import CHECKS, FAULTS

pytestmark = [
    pytest.mark.slow,  # `scripts/simulate_cuda counts`, which `check.sh` runs, finds most of these faults
    pytest.mark.skipif(
        not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
        reason="this version of PyTorch cannot register a device in Python",
    ),
]
ERRORS = {
    "a value is read": "DataDependentOutputException",
    "a branch depends on a value": "DataDependentOutputException",
    "a shape depends on values": "DynamicOutputShapeException",
    "the order of a sum varies": "has no fixed order",
    "a tensor is on the host": "FakeTensorDeviceMismatchError",
    "a condition is on the host": "FakeTensorDeviceMismatchError",
    "a product has two types": "expected scalar type",
}  # others: "uses tensors on cpu and gpu"


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    """The error of each check, in a process of its own: a device cannot be removed."""
    command = [sys.executable, "-m", "tests.support.fake_gpu"]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


@pytest.mark.parametrize("check", CHECKS)
def test_a_step_needs_no_value_and_no_tensor_on_the_host(found, check):
    assert found[check] == ""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(found, fault):
    assert ERRORS.get(fault, "uses tensors on cpu and gpu") in found[fault]
