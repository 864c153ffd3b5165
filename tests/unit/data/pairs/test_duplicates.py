"""Counting repeated keys in bounded memory."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtrain.data.pairs.duplicates import DuplicateCounter

KEYS = st.integers(0, 2**64 - 1)


@given(blocks=st.lists(st.lists(KEYS | st.integers(0, 3), max_size=9), max_size=9))
def test_few_keys_are_counted_exactly(blocks: list[list[int]]):
    counter, keys = DuplicateCounter(100), [key for block in blocks for key in block]
    for block in blocks:
        counter.add(np.array(block, np.uint64))
    assert counter.duplicates() == (len(keys) - len(set(keys)), 0)


@pytest.mark.parametrize("repeated", [0, 20_000, 200_000])
def test_many_keys_are_estimated_with_the_stated_error(repeated: int):
    generator = np.random.default_rng(1)
    keys = generator.integers(0, 2**64, 200_000, np.uint64)
    keys = np.concatenate([keys, keys[:repeated]])
    generator.shuffle(keys)
    errors = []
    for _ in range(20):
        counter = DuplicateCounter(limit=10_000)
        factor = np.uint64(2 * generator.integers(2**62) + 1)  # odd, so that keys remain distinct
        for block in np.array_split(keys * factor, 50):
            counter.add(block)
        found, error = counter.duplicates()
        assert 0 < error < 0.015 * 200_000
        errors.append((found - repeated) / error)
    assert max(map(abs, errors)) < 4 and np.std(errors) < 1.5


def test_a_key_that_is_repeated_more_often_than_keys_fit_in_memory():
    counter = DuplicateCounter(limit=10)
    for _ in range(30):
        counter.add(np.full(1000, 7, np.uint64))
    assert counter.duplicates() == (29_999, 0)


def test_some_keys_that_are_repeated_very_often():
    """Frequent keys hardly change the error, in the sample or not."""
    counter = DuplicateCounter(limit=1000)
    generator = np.random.default_rng(1)
    for _ in range(30):
        counter.add(np.concatenate([np.full(5000, 7), generator.integers(0, 2**63, 5000)]).astype(np.uint64))
    found, error = counter.duplicates()
    assert abs(found - 149_999) < 3 * error < 0.15 * found
