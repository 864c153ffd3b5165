"""The kernels run on a GPU if there is one, and otherwise in Triton's interpreter."""

import os
from importlib import import_module

import pytest
import torch

KERNELS = ("attention", "cross_entropy", "dropout")
HAS_GPU = torch.cuda.is_available()
_VARIABLE = "TRITON_INTERPRET"  # read when functions are decorated, so it is set only for that

_before = os.environ.get(_VARIABLE)
if not HAS_GPU:
    os.environ[_VARIABLE] = "1"
try:
    for kernel in KERNELS:
        import_module(f"mtrain.kernels.triton.{kernel}")
    if not HAS_GPU:  # the first run imports the rest of the interpreter
        zero = torch.zeros(1, dtype=torch.int32)
        import_module("mtrain.kernels.triton.dropout").hashed_dropout(torch.ones(1), 0.0, zero, zero)
except ModuleNotFoundError:  # there is no Triton for this platform
    collect_ignore_glob = ["test_*.py"]
finally:
    if _before is None:
        os.environ.pop(_VARIABLE, None)
    else:
        os.environ[_VARIABLE] = _before


@pytest.fixture
def device() -> torch.device:
    """Where the kernels run."""
    return torch.device("cuda" if HAS_GPU else "cpu")


@pytest.fixture(params=["triton", "operators"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Functions that have a kernel use it, or its twin in operators."""
    for module in ("cross_entropy", "dropout"):
        monkeypatch.setattr(f"mtrain.kernels.{module}.triton_works", lambda device: request.param == "triton")
    return str(request.param)
