"""Devices, precision, threads and memory settings."""

import math
import os
import platform
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from mtrain.device import (
    autocast,
    copy_to_host_async,
    count_unused_gpus,
    default_worker_count,
    describe_device,
    keep_freed_memory,
    let_cuda_memory_grow,
    limit_onednn_cache,
    make_current,
    preserved_random_states,
    random_states,
    release_cached_memory,
    resolve_device,
    resolve_precision,
    restore_random_states,
    step_unless,
    thread_pool,
)
from mtrain.errors import UsageError
from mtrain.kernels.precision import cpu_has_bf16
from tests.support.devices import pretend
from tests.support.undocumented import documented_only


def test_the_cpu_is_always_available():
    assert resolve_device("cpu") == torch.device("cpu")
    assert describe_device(torch.device("cpu")).endswith(" threads)")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_fetched_values_are_those_at_the_time_of_the_call(device):
    values = torch.arange(3.0, device=device)
    read = copy_to_host_async(values)
    values += 1
    assert read() == [0.0, 1.0, 2.0]


@pytest.mark.gpu
def test_auto_selects_an_available_gpu():
    assert resolve_device("auto").type == "cuda"
    with pytest.raises(UsageError, match="CUDA device"):
        resolve_device("cuda:99")


@pytest.mark.parametrize("name", ["gpu", "mps:0", "cpu:1", "tpu:0", "cuda:-1", "cuda:", "cuda:00", ""])
def test_unknown_devices_are_errors(name):
    with pytest.raises(UsageError, match="not supported; give auto, cpu, cuda, cuda:N, mps, xpu or xpu:N"):
        resolve_device(name)


@pytest.mark.parametrize(
    ("kind", "count", "chosen"),
    [("cuda", 2, "cuda"), ("mps", 1, "mps"), ("xpu", 1, "xpu"), ("cuda", 0, "cpu"), ("mtia", 1, "cpu")],
)
def test_auto_selects_the_accelerator_of_the_machine(monkeypatch, kind, count, chosen):
    pretend(monkeypatch, kind, count)
    assert resolve_device("auto") == torch.device(chosen)


@pytest.mark.parametrize(
    ("kind", "name", "unused"), [("cuda", "auto", 3), ("cuda", "cuda:1", 0), ("xpu", "auto", 0)]
)
def test_gpus_that_one_process_leaves_unused_are_counted(monkeypatch, kind, name, unused):
    pretend(monkeypatch, kind, 4)
    assert count_unused_gpus(resolve_device(name)) == unused
    assert count_unused_gpus(torch.device("cpu")) == 0


@pytest.mark.parametrize(
    ("variables", "release", "expected"),
    [
        ({}, "6.8.0-generic", "expandable_segments:True"),
        ({}, "6.6.0-microsoft-standard-WSL2", None),
        ({"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}, "6.8.0-generic", None),
    ],
)
def test_memory_of_cuda_grows_unless_it_is_configured(monkeypatch, variables, release, expected):
    monkeypatch.setattr(os, "environ", dict(variables))
    monkeypatch.setattr(platform, "release", lambda: release)
    let_cuda_memory_grow()
    found = os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
    assert found == (expected if sys.platform == "linux" and torch.__version__ >= "2.12" else None)


def test_attention_by_cudnn_is_off_once_a_gpu_is_used(monkeypatch):
    pretend(monkeypatch, "cuda")
    torch.backends.cuda.enable_cudnn_sdp(True)
    assert resolve_device("cpu") == torch.device("cpu") and torch.backends.cuda.cudnn_sdp_enabled()
    assert resolve_device("cuda") == torch.device("cuda") and not torch.backends.cuda.cudnn_sdp_enabled()


def test_an_accelerator_that_the_machine_does_not_have_is_an_error(monkeypatch):
    pretend(monkeypatch, "xpu", 2)
    assert resolve_device("xpu:1") == torch.device("xpu:1") and resolve_device("cpu") == torch.device("cpu")
    for name, found in (("xpu:2", "2 XPU"), ("xpu:999999999999", "2 XPU"), ("mps", "no MPS"), ("cuda", "no")):
        with pytest.raises(
            UsageError, match=rf"--device {name}: this machine has {found} .*device\(s\); give"
        ):
            resolve_device(name)


@pytest.mark.parametrize("kind", ["mps", "xpu"])
def test_untested_accelerators_compute_in_fp32_without_helper_processes(monkeypatch, kind):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True}, raising=False)
    monkeypatch.setattr(torch.xpu, "get_device_name", lambda _: "Arc")
    device = torch.device(kind)
    assert resolve_precision(device, "auto") == resolve_precision(device, "fp32") == "fp32"
    assert default_worker_count(device) == 1
    assert describe_device(device) == ("mps" if kind == "mps" else "xpu (Arc)")
    with pytest.raises(UsageError, match=f"precision bf16: not supported on {kind}; set it to auto or fp32"):
        resolve_precision(device, "bf16")


