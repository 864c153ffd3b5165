"""The costs of training, as `mtrain plan` predicts them and as operations show them."""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from mtrain.config.load import validate
from mtrain.config.schema import Config
from mtrain.config.sections.model import ModelConfig
from mtrain.data.epochs.batching import Batch
from mtrain.model.transformer import Transformer
from mtrain.planning.cost import TrainingDevice
from mtrain.planning.estimate import Estimator
from mtrain.planning.hardware import find_hardware
from mtrain.training.setup.lengths import TrainingLengths
from mtrain.training.step.average import WeightAverage
from mtrain.training.step.learner import Learner

VOCABULARIES = {"tiny": 8_000, "small": 8_000, "base": 32_000}
PAIRS, LENGTH = 128, 32  # of each step, which is one micro-batch


class Costs(NamedTuple):
    """The costs of training: FLOPs of a step, and bytes at peak."""

    flops: float
    memory: int


class PeakMemory(TorchDispatchMode):
    """Tracks the memory of the tensors that operations return, until the end of the block.

    It does not see memory that an operation allocates and frees itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.current = self.peak = 0
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known:
            return
        self._known.add(storage)
        size = storage.nbytes()
        self.current += size
        self.peak = max(self.peak, self.current)
        weakref.finalize(storage, self._remove, size)

    def _remove(self, size: int) -> None:
        self.current -= size


def make_config(preset: str, **sections: Mapping[str, object]) -> tuple[Config, ModelConfig]:
    """A config of a preset, with changed sections, and its architecture."""
    corpus = {
        "source_lang": "en",
        "target_lang": "de",
        "train": {"toy": "train"},
        "validation": {"holdout": 1},
    }
    raw: dict[str, Any] = {"run_dir": "unused", "data": {**corpus, "max_length": LENGTH}}
    raw["model"] = {"preset": preset, **sections.get("model", {})}
    recipe = {"batch_tokens": PAIRS * LENGTH, "max_steps": 2, "learning_rate": 1e-3, "warmup_steps": 1}
    raw["training"] = {**recipe, **sections.get("training", {})}
    config = validate(Config, raw, "the measurement")
    size = VOCABULARIES[preset]
    words = {"source_vocab_size": size, "target_vocab_size": size, "max_positions": LENGTH}
    return config, ModelConfig(**config.model.model_dump(), **words)


def predict(config: Config, architecture: ModelConfig) -> Costs:
    """The costs by the formulas of `mtrain plan`."""
    lengths = np.full(PAIRS * 2, LENGTH)
    pairs = TrainingLengths(lengths, lengths, np.ones(len(lengths)), 1.0, True, 1, (1, 0), "measurement")
    device = TrainingDevice(find_hardware("cpu"), config.training.precision)
    estimator = Estimator(config, architecture, pairs, device)
    return Costs(estimator.step().flops, estimator.memory()["total"])


def measure(config: Config, architecture: ModelConfig) -> Costs:
    """The costs of real steps, as operations show them."""
    with PeakMemory() as memory:
        learner = rehearse(config, architecture)
        with FlopCounterMode(display=False) as counter:
            step(learner)
    return Costs(counter.get_total_flops(), memory.peak)


def rehearse(config: Config, architecture: ModelConfig) -> Learner:
    """A learner after the rehearsal that training begins with."""
    model = Transformer(architecture).train()
    learner, average = Learner(model, config.training), WeightAverage(model, config.training)
    learner.dry_run(random_batch(PAIRS, LENGTH, LENGTH, architecture.target_vocab_size))
    average.update(1)
    learner.average = average  # type: ignore[attr-defined]  # lives as long as the learner
    return learner


def step(learner: Learner) -> None:
    """Take an optimizer step."""
    batch = random_batch(PAIRS, LENGTH, LENGTH, learner.model.config.target_vocab_size)
    learner.step([batch], batch.target_tokens, rate=1e-4)


def random_batch(pairs: int, source: int, target: int, vocabulary: int) -> Batch:
    """A micro-batch of random tokens, without padding. `source` and `target` are the lengths of its pairs."""
    sources = torch.randint(4, vocabulary, (pairs, source))
    targets = torch.randint(4, vocabulary, (pairs, target))
    keep = torch.ones_like(sources, dtype=torch.bool)
    return Batch(sources, keep, targets, targets, targets.numel(), list(range(pairs)))
