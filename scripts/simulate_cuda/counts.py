"""Count operations, copies and waits of a training step and a decoding step.

The operations of training are counted with fake tensors at full size. Copies, waits and decoding are counted
on the simulated device, with the layers of a preset but a small width, on which these counts do not depend.
"""

import contextlib
import functools
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial, partialmethod
from itertools import product
from typing import Any, NamedTuple
from unittest.mock import Mock, patch

from simulate_cuda.device import ROOT, library, recording  # isort: skip  # precedes torch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mtrain.config.sections.decoding import DecodingConfig
from mtrain.config.sections.model import ModelConfig
from mtrain.config.sections.presets import PRESETS
from mtrain.config.sections.training import TrainingConfig
from mtrain.data.epochs.packed_batch import PackedBatch
from mtrain.decoding.sessions.inputs import Batch
from mtrain.decoding.sessions.sessions import Sessions
from mtrain.model.incremental import DecodingTransformer
from mtrain.model.static_decoder import StaticDecoder
from mtrain.model.transformer import Transformer
from mtrain.training.step.learner import Learner
from mtrain.training.step.make_learner import make_learner

MAX_WAITS = 0.25  # of a decoding step; a training step never waits
# Preset, precision and target tokens of the training steps that are counted
TRAINING = list(product(("base", "big"), ("bf16", "fp32"), (4160, 24960)))
GPU = torch.device("cuda:0")
LENGTH = 26  # tokens of a sentence in training
STEPS = 10  # of decoding
# Triton's interpreter is slow.
NARROW = {"d_model": 16, "heads": 1, "ffn_dim": 32, "vocabulary": 100}
SHALLOW = {"encoder_layers": 1, "decoder_layers": 1}
WITHOUT_KERNEL = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "lift_fresh"),
    *("is_pinned", "is_same_size", "resize_", "set_", "device"),
}


class Counts(NamedTuple):
    """What happens in a step on average."""

    operations: float
    copies: float
    waits: float
    places: Counter[str]  # of the waits of all steps


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations on the device that run kernels, and copies from and to the device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = Counter[str]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        devices = {x.device.type for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)}
        name = function.overloadpacket.__name__
        if name in ("copy_", "_to_copy") and len(devices) > 1:
            self.counts["copy"] += 1
        elif "cuda" in devices and not function.is_view and name not in WITHOUT_KERNEL:
            self.counts["operation"] += 1
        return out


@contextlib.contextmanager
def _without_data() -> Iterator[None]:
    """A context manager in which tensors are fake. PyTorch selects the attention kernel of a GPU, and updates
    many tensors at once, as it does with real tensors."""
    _foreach_utils._foreach_supported_types.append(FakeTensor)
    library.use_attention_of_gpu(True)
    flash = patch("torch._C._is_flash_attention_available", lambda: True)
    try:
        with flash, FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        library.use_attention_of_gpu(False)
        _foreach_utils._foreach_supported_types.remove(FakeTensor)


def _model(preset: str, vocabulary: int = 32_000, **changes: int) -> Transformer:
    sizes: dict[str, Any] = PRESETS[preset] | changes
    with GPU:
        config = ModelConfig(
            **sizes, source_vocab_size=vocabulary, target_vocab_size=vocabulary, max_positions=512
        )
        return Transformer(config)


def _learner(model: Transformer, precision: str, as_graphs: bool = False) -> Learner:
    graphs = "auto" if as_graphs else "off"
    options: dict[str, Any] = {"precision": precision, "cuda_graphs": graphs}
    config = TrainingConfig(max_steps=1, **options)
    return make_learner(model.train(), config)


