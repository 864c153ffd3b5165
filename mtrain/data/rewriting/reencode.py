"""Encodes the pairs of a window again: their text is changed by `data.augment`, and new segmentations are
sampled by `data.subword_sampling`.

This would slow down training in the same process, because threads share Python's global interpreter lock.
Many pairs are therefore encoded in worker processes.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from functools import cache, cached_property, partial
from typing import NamedTuple

import numpy as np

from mtrain.config.sections.data import DataConfig
from mtrain.data import are_too_long
from mtrain.data.rewriting.augment_pairs import EncodedPair, PairAugmenter
from mtrain.data.rewriting.rewrite import BLOCK, Blocks, Key, make_generator, raise_if_cancelled
from mtrain.data.store.shards import EncodedCorpus
from mtrain.distributed.launch import read_launch
from mtrain.processes.cores import count_cores
from mtrain.processes.pool import WorkerPool, WorkerProcess
from mtrain.tokenizer.rows import Rows, Sides
from mtrain.tokenizer.sampling import Resegment, make_resegment
from mtrain.tokenizer.tokenizer import Tokenizer

# Worker processes have a lower priority than training on the same cores, except for the first window, which
# training waits for.
_NICE = 15


class ReencodeTask(NamedTuple):
    """The task of encoding one block again."""

    sides: Sides
    key: Key
    block: int  # number of the block
    in_background: bool = False  # whether a worker process does it while training continues


class BlockReencoder:
    """Changes the pairs of a block, and samples new segmentations. They depend only on (seed, key, block)."""

    def __init__(self, data: DataConfig, tokenizer: Tokenizer, seed: int):
        self._seed, self._max_length = seed, data.max_length
        self.augment = None if data.augment is None else PairAugmenter(data.augment, data, tokenizer)
        self._samplers: list[Resegment] = []
        if (strength := data.subword_sampling) is not None:
            sampler = cache(partial(make_resegment, strength=strength))  # both sides may share a vocabulary
            self._samplers = [sampler(tokenizer.source), sampler(tokenizer.target)]
        self._has_low_priority = not hasattr(os, "nice")  # which Windows lacks

    def __call__(self, task: ReencodeTask) -> Sides:
        """The new rows of a block. A pair that would become too long keeps its text or segmentation, so every
        epoch has the same rows."""
        if task.in_background and not self._has_low_priority:
            os.nice(_NICE)
            self._has_low_priority = True
        block, key, number = task.sides, task.key, task.block
        if self.augment is not None:
            pairs = list(zip(block[0].to_lists(), block[1].to_lists(), strict=True))
            block = _from_pairs(self.augment(pairs, make_generator("augment", self._seed, *key, number)))
        if self._samplers:
            # With a key of its own, because the order of batches depends on [seed, *key].
            sequence = np.random.SeedSequence([self._seed, *key], spawn_key=(1, number))
            generator = np.random.default_rng(sequence)
            source, target = self._samplers
            new = source(block[0], generator), target(block[1], generator)
            block = _choose(new, block, self._max_length)
        return block


class Reencoder:
    """Changes and segments pairs again. The result depends only on the settings, the seed, the key and the
    rows."""

    def __init__(self, data: DataConfig, tokenizer: Tokenizer, seed: int):
        self._seed = seed
        self._make_reencoder = partial(BlockReencoder, data, tokenizer, seed)
        self._reencode_block = self._make_reencoder()
        self._calls = 0

    def __call__(self, corpus: EncodedCorpus, key: Key, cancelled: Callable[[], bool]) -> Blocks:
        """Yield the rows of a corpus with new ids, and rows of noise after them, in blocks. Raises
        CancelledError if `cancelled` returns true."""
        self._calls += 1
        yield from self._reencoded(corpus, key, partial(raise_if_cancelled, cancelled))
        if (augment := self._reencode_block.augment) is not None:
            noise = augment.noise(corpus.expected_pairs, make_generator("noise", self._seed, *key))
            if noise:
                yield _from_pairs(noise)

    def _reencoded(self, corpus: EncodedCorpus, key: Key, check: Callable[[], None]) -> Blocks:
        def task(block: int, in_background: bool = False) -> ReencodeTask:
            rows = np.arange(block * BLOCK, min((block + 1) * BLOCK, len(corpus)))
            return ReencodeTask(corpus.fetch(rows), key, block, in_background)

        def local(block: int) -> Sides:
            return self._reencode_block(task(block))

        def remote(process: WorkerProcess, block: int) -> Sides:
            sides: Sides = process.call(task(block, in_background=self._calls > 1))
            return sides

        count = -(-len(corpus) // BLOCK)
        if count <= 1:  # starting a process takes longer
            yield from map(local, range(count))
        else:
            try:
                for _, new in self._pool.map(range(count), remote, local, check):
                    yield new
            except CancelledError:
                del self._pool  # it is closed
                raise

    @cached_property
    def _pool(self) -> WorkerPool:
        return WorkerPool(self._make_reencoder, count_processes())


def count_processes() -> int:
    """The number of processes that encode pairs: half of the cores, shared among the ranks of this
    machine."""
    return max(1, count_cores() // 2 // read_launch().local_size)


def _choose(new: Sides, old: Sides, max_length: int) -> Sides:
    """The new pairs, except that the old pair replaces a new pair longer than `max_length`."""
    count = len(new[0].lengths)
    too_long = are_too_long(new[0].lengths, new[1].lengths, max_length)
    chosen = np.arange(count) + np.where(too_long, count, 0)
    source, target = (Rows.join(both).take(chosen) for both in zip(new, old, strict=True))
    return source, target


def _from_pairs(pairs: Sequence[EncodedPair]) -> Sides:
    sources, targets = zip(*pairs, strict=True)
    return Rows.from_lists(sources), Rows.from_lists(targets)
