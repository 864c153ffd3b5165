"""The speed and the memory of training: mtrain, and other tools in a plain loop on the same batches."""

import time
from collections.abc import Callable, Iterable
from functools import partial
from itertools import cycle
from typing import Any, Literal

import torch
from benchmark.meter import Meter
from benchmark.peers.batches import IGNORE, PeerBatch
from benchmark.peers.loop import summed_loss, update
from torch import Tensor, nn

from gpu.scale import Scale
from mtrain.config.sections.model import ModelConfig
from mtrain.config.sections.training import TrainingConfig
from mtrain.data.epochs.batching import Batch
from mtrain.data.epochs.loader import StepInput
from mtrain.data.epochs.packed_batch import AnyBatch, PackedBatch
from mtrain.planning.cost import Shape, flops_of
from mtrain.training.step import make_learner as learners
from mtrain.training.step.learner import Learner

RATE = 1e-5  # small, so that training on random data stays stable; speed does not depend on it
SLOW = 1.5  # seconds; a slower step does more than training, such as compiling kernels
SMOOTHING = 0.1


def make_learner(scale: Scale, config: ModelConfig, as_graphs: bool = True) -> Learner:
    """A learner with random weights."""
    graphs: Literal["auto", "off"] = "auto" if as_graphs else "off"
    recipe = TrainingConfig(max_steps=1, label_smoothing=SMOOTHING, cuda_graphs=graphs)
    return learners.make_learner(scale.model(config).train(), recipe)


def expect(learner: Learner, steps: Iterable[StepInput]) -> None:
    """Let a learner choose the shapes of its graphs by the steps to come, as at the start of a run."""
    batches = (batch for step in steps for batch in step.batches)
    learner.expect(batch.layout for batch in batches if isinstance(batch, PackedBatch))


def take(learner: Learner, step: StepInput) -> None:
    """Take a training step."""
    learner.step(step.batches, step.tokens, RATE)


def measure(scale: Scale, preset: str, batch_tokens: list[int]) -> None:
    """Print mtrain's speed for each number of tokens of a batch."""
    config = scale.model_config(preset)
    for tokens in batch_tokens:
        steps = scale.steps(config, tokens)
        learner = make_learner(scale, config)
        expect(learner, steps)
        name = f"mtrain {preset} {learner.precision}, batch {tokens}"
        time_steps(name, scale, config, steps, partial(take, learner))


def measure_peers(scale: Scale, preset: str, batch_tokens: list[int]) -> None:
    """Print the speed of Transformers' Marian and of torch.nn.Transformer with bf16 autocast."""
    from benchmark.peers.marian_hf import marian_config, marian_logits
    from benchmark.peers.nn_transformer import TutorialTransformer
    from transformers import MarianMTModel  # takes seconds

    torch.backends.cuda.enable_cudnn_sdp(True)  # as PyTorch chooses, unlike mtrain
    config = scale.model_config(preset)
    fields = config.model_dump(mode="json")

    def marian() -> tuple[nn.Module, Callable[[PeerBatch], Tensor]]:
        model = MarianMTModel(marian_config(fields))
        return model, partial(marian_logits, model)

    def tutorial() -> tuple[nn.Module, Callable[[PeerBatch], Tensor]]:
        model = TutorialTransformer(fields)
        return model, model

    for tool, make in (("Transformers' Marian", marian), ("torch.nn.Transformer", tutorial)):
        torch.manual_seed(1)
        model, logits_of = make()
        model.to(scale.device).train()
        for tokens in batch_tokens:
            name = f"{tool} {preset} bf16, batch {tokens}"
            steps = scale.steps(config, tokens, padded=True)
            try:
                time_steps(name, scale, config, steps, _peer_step(model, logits_of, scale))
            except torch.OutOfMemoryError as error:
                print(f"{name}: {str(error).splitlines()[0]}", flush=True)
        del model, logits_of
        if scale.on_gpu:
            torch.cuda.empty_cache()


def _peer_step(
    model: nn.Module, logits_of: Callable[[PeerBatch], Tensor], scale: Scale
) -> Callable[[StepInput], None]:
    """A function that takes a step of a peer with fused AdamW, which is faster than the default one."""
    optimizer = torch.optim.AdamW(model.parameters(), RATE, (0.9, 0.98), fused=True)

    def step(step: StepInput) -> None:
        for each in step.batches:
            assert isinstance(each, Batch)  # as they are padded
            batch = peer_batch(each.to(scale.device))
            with torch.autocast(scale.device.type, torch.bfloat16):
                logits = logits_of(batch)
            loss = summed_loss(logits, batch, SMOOTHING) / step.tokens
            loss.backward()  # type: ignore[no-untyped-call]
        update(model, optimizer)

    return step


def peer_batch(batch: Batch) -> PeerBatch:
    """A batch in the form that the other tools take."""
    return PeerBatch(batch.source, batch.source_keep, batch.target_in, batch.labels != IGNORE, batch.labels)


def time_steps(
    name: str,
    scale: Scale,
    config: ModelConfig,
    steps: list[StepInput],
    take_step: Callable[[StepInput], object],
) -> None:
    """Take every step once, then again for `scale.seconds`, and print the speed."""
    slow = [round(seconds, 1) for seconds in map(_timed(take_step), steps) if seconds > SLOW]
    if scale.on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(scale.device)
    meter = Meter(str(scale.device), 0.0, scale.seconds)
    meter.step(0, 0)  # waits for the device and starts the clock
    of_host, timed = 0.0, _timed(take_step)
    for step in cycle(steps):
        of_host += timed(step)
        if meter.step(step.tokens, sum(batch.labels.numel() for batch in step.batches)):
            break
    result = meter.result()
    if scale.on_gpu:  # with the memory of graphs, whose tensors do not count as allocated
        result["peak_mib"] = torch.cuda.max_memory_reserved(scale.device) / 2**20
    _print(name, result, of_host, _flops_per_token(config, steps))
    if slow:
        print(f"   seconds of the slow steps before it: {slow}", flush=True)


def _timed(work: Callable[[StepInput], object]) -> Callable[[StepInput], float]:
    """A function that calls `work` and returns its duration in seconds."""

    def timed(step: StepInput) -> float:
        start = time.perf_counter()
        work(step)
        return time.perf_counter() - start

    return timed


def _print(name: str, result: dict[str, Any], of_host: float, flops_per_token: float) -> None:
    speed = result["target_tokens_per_second"]
    print(
        f"{name}: {speed:,.0f} target tokens/s, {result['ms_per_step']:.2f} ms/step (host "
        f"{1000 * of_host / result['steps']:.2f}), {speed * flops_per_token / 1e12:.3g} TFLOP/s, "
        f"{result['target_tokens_per_step']:,.0f} tokens/step, {result['padding']:.1%} padding, "
        f"peak {result['peak_mib'] / 1024:.2f} GiB",
        flush=True,
    )


def _flops_per_token(config: ModelConfig, steps: list[StepInput]) -> float:
    """Operations of the matrix products for a target token, without padding."""
    shapes = [
        Shape(len(batch.rows), _source_tokens(batch), batch.target_tokens)
        for step in steps
        for batch in step.batches
    ]
    flops = sum(flops_of(config, shape) for shape in shapes)
    return flops / sum(shape.target for shape in shapes)


def _source_tokens(batch: AnyBatch) -> int:
    return batch.layout.source if isinstance(batch, PackedBatch) else int(batch.source_keep.sum())
