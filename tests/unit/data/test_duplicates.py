"""Counting repeated keys in bounded memory."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtrain.data.duplicates import DuplicateCounter

KEYS = st.integers(-(2**63), 2**63 - 1)


@given(blocks=st.lists(st.lists(KEYS | st.integers(0, 3), max_size=9), max_size=9))
def test_few_keys_are_counted_exactly(blocks: list[list[int]]):
    counter, keys = DuplicateCounter(), [key for block in blocks for key in block]
    for block in blocks:
        counter.add(np.array(block, np.int64))
    assert counter.duplicates() == len(keys) - len(set(keys))


@pytest.mark.parametrize("repeated", [0, 20_000, 200_000])
def test_many_keys_are_estimated(repeated: int):
    generator = np.random.default_rng(1)
    keys = generator.integers(-(2**63), 2**63, 200_000)
    keys = np.concatenate([keys, keys[:repeated]])
    generator.shuffle(keys)
    counter = DuplicateCounter(limit=10_000)
    for block in np.array_split(keys, 50):
        counter.add(block)
    assert abs(counter.duplicates() - repeated) <= 0.1 * repeated


def test_a_key_that_is_repeated_more_often_than_keys_fit_in_memory():
    counter = DuplicateCounter(limit=10)
    for _ in range(30):
        counter.add(np.full(1000, 7, np.int64))
    assert counter.duplicates() == 29_999
