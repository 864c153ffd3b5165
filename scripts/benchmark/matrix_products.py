"""The time of the matrix products of a training step, which is a lower bound for the step.

Each product is timed alone and writes its result to memory that is already allocated. The sizes come from the
mean micro-batch without padding.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmark.job import TrainingJob, answer_with
from mtrain.config.sections.model import ModelConfig
from mtrain.kernels.sequences import Padded
from mtrain.model.build import build_model
from mtrain.model.transformer import Transformer
from mtrain.planning.cost import Shape

PRODUCTS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default,
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Product(NamedTuple):
    """`batch` products of (rows, inner) with (inner, columns) matrices in the forward pass."""

    batch: int
    rows: int
    inner: int
    columns: int

    @property
    def flops(self) -> int:
        """Operations forward and backward."""
        return 3 * 2 * self.batch * self.rows * self.inner * self.columns


class _Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the matrix products that are computed until the end of the block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[Product] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function in PRODUCTS:
            *batch, rows, columns = result.shape
            self.counts[Product(batch[0] if batch else 1, rows, args[-1].size(-2), columns)] += 1
        return result


def products_of(config: ModelConfig, shape: Shape) -> Counter[Product]:
    """The number of times that each matrix product occurs in a step on one micro-batch, from a forward pass
    on the meta device, where attention consists of two products. All logits are one product.
    """
    with torch.device("meta"), torch.no_grad():
        model = build_model(config)
        source, target = (torch.zeros(shape.sentences, length, dtype=torch.int64) for length in shape.lengths)
        products = _Products()
        with products:
            sources = Padded.of(source, torch.ones_like(source, dtype=torch.bool))
            outputs = model(source.flatten(), sources, target.flatten(), Padded.of(target))
            if isinstance(model, Transformer):
                model.project(outputs)
    return products.counts


def shape_of_job(job: TrainingJob) -> Shape:
    """The mean micro-batch of a job; R-Drop runs it through the model twice."""
    return Shape(*job.shape).repeated(2 if job.training["r_drop"] else 1)


def bound(job: TrainingJob) -> dict[str, float]:
    """Seconds of all matrix products of a step with the mean micro-batch, in the precision of the job."""
    counts = products_of(ModelConfig(**job.model), shape_of_job(job))
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
