"""Where the time of training and decoding goes: kernels, operations, and calls of the CUDA runtime."""

from collections.abc import Callable
from functools import partial

import torch
from benchmark.profile import record, summarize
from benchmark.report import aligned, profile_text
from torch._C._autograd import DeviceType
from torch.profiler import profile

from gpu.decoding import USES, make_search, translate
from gpu.scale import Scale
from gpu.training import expect, make_learner, take
from mtrain.data.epochs.loader import StepInput
from mtrain.training.step.learner import Learner

STEPS = 8  # of training
KERNELS = 28  # rows of the table of kernels
# Calls that start work on a GPU, wait for it, or allocate memory.
CALLS = ("Launch", "Memcpy", "Memset", "Synchronize", "cudaMalloc", "cudaHostAlloc", "_local_scalar_dense")


def profile_training(scale: Scale, preset: str, batch_tokens: list[int]) -> None:
    """Profile steps with each number of tokens of a batch."""
    config = scale.model_config(preset)
    for tokens in batch_tokens:
        steps = scale.steps(config, tokens, STEPS)
        learner = make_learner(scale, config)
        expect(learner, steps)
        train = partial(_take_all, learner, steps)
        train()
        _report(f"training {preset}, batch {tokens}", scale, train, len(steps))


def _take_all(learner: Learner, steps: list[StepInput]) -> None:
    for step in steps:
        take(learner, step)


def profile_decoding(scale: Scale, preset: str) -> None:
    """Profile the search, greedy and with beams."""
    config = scale.model_config(preset)
    search_rows = make_search(scale, config, torch.bfloat16, scale.on_gpu)
    sentences = scale.sentences(config, 8 if scale.tiny else 64)
    for beams in (1, 5):
        work = partial(translate, search_rows, scale.length, sentences, len(sentences), beams)
        for _ in range(USES):
            work()
        name = f"decoding {preset}, {len(sentences)} sentences, beam {beams}"
        _report(name, scale, work, scale.length)


def _report(name: str, scale: Scale, work: Callable[[], object], steps: int) -> None:
    """Profile `work`, which takes some steps, and print the tables."""
    profiler, wall = record(work, scale.device)
    print(f"\n--- {name}: {1000 * wall / steps:.2f} ms per step, profiled")
    if scale.on_gpu:
        _print_kernels(profiler, wall, steps)
    print(profile_text(summarize(profiler, wall, scale.device, steps)), flush=True)


def _print_kernels(profiler: profile, wall: float, steps: int) -> None:
    averages = profiler.key_averages()
    kernels = [event for event in averages if event.device_type == DeviceType.CUDA]
    kernels.sort(key=lambda event: -event.self_device_time_total)
    busy = sum(event.self_device_time_total for event in kernels) / 1e6  # seconds
    count = sum(event.count for event in kernels)
    print(f"GPU busy {busy / wall:.0%}, {count / steps:.0f} kernels and copies per step")
    calls = [event for event in averages if any(name in event.key for name in CALLS)]
    found = ", ".join(f"{event.key} {event.count / steps:.1f}" for event in calls if event not in kernels)
    print(f"calls per step: {found}\n")
    rows = [("kernel", "ms/step", "calls/step")]
    for event in kernels[:KERNELS]:
        milliseconds = event.self_device_time_total / 1000 / steps
        rows.append((event.key[:110], f"{milliseconds:.4f}", f"{event.count / steps:.1f}"))
    print(aligned(rows), end="\n\n")
