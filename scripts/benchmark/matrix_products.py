"""The time of the matrix products of a training step, which is a lower bound for the step.

Each product is timed alone and writes its result to memory that is already allocated. The sizes are those of
the mean micro-batch without padding.
"""

import time
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from benchmark.job import TrainingJob, answer_with
from mtrain.config.model import ModelConfig
from mtrain.planning.cost import Product, Shape, products_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def products_of_job(job: TrainingJob) -> Counter[Product]:
    """The products of a step with the mean micro-batch of a job; R-Drop runs it through the model twice."""
    copies = 2 if job.training["r_drop"] else 1
    return products_of(ModelConfig(**job.model), Shape(*job.shape).repeated(copies))


def bound(job: TrainingJob) -> dict[str, float]:
    """Seconds of all matrix products of a step with the mean micro-batch, in the precision of the job."""
    counts = products_of_job(job)
    dtype, device = DTYPES[job.precision], torch.device(job.device)
    return {"seconds": sum(times * seconds_of(product, dtype, device) for product, times in counts.items())}


def seconds_of(product: Product, dtype: torch.dtype, device: torch.device) -> float:
    """Seconds of a product and of the two products that give the gradients of its factors."""
    batch, rows, inner, columns = product

    def matrices(*sizes: int) -> Tensor:
        made = torch.rand(batch, *sizes, dtype=dtype, device=device)
        return made[0] if batch == 1 else made  # a single product uses other kernels than a batch

    x, weight, gradient = matrices(rows, inner), matrices(columns, inner), matrices(rows, columns)
    out, grad_x, grad_weight = map(torch.empty_like, (gradient, x, weight))
    return (
        seconds_per_call(lambda: torch.matmul(x, weight.mT, out=out), device)
        + seconds_per_call(lambda: torch.matmul(gradient, weight, out=grad_x), device)
        + seconds_per_call(lambda: torch.matmul(gradient.mT, x, out=grad_weight), device)
    )


def seconds_per_call(call: Callable[[], object], device: torch.device, span: float = 0.1) -> float:
    """The shortest time of a call in seconds, among the calls that fit into `span` seconds, at least three.

    The minimum excludes the interruptions by other programs.
    """
    on_gpu = device.type == "cuda"
    repeats = 20 if on_gpu else 1  # a single call would measure its launch
    call()
    if on_gpu:
        torch.cuda.synchronize(device)
    times: list[float] = []
    while len(times) < 3 or sum(times) * repeats < span:
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        if on_gpu:
            torch.cuda.synchronize(device)
        times.append((time.perf_counter() - start) / repeats)
    return min(times)


if __name__ == "__main__":
    answer_with(bound)
