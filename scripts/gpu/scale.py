"""What all parts share: the device, the sizes of the models, and the sentences."""

from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mtrain.config.sections.model import ModelConfig
from mtrain.config.sections.presets import PRESETS
from mtrain.data.epochs.batching import Division, plan_batches
from mtrain.data.epochs.loader import StepInput
from mtrain.data.epochs.packed_batch import AnyBatch, PackedBatch
from mtrain.model.transformer import Transformer
from mtrain.planning.random_steps import random_steps

MEAN_TOKENS = 26  # of a sentence with EOS
LONGEST = 150  # tokens
EOS = 3  # the default of ModelConfig

Lengths = npt.NDArray[np.int64]


class CheckFailed(Exception):
    """A check has failed."""


@dataclass(frozen=True)
class Scale:
    """A device, and whether all sizes are tiny, to test the parts themselves in seconds on a CPU."""

    device: torch.device
    tiny: bool = False

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a CUDA device."""
        return self.device.type == "cuda"

    @property
    def seconds(self) -> float:
        """The minimum length of a measured span."""
        return 0.2 if self.tiny else 4.0

    @property
    def length(self) -> int:
        """Tokens of each translation."""
        return 6 if self.tiny else 30

    def model_config(self, preset: str, **changes: float) -> ModelConfig:
        """A preset with 32,000 tokens in each vocabulary."""
        vocabulary = 500 if self.tiny else 32_000
        sizes: dict[str, Any] = PRESETS["micro" if self.tiny else preset] | changes
        return ModelConfig(
            **sizes, source_vocab_size=vocabulary, target_vocab_size=vocabulary, max_positions=512
        )

    def model(self, config: ModelConfig) -> Transformer:
        """A model with random weights, which are the same in each process."""
        torch.manual_seed(1)
        return Transformer(config).to(self.device)

    def steps(
        self, config: ModelConfig, batch_tokens: int, count: int = 24, padded: bool = False
    ) -> list[StepInput]:
        """Steps of up to `batch_tokens` padded tokens, ready to be copied to the device. The batches are of
        the kind that suits the device, or padded."""
        if self.tiny:
            batch_tokens, count = min(batch_tokens, 200), min(count, 4)
        generator = np.random.default_rng(1)
        source = _lengths(generator, max(2000, count * batch_tokens // 12))
        target = _limited(source * generator.lognormal(0, 0.15, len(source)))
        plan = plan_batches((source, target), batch_tokens, Division(batch_tokens), (1, 0))
        kind = torch.device("cpu") if padded else self.device
        steps = list(islice(random_steps(config, (source, target), plan, kind), count))
        if not self.on_gpu:
            return steps
        return [step._replace(batches=list(map(_pinned, step.batches))) for step in steps]

    def sentences(self, config: ModelConfig, count: int) -> list[list[int]]:
        """Random source ids without EOS, the longest sentence first."""
        generator = np.random.default_rng(2)
        lengths = np.sort(_lengths(generator, count))[::-1]
        return [
            generator.integers(EOS + 1, config.source_vocab_size, length - 1).tolist() for length in lengths
        ]


def _pinned(batch: AnyBatch) -> AnyBatch:
    """The batch in pinned memory, so that copying it to a GPU does not block the host."""
    if isinstance(batch, PackedBatch):
        return batch.pinned()
    tensors: dict[str, Any] = {
        name: x.pin_memory() for name, x in vars(batch).items() if isinstance(x, torch.Tensor)
    }
    return replace(batch, **tensors)


def _lengths(generator: np.random.Generator, count: int) -> Lengths:
    """Random lengths including EOS, log-normally distributed like the lengths of real sentences."""
    sigma = 0.6
    return _limited(generator.lognormal(np.log(MEAN_TOKENS) - sigma**2 / 2, sigma, count))


def _limited(lengths: npt.NDArray[np.float64]) -> Lengths:
    return np.clip(lengths, 3, LONGEST).astype(np.int64)