@pytest.mark.parametrize("kind", ["cuda", "mps", "xpu"])
def test_a_device_is_made_current_and_keeps_its_random_state_by_its_own_functions(monkeypatch, kind):
    device, module = torch.device(kind, 0), torch.get_device_module(kind)
    state, calls = torch.arange(3, dtype=torch.uint8), []
    monkeypatch.setattr(module, "get_rng_state", lambda device=kind: state)
    monkeypatch.setattr(module, "set_rng_state", lambda state, device=kind: calls.append((state, device)))
    monkeypatch.setattr(module, "empty_cache", lambda: calls.append("emptied"))
    monkeypatch.setattr(module, "set_device", lambda device: calls.append(device), raising=False)
    make_current(torch.device(kind))
    release_cached_memory(torch.device("cpu"))
    assert calls == []
    make_current(device)
    with preserved_random_states(device):
        drawn = torch.rand(())
    release_cached_memory(device)
    assert torch.rand(()) == drawn
    assert calls == [device, (state, device), "emptied"]
    restore_random_states({**random_states(torch.device("cpu")), "other": state}, device)
    assert len(calls) == 3


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_autocast_sets_the_precision_of_matrix_products(precision, dtype):
    a = torch.ones(2, 2)
    with autocast(torch.device("cpu"), precision):
        assert (a @ a).dtype == dtype


@pytest.mark.parametrize(
    ("generation", "precision"), [((6, 1), "fp32"), ((7, 5), "fp16"), ((8, 0), "bf16"), ((9, 0), "bf16")]
)
def test_auto_selects_the_fastest_precision_of_a_gpu(monkeypatch, generation, precision):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: generation)
    device = torch.device("cuda")
    assert resolve_precision(device, "auto") == precision
    assert resolve_precision(device, "fp32") == "fp32"


@pytest.mark.parametrize("feature", ["avx512_bf16", "amx_tile"])
@pytest.mark.parametrize("present", [True, False])
def test_auto_on_a_cpu_is_bf16_if_it_has_the_instructions(monkeypatch, feature, present):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {feature: present}, raising=False)
    cpu = torch.device("cpu")
    assert resolve_precision(cpu, "auto") == ("bf16" if present else "fp32")
    assert resolve_precision(cpu, "fp32") == "fp32" and resolve_precision(cpu, "bf16") == "bf16"


@pytest.mark.parametrize("present", [True, False])
def test_older_versions_of_pytorch_are_asked_by_undocumented_functions(monkeypatch, present):
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    with documented_only():
        assert not cpu_has_bf16()
    queries = {"cpu._is_avx512_bf16_supported": lambda: False, "cpu._is_amx_tile_supported": lambda: present}
    monkeypatch.setattr("mtrain.kernels.precision.undocumented", queries.get)
    assert cpu_has_bf16() == present


@pytest.mark.parametrize("fused", [True, False])
def test_a_skipped_step_changes_neither_parameters_nor_moments(fused):
    """Without the fused kernel, the host decides."""
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter], lr=0.1, fused=fused)
    parameter.grad = torch.ones(3)
    step_unless(optimizer, torch.tensor(0.0))
    after = parameter.detach().clone()
    state = {key: value.clone() for key, value in optimizer.state[parameter].items()}
    assert (after < 1).all() and state["step"] == 1
    parameter.grad = torch.tensor([1.0, math.nan, math.inf])
    step_unless(optimizer, torch.tensor(1.0))
    assert torch.equal(parameter, after)
    for key, value in optimizer.state[parameter].items():
        assert torch.equal(value, state[key])
    parameter.grad = torch.ones(3)
    optimizer.step()  # which the skipped one does not affect
    assert (parameter < after).all()


@pytest.mark.parametrize(
    ("threads", "workers"), [(1, 1), (2, 2), (3, 3), (4, 4), (5, 4), (6, 3), (7, 3), (8, 4), (64, 4)]
)
def test_workers_divide_the_cores(monkeypatch, threads, workers):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setenv("OMP_NUM_THREADS", str(threads))
    assert (
        default_worker_count(torch.device("cpu")) == workers
        and default_worker_count(torch.device("cuda")) == 1
    )


def test_there_are_no_more_workers_than_the_process_may_use_cores(monkeypatch):
    """In a program that uses mtrain as a library, PyTorch has a thread for each core of the machine."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    monkeypatch.setattr("mtrain.device.count_cores", lambda: 2)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert default_worker_count(torch.device("cpu")) == 2


def test_threads_of_a_pool_share_the_cores_and_leave_the_default_alone():
    default = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        for _ in range(20):
            ready = threading.Barrier(4)

            def threads_in_use(ready: threading.Barrier = ready) -> int:
                ready.wait()
                return torch.get_num_threads()

            with thread_pool(4) as pool, ThreadPoolExecutor(1) as other:
                assert [job.result() for job in [pool.submit(threads_in_use) for _ in range(4)]] == [1] * 4
                assert other.submit(torch.get_num_threads).result() == torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(default)


@pytest.mark.parametrize(("has_amx", "limit"), [(True, "256"), (False, "64")])
def test_the_kernel_cache_is_limited_unless_the_user_sets_a_limit(monkeypatch, has_amx, limit):
    monkeypatch.setattr("mtrain.device.cpu_has_amx", lambda: has_amx)
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "7")
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", raising=False)
    limit_onednn_cache()
    assert (os.environ["LRU_CACHE_CAPACITY"], os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"]) == ("7", limit)


def test_keeping_freed_memory_does_not_affect_results():
    keep_freed_memory()
    big = torch.ones(4_000, 4_000)
    assert float(big.sum()) == 16_000_000
