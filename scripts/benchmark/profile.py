"""Profiles mtrain's training steps with PyTorch's profiler."""

import re
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch._C._profiler import _ExperimentalConfig
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from benchmark.job import TrainingJob, answer_with
from benchmark.meter import synchronize
from benchmark.mtrain_training import open_trainer
from mtrain.training.loop import train_step

WARM_STEPS, STEPS = 3, 6
# The first pattern that matches decides. Only attention multiplies batches of matrices.
KINDS = [
    ("attention", r"_EagerAttention|aten::(bmm|baddbmm|.*scaled_dot_product.*)"),
    ("matrix products", r"aten::(mm|addmm|mkldnn_linear|_?addmm_activation)|mkldnn::"),
    ("dropout", r"_ReluDropout|aten::(.*dropout.*|bernoulli_?|random_)"),
    ("optimizer and clipping", r"Optimizer\.|aten::(_fused_adamw?_?|_foreach_.*|linalg_vector_norm)"),
    ("loss", r"_ProjectedCrossEntropy|aten::(logsumexp|.*cross_entropy.*|.*nll_loss.*)"),
]


def kind_of(event: FunctionEvent) -> str:
    """The kind of an operation, or of the innermost enclosing operation that has one."""
    around: FunctionEvent | None = event
    while around is not None:
        for kind, pattern in KINDS:
            if re.match(pattern, around.name):
                return kind
        around = around.cpu_parent
    return (
        "attention" if "softmax" in event.name else "other"
    )  # the softmax of the loss is enclosed by the loss


def run(job: TrainingJob) -> dict[str, Any]:
    """Profile a few steps of a prepared run; see `summarize`."""
    trainer = open_trainer(job)
    steps = trainer.steps()
    for _ in range(WARM_STEPS):
        train_step(trainer, next(steps))

    def train() -> None:
        for _ in range(STEPS):
            train_step(trainer, next(steps))

    return summarize(*record(train, trainer.ranks.device), trainer.ranks.device, STEPS)


def record(work: Callable[[], object], device: torch.device) -> tuple[profile, float]:
    """Run `work` under the profiler. Returns the profiler, and the seconds that it took."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    everywhere = _ExperimentalConfig(profile_all_threads=True)  # mtrain's workers are threads
    synchronize(device)
    start = time.perf_counter()
    with profile(activities=activities, experimental_config=everywhere) as profiler:
        work()
        synchronize(device)
        wall = time.perf_counter() - start
    return profiler, wall


def summarize(profiler: profile, wall: float, device: torch.device, steps: int) -> dict[str, Any]:
    """Milliseconds per step of each operation and of each kind of operation.

    Times exclude called operations and are summed over threads; on a GPU, they are kernel times.
    """
    on_gpu = device.type == "cuda"
    operations: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in profiler.events():  # type: ignore[no-untyped-call]
        if event.device_type != DeviceType.CPU:
            continue  # the operation that launched a kernel counts its time, too
        own = (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1000 / steps
        operations[event.name] += own
        calls[event.name] += 1
        kinds[kind_of(event)] += own
    launches = sum(count for name, count in calls.items() if "Launch" in name)  # a graph is one
    return {
        "steps": steps,
        "launches_per_step": launches / steps,
        "wall_ms_per_step": 1000 * wall / steps,
        "kinds": [{"kind": kind, "ms_per_step": own} for kind, own in kinds.most_common()],
        "operations": [
            {"operation": name, "ms_per_step": own, "calls_per_step": calls[name] / steps}
            for name, own in operations.most_common(20)
        ],
    }


if __name__ == "__main__":
    answer_with(run)
