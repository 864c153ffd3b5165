"""Describes the machine and measures its peak speeds."""

import json
import time
from importlib.metadata import PackageNotFoundError, version

import torch
from benchmark.matrix_products import Product, seconds_of, seconds_per_call
from benchmark.meter import synchronize
from benchmark.rounds import describe_run

from gpu.scale import Scale
from mtrain.device import resolve_precision

PACKAGES = ("transformers", "sentencepiece", "numpy", "pyarrow", "pydantic", "typer", "triton", "sacrebleu")
# Large products, and products of the models `base` and `big` with 25,000 tokens: rows, inner size, columns.
PRODUCTS = [(8192, 8192, 8192), (4096, 4096, 4096), (25000, 512, 2048), (25000, 2048, 512)]
PRODUCTS += [(25000, 512, 1536), (2097, 512, 32000), (25000, 1024, 4096)]
LAUNCHES = 5000


def environment(scale: Scale) -> None:
    """Print versions, the device, and the precision that `auto` selects."""
    print(json.dumps(describe_run(scale.device), indent=1))
    print("precision:", resolve_precision(scale.device, "auto"))
    print("packages:", ", ".join(f"{name} {_version(name)}" for name in PACKAGES))
    if scale.on_gpu:
        cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        print("CUDA", torch.version.cuda, "cuDNN", cudnn)
        print(torch.cuda.get_device_properties(scale.device))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def ceiling(scale: Scale) -> None:
    """Print the speeds of matrix products with their gradients, of a copy, and of a small operation."""
    for sizes in PRODUCTS:
        rows, inner, columns = (min(size, 64) if scale.tiny else size for size in sizes)
        product = Product(1, rows, inner, columns)
        speed = product.flops / seconds_of(product, torch.bfloat16, scale.device)
        print(f"bf16 product {rows} x {inner} x {columns}, and its gradients: {speed / 1e12:.3g} TFLOP/s")
    source = torch.zeros(2**20 if scale.tiny else 2**30, dtype=torch.uint8, device=scale.device)
    target = torch.empty_like(source)
    speed = 2 * source.numel() / seconds_per_call(lambda: target.copy_(source), scale.device)
    print(f"copy: {speed / 1e12:.3g} TB/s read and written")
    of_host, in_all = _seconds_of_launch(scale)
    print(f"small operation: {1e6 * of_host:.1f} us of the host, {1e6 * in_all:.1f} us in all")


def _seconds_of_launch(scale: Scale) -> tuple[float, float]:
    """Seconds until the host has launched an operation on a single number, and until it is done."""
    number = torch.ones(1, device=scale.device)
    synchronize(scale.device)
    start = time.perf_counter()
    for _ in range(LAUNCHES):
        number.add_(1)
    started = time.perf_counter()
    synchronize(scale.device)
    return (started - start) / LAUNCHES, (time.perf_counter() - start) / LAUNCHES
