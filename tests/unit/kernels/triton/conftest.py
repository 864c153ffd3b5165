"""The kernels run on a GPU if there is one, else in Triton's interpreter; see `tests/conftest.py`."""

from importlib import import_module

import pytest
import torch

KERNELS = ("attention", "cross_entropy", "dropout", "mixed_linear", "norm")
HAS_GPU = torch.cuda.is_available()

try:
    for kernel in KERNELS:
        import_module(f"mtrain.kernels.triton.{kernel}")
except ModuleNotFoundError:  # there is no Triton for this platform
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def device() -> torch.device:
    """Where the kernels run."""
    return torch.device("cuda" if HAS_GPU else "cpu")


@pytest.fixture(params=["triton", "operators"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Functions that have a kernel use it, or its twin in operators, as on a CPU without AMX."""
    monkeypatch.setattr("mtrain.kernels.mixed_linear.cpu_has_amx", lambda: False)
    for module in ("cross_entropy", "mixed_linear", "norm", "triton.available"):
        monkeypatch.setattr(f"mtrain.kernels.{module}.suits_kernels", lambda x: request.param == "triton")
    return str(request.param)
