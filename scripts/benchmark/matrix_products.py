"""The matrix products of a training step: their FLOPs and their time, which is a lower bound for the step.

Each product is timed alone and writes its result to memory that is already allocated. The sizes are those of
the mean micro-batch without padding.
"""

import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmark.job import TrainingJob, answer_with

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Product(NamedTuple):
    """`batch` products of (rows, inner) with (inner, columns) matrices in the forward pass."""

    batch: int
    rows: int
    inner: int
    columns: int

    @property
    def flops(self) -> int:
        """Operations forward and backward: the gradient of each factor costs as much as the product."""
        return 3 * 2 * self.batch * self.rows * self.inner * self.columns


def products_of(model: dict[str, Any], shape: tuple[int, int, int]) -> Counter[Product]:
    """The number of times that each product occurs in a step.

    `model` has the fields of ModelConfig; `shape` is the number of sentences, source and target tokens.
    Causal attention is counted in full.
    """
    sentences, source, target = shape
    width, heads, inner = model["d_model"], model["heads"], model["ffn_dim"]
    gates = 2 if model["activation"] == "swiglu" else 1

    def linear(tokens: int, *sizes: tuple[int, int]) -> list[Product]:
        return [Product(1, tokens, *size) for size in sizes]

    def attention(queries: int, keys: int) -> list[Product]:
        long, wide = round(queries / sentences), round(keys / sentences)
        head = width // heads
        return [Product(sentences * heads, long, head, wide), Product(sentences * heads, long, wide, head)]

    square, feed_forward = (width, width), ((width, gates * inner), (inner, width))
    self_attention = ((width, 3 * width), square)
    encoder = linear(source, *self_attention, *feed_forward) + attention(source, source)
    decoder = linear(target, *self_attention, square, square, *feed_forward) + attention(target, target)
    decoder += linear(source, (width, 2 * width)) + attention(target, source)
    counts: Counter[Product] = Counter()
    for products, times in (
        (encoder, model["encoder_layers"]),
        (decoder, model["decoder_layers"]),
        (linear(target, (width, model["target_vocab_size"])), 1),
    ):
        for product in products:
            counts[product] += times
    return counts


def flops_of(counts: Counter[Product]) -> int:
    """Floating-point operations of a step's matrix products."""
    return sum(product.flops * times for product, times in counts.items())


def products_of_job(job: TrainingJob) -> Counter[Product]:
    """The products of a step with the mean micro-batch of a job; R-Drop runs it through the model twice."""
    copies = 2 if job.training["r_drop"] else 1
    sentences, source, target = (copies * size for size in job.shape)
    return products_of(job.model, (sentences, source, target))


def bound(job: TrainingJob) -> dict[str, float]:
    """Seconds of all matrix products of a step with the mean micro-batch, in the precision of the job."""
    counts = products_of_job(job)
    dtype, device = DTYPES[job.precision], torch.device(job.device)
    return {"seconds": sum(times * _seconds(product, dtype, device) for product, times in counts.items())}


def _seconds(product: Product, dtype: torch.dtype, device: torch.device) -> float:
    batch, rows, inner, columns = product

    def matrices(*sizes: int) -> Tensor:
        made = torch.rand(batch, *sizes, dtype=dtype, device=device)
        return made[0] if batch == 1 else made  # a single product uses other kernels than a batch

    x, weight, gradient = matrices(rows, inner), matrices(columns, inner), matrices(rows, columns)
    out, grad_x, grad_weight = map(torch.empty_like, (gradient, x, weight))
    return (
        _time(lambda: torch.matmul(x, weight.mT, out=out), device)
        + _time(lambda: torch.matmul(gradient, weight, out=grad_x), device)
        + _time(lambda: torch.matmul(gradient.mT, x, out=grad_weight), device)
    )


def _time(call: Callable[[], object], device: torch.device, span: float = 0.1) -> float:
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
