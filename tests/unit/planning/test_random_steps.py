"""Random steps have the lengths of the plan, in batches of the kind that suits the device."""

from itertools import islice

import numpy as np
import pytest
import torch

from mtrain.config.sections.model import ModelConfig
from mtrain.data.epochs.batching import BatchPlan
from mtrain.data.epochs.packed_batch import batch_type
from mtrain.planning.random_steps import random_steps

SOURCE, TARGET = np.array([3, 5, 2, 7]), np.array([4, 4, 6, 1])
PLAN = BatchPlan([[np.array([0, 1]), np.array([], np.int64)], [np.array([2]), np.array([3])]], [8, 7])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("head", ["translation", "pair_classifier"])
def test_steps_repeat_those_of_the_plan(device, head):
    words = {"source_vocab_size": 11, "target_vocab_size": 13, "max_positions": 9}
    model, gpu = ModelConfig(head=head, **words), torch.device(device)
    steps = list(islice(random_steps(model, (SOURCE, TARGET), PLAN, gpu), 5))
    assert [step.tokens for step in steps] == [8, 7, 8, 7, 8]
    assert [[batch.rows for batch in step.batches] for step in steps[:2]] == [[[0, 1]], [[2], [3]]]
    for step in steps:
        for batch in step.batches:
            assert isinstance(batch, batch_type(gpu))
            assert batch.target_tokens == TARGET[batch.rows].sum()
            assert int(batch.inputs().source.max()) < 11
            assert int(batch.labels.max()) < (2 if head == "pair_classifier" else 13)
