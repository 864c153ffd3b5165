"""Training steps with random tokens, to time how long steps take."""

from collections.abc import Iterator
from itertools import cycle

import numpy as np
import numpy.typing as npt
import torch

from mtrain.config.sections.model import ModelConfig
from mtrain.data.epochs.batching import BatchPlan
from mtrain.data.epochs.loader import StepInput, make_batch
from mtrain.data.epochs.packed_batch import AnyBatch
from mtrain.data.epochs.schedule import Position
from mtrain.tokenizer.rows import Rows
from mtrain.training.setup.lengths import Lengths


def random_steps(
    architecture: ModelConfig, lengths: tuple[Lengths, Lengths], plan: BatchPlan, device: torch.device
) -> Iterator[StepInput]:
    """Yield the steps of a plan endlessly, with random tokens in pairs of these source and target lengths,
    because the corpus may not be encoded yet. The batches are of the kind that suits the device."""
    generator = np.random.default_rng(0)

    def ids(counts: npt.NDArray[np.integer], vocabulary: int) -> Rows:
        return Rows(generator.integers(vocabulary, size=counts.sum()), counts)

    def batch(rows: npt.NDArray[np.int64]) -> AnyBatch:
        source = ids(lengths[0][rows], architecture.source_vocab_size)
        target = ids(lengths[1][rows], 2 if architecture.is_classifier else architecture.target_vocab_size)
        special = architecture.pad_id, architecture.bos_id
        return make_batch(device, source, target, *special, rows.tolist())

    for step, tokens in cycle(zip(plan.steps, plan.step_tokens, strict=True)):
        yield StepInput(1, tokens, [batch(rows) for rows in step if len(rows)], list, Position())
