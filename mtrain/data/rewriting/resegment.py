"""New ids for the pairs of a window: their text is changed by `data.augment`, and new segmentations are
sampled by `data.subword_sampling`.

This would slow down training in the same process, because threads share Python's global interpreter lock.
Many pairs are therefore segmented in worker processes.
"""

import os
import random
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import CancelledError
from contextlib import closing
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mtrain.config.sections.data import DataConfig
from mtrain.data.rewriting.augment_pairs import EncodedPair, PairAugmenter
from mtrain.data.rewriting.rewrite import BLOCK, Key, ScratchStorage, Sides, from_lists, to_lists
from mtrain.data.rewriting.throttle import Pace
from mtrain.data.store.encoded import EncodedCorpus
from mtrain.distributed.launch import read_launch
from mtrain.processes import WorkerPool, WorkerProcess, count_cores
from mtrain.tokenizer.rows import Rows
from mtrain.tokenizer.sampling import Resegment, make_resegment
from mtrain.tokenizer.tokenizer import Tokenizer

# Worker processes have a lower priority than training on the same cores, except for the first window, which
# training waits for.
_NICE = 15
# Its arguments are the rows of a block, the key, and the number of the block.
ResegmentBlock = Callable[[Sides, Key, int], Sides]


class ResegmentTask(NamedTuple):
    """A block to segment in a worker process."""

    sides: Sides
    key: Key
    block: int  # number of the block
    waited_for: bool  # whether training waits for it


class Resegmenter:
    """Changes and segments pairs again. The result depends only on the settings, the seed, the key and the
    rows."""

    def __init__(self, data: DataConfig, tokenizer: Tokenizer, seed: int, scratch: Path):
        """The ids are written to temporary files in `scratch`."""
        self._augment, self._seed = _make_augmenter(data, tokenizer), seed
        self._block = _make_block_resegmenter(data, tokenizer, seed)
        self._prepare = partial(_prepare, data, tokenizer.files[0].parent.resolve(), seed)
        self._storage = ScratchStorage(tokenizer, scratch)
        self._calls = 0

    def __call__(self, corpus: EncodedCorpus, key: Key, pace: Pace) -> EncodedCorpus:
        """The rows of a corpus with new ids, and rows of noise after them. Raises StorageError if they cannot
        be written; CancelledError if they are no longer needed. `pace` says when a block may start."""
        self._calls += 1
        with closing(self._blocks(corpus, key, pace)) as blocks:
            return self._storage.replace_rows(corpus, chain(blocks, self._noise(corpus, key)), pace)

    def _noise(self, corpus: EncodedCorpus, key: Key) -> list[Sides]:
        """A block with the noise that is added to a corpus, unless there is none."""
        if self._augment is None:
            return []
        pairs = self._augment.noise(len(corpus), _generator("noise", self._seed, *key))
        return [_from_pairs(pairs)] if pairs else []

    def _blocks(self, corpus: EncodedCorpus, key: Key, pace: Pace) -> Generator[Sides, None, None]:
        """New ids of all rows, a block at a time."""

        def rows(block: int) -> Sides:
            return corpus.rows(np.arange(block * BLOCK, min((block + 1) * BLOCK, len(corpus))))

        def local(block: int) -> Sides:
            with pace.measured():
                return self._block(rows(block), key, block)

        def remote(process: WorkerProcess, block: int) -> Sides:
            with pace.measured():
                sides: Sides = process.call(ResegmentTask(rows(block), key, block, self._calls == 1))
            return sides

        count = -(-len(corpus) // BLOCK)
        if count <= 1:  # starting a process takes longer
            yield from map(local, range(count))
        else:
            blocks = pace.spread(count, self._pool.count)
            try:
                for _, new in self._pool.map(blocks, remote, local, pace.require_needed):
                    yield new
            except CancelledError:
                del self._pool  # it is closed
                raise

    @cached_property
    def _pool(self) -> WorkerPool:
        return WorkerPool(self._prepare, count_processes())


def count_processes() -> int:
    """The number of processes that segment pairs: half of the cores, shared among the ranks of this
    machine."""
    return max(1, count_cores() // 2 // read_launch().local_size)


def _make_augmenter(data: DataConfig, tokenizer: Tokenizer) -> PairAugmenter | None:
    return None if data.augment is None else PairAugmenter(data.augment, data, tokenizer)


def _make_block_resegmenter(data: DataConfig, tokenizer: Tokenizer, seed: int) -> ResegmentBlock:
    """A function that changes the pairs of a block and samples new segmentations. They depend only on (seed,
    key, block).

    A pair that would become too long keeps its text or segmentation, so every epoch has the same rows.
    """
    augment, strength = _make_augmenter(data, tokenizer), data.subword_sampling
    samplers: list[Resegment] = []
    if strength is not None:
        samplers = [make_resegment(tokenizer.source, strength)] * 2
        if tokenizer.target is not tokenizer.source:
            samplers[1] = make_resegment(tokenizer.target, strength)

    def resegment(block: Sides, key: Key, number: int) -> Sides:
        if augment is not None:
            pairs = list(zip(*map(to_lists, block), strict=True))
            block = _from_pairs(augment(pairs, _generator("augment", seed, *key, number)))
        if samplers:
            # With a key of its own, because the order of batches depends on [seed, *key].
            sequence = np.random.SeedSequence([seed, *key], spawn_key=(1, number))
            generator = np.random.default_rng(sequence)
            new = samplers[0](block[0], generator), samplers[1](block[1], generator)
            block = _choose(new, block, data.max_length)
        return block

    return resegment


def _choose(new: Sides, old: Sides, max_length: int) -> Sides:
    """The new pairs, but the old ones in place of those that are longer than `max_length`."""
    count = len(new[0].lengths)
    fits = np.maximum(new[0].lengths, new[1].lengths) <= max_length
    chosen = np.arange(count) + np.where(fits, 0, count)
    source, target = (Rows.join(both).take(chosen) for both in zip(new, old, strict=True))
    return source, target


def _generator(*parts: object) -> random.Random:
    """Random numbers that depend on some values."""
    return random.Random(" ".join(map(str, parts)))


def _from_pairs(pairs: Sequence[EncodedPair]) -> Sides:
    sources, targets = zip(*pairs, strict=True)
    return from_lists(sources), from_lists(targets)


def _prepare(data: DataConfig, tokenizer_folder: Path, seed: int) -> Callable[[ResegmentTask], Sides]:
    """The function that segments a block in a worker process."""
    tokenizer = Tokenizer(tokenizer_folder)
    tokenizer.set_threads(1)
    resegment = _make_block_resegmenter(data, tokenizer, seed)
    has_low_priority = not hasattr(os, "nice")  # on Windows

    def work(task: ResegmentTask) -> Sides:
        nonlocal has_low_priority
        if not task.waited_for and not has_low_priority:
            os.nice(_NICE)
            has_low_priority = True
        return resegment(task.sides, task.key, task.block)

    return work
