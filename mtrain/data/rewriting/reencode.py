"""Encodes the pairs of a window again: their text is changed by `data.augment`, and new segmentations are
sampled by `data.subword_sampling`.

This would slow down training in the same process, because threads share Python's global interpreter lock.
Many pairs are therefore encoded in worker processes.
"""

import os
import random
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from functools import cached_property
from pathlib import Path

import numpy as np

from mtrain.config.data import DataConfig
from mtrain.data.rewriting.augment_pairs import EncodedPair, PairAugmenter
from mtrain.data.rewriting.rewrite import BLOCK, Blocks, Key, Sides
from mtrain.data.rewriting.throttle import Throttle
from mtrain.data.store.encoded import EncodedCorpus
from mtrain.distributed.launch import read_launch
from mtrain.processes import WorkerPool, WorkerProcess, count_cores
from mtrain.tokenizer.rows import Rows
from mtrain.tokenizer.sampling import Resegment, make_resegment
from mtrain.tokenizer.tokenizer import Tokenizer
from mtrain.worker_messages import Answer, Message, Receive
from mtrain.worker_messages import serve as serve_tasks

# Worker processes have a lower priority than training on the same cores, except for the first window, which
# training waits for.
_NICE = 15
# Its arguments are the rows of a block, the key, and the number of the block.
ReencodeBlock = Callable[[Sides, Key, int], Sides]


class Reencoder:
    """Changes and segments pairs again. The result depends only on the settings, the seed, the key and the
    rows."""

    def __init__(self, data: DataConfig, tokenizer: Tokenizer, seed: int):
        self._seed = seed
        self._augment = _make_augmenter(data, tokenizer)
        self._block = _make_block_reencoder(data, tokenizer, seed)
        folder = str(tokenizer.files[0].parent.resolve())
        self._settings = {"data": data.model_dump(mode="json"), "tokenizer": folder, "seed": seed}
        self._calls = 0

    def __call__(self, corpus: EncodedCorpus, key: Key, throttle: Throttle) -> Blocks:
        """Yield the rows of a corpus with new ids, and rows of noise after them, in blocks. Raises
        CancelledError if they are no longer needed."""
        self._calls += 1
        yield from self._reencoded(corpus, key, throttle)
        if self._augment is not None:
            noise = self._augment.noise(len(corpus), _generator("noise", self._seed, *key))
            if noise:
                yield _from_pairs(noise)

    def _reencoded(self, corpus: EncodedCorpus, key: Key, throttle: Throttle) -> Blocks:

        def rows(block: int) -> Sides:
            return corpus.fetch(np.arange(block * BLOCK, min((block + 1) * BLOCK, len(corpus))))

        def local(block: int) -> Sides:
            with throttle.measured():
                return self._block(rows(block), key, block)

        def remote(process: WorkerProcess, block: int) -> Sides:
            header = {"key": key, "block": block, "waited_for": self._calls == 1}
            with throttle.measured():
                answer = process.call(_to_message(rows(block), header))
            return _from_message(answer)

        count = -(-len(corpus) // BLOCK)
        if count <= 1:  # starting a process takes longer
            yield from map(local, range(count))
        else:
            blocks = throttle.spread(count, self._pool.count)
            try:
                for _, new in self._pool.map(blocks, remote, local, throttle.require_needed):
                    yield new
            except CancelledError:
                del self._pool  # it is closed
                raise

    @cached_property
    def _pool(self) -> WorkerPool:
        return WorkerPool(__name__, Message(self._settings), count_processes())


def count_processes() -> int:
    """The number of processes that encode pairs: half of the cores, shared among the ranks of this
    machine."""
    return max(1, count_cores() // 2 // read_launch().local_size)


def _make_augmenter(data: DataConfig, tokenizer: Tokenizer) -> PairAugmenter | None:
    return None if data.augment is None else PairAugmenter(data.augment, data, tokenizer)


def _make_block_reencoder(data: DataConfig, tokenizer: Tokenizer, seed: int) -> ReencodeBlock:
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

    def reencode(block: Sides, key: Key, number: int) -> Sides:
        if augment is not None:
            pairs = list(zip(*(side.to_lists() for side in block), strict=True))
            block = _from_pairs(augment(pairs, _generator("augment", seed, *key, number)))
        if samplers:
            # With a key of its own, because the order of batches depends on [seed, *key].
            sequence = np.random.SeedSequence([seed, *key], spawn_key=(1, number))
            generator = np.random.default_rng(sequence)
            new = samplers[0](block[0], generator), samplers[1](block[1], generator)
            block = _choose(new, block, data.max_length)
        return block

    return reencode


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
    return Rows.from_lists(sources), Rows.from_lists(targets)


def _to_message(sides: Sides, header: dict[str, object]) -> Message:
    return Message(header, tuple(array.astype(np.int32).tobytes() for side in sides for array in side))


def _from_message(message: Message) -> Sides:
    arrays = [np.frombuffer(content, np.int32) for content in message.contents]
    return Rows(*arrays[:2]), Rows(*arrays[2:])


def serve() -> None:
    """The worker process: encode blocks until the pipe is closed."""
    serve_tasks(_prepare)


def _prepare(receive: Receive) -> Answer:
    settings = receive().header
    data, tokenizer = DataConfig.model_validate(settings["data"]), Tokenizer(Path(settings["tokenizer"]))
    tokenizer.set_threads(1)
    reencode = _make_block_reencoder(data, tokenizer, settings["seed"])
    has_low_priority = not hasattr(os, "nice")  # on Windows

    def answer(task: Message) -> Message:
        nonlocal has_low_priority
        if not task.header["waited_for"] and not has_low_priority:
            os.nice(_NICE)
            has_low_priority = True
        return _to_message(reencode(_from_message(task), task.header["key"], task.header["block"]), {})

    return answer
