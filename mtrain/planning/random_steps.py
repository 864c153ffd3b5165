"""Steps of random tokens, which `mtrain plan` times in place of those of a corpus that is not encoded yet."""

from collections.abc import Iterator
from itertools import cycle

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mtrain.config.model import ModelConfig
from mtrain.data.batch import Batch, collate
from mtrain.data.batching import BatchPlan
from mtrain.data.loader import Step
from mtrain.data.position import START
from mtrain.training.lengths import TrainingLengths


def random_steps(architecture: ModelConfig, lengths: TrainingLengths, plan: BatchPlan) -> Iterator[Step]:
    """Yield the steps of a plan without end, with random tokens in pairs of these lengths."""
    generator = np.random.default_rng(0)

    def ids(counts: npt.NDArray[np.integer], vocabulary: int) -> pa.ListArray:
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        return pa.ListArray.from_arrays(starts, generator.integers(vocabulary, size=starts[-1]))

    def batch(rows: npt.NDArray[np.int64]) -> Batch:
        source = ids(lengths.source[rows], architecture.source_vocab_size)
        target = ids(
            lengths.target[rows], 2 if architecture.is_classifier else architecture.target_vocab_size
        )
        return collate(source, target, architecture.pad_id, architecture.bos_id, rows.tolist())

    for step, tokens in cycle(zip(plan.steps, plan.step_tokens, strict=True)):
        yield Step(1, tokens, [batch(rows) for rows in step if len(rows)], list, START)
