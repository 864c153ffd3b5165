"""Where the model runs, and in which arithmetic."""

import pytest
import torch

from mtrain.device import autocast, describe_device, keep_freed_memory, resolve_device
from mtrain.errors import UsageError

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


def test_the_cpu_is_always_there():
    assert resolve_device("cpu") == torch.device("cpu")
    assert "threads" in describe_device(torch.device("cpu"))


@no_gpu
@pytest.mark.parametrize("name", ["cuda", "cuda:0", "cuda:7"])
def test_asking_for_a_gpu_that_is_not_there_is_an_error(name):
    assert resolve_device("auto") == torch.device("cpu")
    with pytest.raises(UsageError, match=f"--device {name}: this machine has no CUDA device"):
        resolve_device(name)


@pytest.mark.gpu
def test_auto_takes_the_gpu_that_is_there():
    assert resolve_device("auto").type == "cuda"
    with pytest.raises(UsageError, match="CUDA device"):
        resolve_device("cuda:99")


@pytest.mark.parametrize("name", ["gpu", "mps", "tpu:0", ""])
def test_unknown_devices_are_errors(name):
    with pytest.raises(UsageError, match="no such device"):
        resolve_device(name)


@pytest.mark.parametrize(
    ("precision", "dtype"), [("auto", torch.float32), ("fp32", torch.float32), ("bf16", torch.bfloat16)]
)
def test_precision_is_that_of_matrix_products(precision, dtype):
    a = torch.ones(2, 2)
    with autocast(torch.device("cpu"), precision):
        assert (a @ a).dtype == dtype


def test_keeping_freed_memory_leaves_arithmetic_alone():
    keep_freed_memory()
    big = torch.ones(4_000, 4_000)
    assert float(big.sum()) == 16_000_000