def count_training(preset: str, precision: str, tokens: int) -> Counts:
    """Count the operations and copies of a training step with `tokens` target tokens in one micro-batch, and
    the waits of a step of a small model."""
    places = _count_small(precision, as_graphs=False).places  # and finds out whether Triton works
    batch = PackedBatch.of_size(tokens // LENGTH, LENGTH)
    with _without_data():
        learner = _learner(_model(preset), precision)
        learner.draw_dropout_key = lambda: 0  # type: ignore[method-assign]  # fake tensors have no values
        for parameter in learner.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        learner.optimizer.step()  # allocates the moments, as the first training step does
        learner.optimizer.zero_grad()
        learner.loss(learner.model, batch)  # tries kernels, as that step does
        with _Operations() as operations:
            learner.step([batch], tokens, 1e-3)
    return Counts(operations.counts["operation"], operations.counts["copy"], places.total(), places)


@functools.cache
def _count_small(precision: str, as_graphs: bool) -> Counts:
    """Count in a step of a small model with one micro-batch."""
    learner = _learner(_model("base", **NARROW, **SHALLOW), precision, as_graphs)
    batches = [PackedBatch.of_size(5, 9).pinned()]
    learner.step(batches, 45, 1e-3)
    with recording() as events:
        learner.step(batches, 45, 1e-3)
    operations, copies, waits = (events[kind].total() for kind in ("operation", "copy", "wait"))
    return Counts(operations, copies, waits, events["wait"])


def count_decoding(beams: int, as_graphs: bool) -> Counts:
    """Count per decoding step of a batch in bf16, in a session that is new, or after that as graphs. What
    precedes the first step and follows the last one is included."""
    sessions, rows = _sessions(beams)
    if as_graphs:
        sessions.search(Batch(rows, _decoding(beams, STEPS)))  # captures what the first search has run
    decode_next = Mock(side_effect=StaticDecoder.decode_next)
    with recording() as events, patch.object(StaticDecoder, "decode_next", partialmethod(decode_next)):
        sessions.search(Batch(rows, _decoding(beams, STEPS)))
    steps = events["operation"]["a CUDA graph"] - 1 if as_graphs else decode_next.call_count
    operations, copies, waits = (events[kind].total() / steps for kind in ("operation", "copy", "wait"))
    return Counts(operations, copies, waits, events["wait"])


@functools.cache
def _sessions(beams: int) -> tuple[Sessions, list[list[int]]]:
    """New sessions of a model whose weights are packed, and source ids."""
    torch.manual_seed(1)
    model = DecodingTransformer(
        _model("base", **NARROW, **SHALLOW).eval(), torch.bfloat16, low_projection=True
    )
    rows = [[*range(10, 10 + length), model.config.eos_id] for length in (4, 9)]
    Sessions([model]).search(Batch(rows, _decoding(beams, 1)))
    return Sessions([model]), rows


def _decoding(beams: int, steps: int) -> DecodingConfig:
    return DecodingConfig(beam_size=beams, max_length_ratio=0, max_length_offset=steps)


def main(others: bool = False) -> int:
    """Print the table of the usual steps, or of others. Returns 1 if a step fails, or waits more often than
    it may."""
    steps: list[tuple[str, float, Callable[[], Counts]]] = [
        ("training, {}, {}, {:,} tokens".format(*step), 0, partial(count_training, *step))
        for step in TRAINING
        if (step[:2] != ("base", "bf16")) == others
    ]
    if not others:
        steps.append(("training, bf16, as graphs", 0, partial(_count_small, "bf16", as_graphs=True)))
    for beams, as_graphs in product((1,) if others else (5,), (False, True)):
        name = f"decoding, 1+1 layers, beam {beams}{', as graphs' if as_graphs else ''}"
        steps.append((name, MAX_WAITS, partial(count_decoding, beams, as_graphs)))
    print(f"{'one step of':36}{'operations':>12}{'copies':>8}{'waits':>8}")
    problems = [problem for step in steps if (problem := _print_row(*step))]
    for problem in problems:
        print(f"problem: {problem}")
    return int(bool(problems))


def _print_row(name: str, max_waits: float, count: Callable[[], Counts]) -> str:
    """Print the counts of a step, and where it waits. Returns what is wrong."""
    try:
        counts = count()
    except Exception as error:
        line = str(error).partition("\n")[0]
        return f"{name}: {type(error).__name__}: {line} ({_place_of(error)})"
    digits = 1 if max_waits else 0
    print(
        f"{name:36}{counts.operations:12,.{digits}f}{counts.copies:8.{digits}f}{counts.waits:8.{2 * digits}f}"
    )
    for place, number in counts.places.most_common():
        print(f"    {number:3} {place}")
    if counts.waits > max_waits:
        return f"{name}: {counts.waits:.2f} waits, at most {max_waits} are expected"
    return ""


def _place_of(error: Exception) -> str:
    """The last line of mtrain that the error has passed."""
    frames = traceback.extract_tb(error.__traceback__)
    of_mtrain = [frame for frame in frames if frame.filename.startswith(f"{ROOT}/mtrain/")]
    return ", ".join(f"{frame.filename.removeprefix(f'{ROOT}/')}:{frame.lineno}" for frame in of_mtrain[-1:])
