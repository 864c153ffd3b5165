"""Where the model runs, and in which arithmetic."""

import os

import pytest
import torch

from mtrain.device import (
    autocast,
    compiles,
    describe_arithmetic,
    fetched,
    keep_few_kernels,
    keep_freed_memory,
    resolve_device,
    resolve_precision,
    workers_for,
)
from mtrain.errors import UsageError


def test_the_cpu_is_always_there():
    assert resolve_device("cpu") == torch.device("cpu")
    assert " threads), fp32, compiled, torch " in describe_arithmetic(torch.device("cpu"), "fp32", True, 1)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_is_fetched_are_the_values_of_then(device):
    values = torch.arange(3.0, device=device)
    read = fetched(values)
    values += 1
    assert read() == [0.0, 1.0, 2.0]


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
    ("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_precision_is_that_of_matrix_products(precision, dtype):
    a = torch.ones(2, 2)
    with autocast(torch.device("cpu"), precision):
        assert (a @ a).dtype == dtype


@pytest.mark.parametrize(
    ("generation", "precision"), [((6, 1), "fp32"), ((7, 5), "fp16"), ((8, 0), "bf16"), ((9, 0), "bf16")]
)
def test_auto_is_the_fastest_precision_of_a_gpu(monkeypatch, generation, precision):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: generation)
    device = torch.device("cuda")
    assert resolve_precision(device, "auto") == precision
    assert resolve_precision(device, "fp32") == "fp32"


@pytest.mark.parametrize("has_bf16", [True, False])
def test_auto_on_a_cpu_is_bf16_if_it_has_instructions_for_it(monkeypatch, has_bf16):
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda: has_bf16, raising=False)
    cpu = torch.device("cpu")
    assert resolve_precision(cpu, "auto") == ("bf16" if has_bf16 else "fp32")
    assert resolve_precision(cpu, "fp32") == "fp32" and resolve_precision(cpu, "bf16") == "bf16"


@pytest.mark.parametrize(
    ("threads", "workers"), [(1, 1), (2, 2), (3, 3), (4, 4), (5, 4), (6, 3), (7, 3), (8, 4), (64, 4)]
)
def test_workers_use_the_cores(monkeypatch, threads, workers):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert workers_for(torch.device("cpu")) == workers and workers_for(torch.device("cuda")) == 1


@pytest.mark.parametrize(
    ("generation", "triton", "compiled"),
    [((9, 0), True, True), ((9, 0), False, False), ((6, 1), True, False)],
)
def test_auto_compiles_on_gpus_that_triton_is_for(monkeypatch, generation, triton, compiled):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: generation)
    monkeypatch.setattr("mtrain.device.find_spec", lambda name: name if triton else None)
    assert [compiles(torch.device(kind), "auto") for kind in ("cpu", "cuda")] == [False, compiled]
    assert compiles(torch.device("cpu"), "on") and not compiles(torch.device("cuda"), "off")


def test_few_kernels_are_kept_unless_the_user_says_how_many(monkeypatch):
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "7")
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", raising=False)
    keep_few_kernels()
    assert (os.environ["LRU_CACHE_CAPACITY"], os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"]) == ("7", "64")


def test_keeping_freed_memory_leaves_arithmetic_alone():
    keep_freed_memory()
    big = torch.ones(4_000, 4_000)
    assert float(big.sum()) == 16_000_000
