"""New segmentations of encoded pairs, for subword sampling.

Sampling is pure Python, so it would slow down training in the same process: threads share Python's global
interpreter lock. Many pairs are therefore segmented in worker processes.
"""

import os
import random
from collections.abc import Callable, Generator
from contextlib import closing
from functools import cached_property
from pathlib import Path

import numpy as np

from mtrain.config.data import DataConfig
from mtrain.data.encoded import EncodedCorpus
from mtrain.data.rewrite import BLOCK, Cancelled, Key, ScratchStorage, Sides, from_lists, to_lists
from mtrain.data.shards import Rows
from mtrain.distributed.launch import read_launch
from mtrain.processes import WorkerPool, WorkerProcess, count_cores
from mtrain.tokenizer.sampling import make_resegment
from mtrain.tokenizer.tokenizer import Tokenizer
from mtrain.worker_messages import Answer, Message, Receive
from mtrain.worker_messages import serve as serve_tasks

# Worker processes have a lower priority than training on the same cores, except for the first window, which
# training waits for. On Linux, they then take 17% of cores that training uses completely, instead of 33%.
# With much less, small models would have to wait for the next window.
_NICE = 4
# Its arguments are the rows of a block, the key, and the number of the block.
ResegmentBlock = Callable[[Sides, Key, int], Sides]


class Resegmenter:
    """Samples new segmentations, which depend only on the seed, the key and the rows."""

    def __init__(self, data: DataConfig, tokenizer: Tokenizer, seed: int, scratch: Path):
        """`data.subword_sampling` must be set. Segmentations are written to temporary files in `scratch`."""
        self._block = _make_block_resegmenter(data, tokenizer, seed)
        folder = str(tokenizer.files[0].parent.resolve())
        self._settings = {"data": data.model_dump(mode="json"), "tokenizer": folder, "seed": seed}
        self._storage = ScratchStorage(tokenizer, scratch)
        self._calls = 0

    def __call__(self, corpus: EncodedCorpus, key: Key, cancelled: Cancelled) -> EncodedCorpus:
        """The rows of a corpus with new segmentations. Raises StorageError if they cannot be written;
        CancelledError if `cancelled`, which is called from time to time, returns true."""
        self._calls += 1
        with closing(self._blocks(corpus, key)) as blocks:
            return self._storage.replace_rows(corpus, blocks, cancelled)

    def _blocks(self, corpus: EncodedCorpus, key: Key) -> Generator[Sides, None, None]:
        """New segmentations of all rows, a block at a time."""

        def rows(block: int) -> Sides:
            return corpus.rows(np.arange(block * BLOCK, min((block + 1) * BLOCK, len(corpus))))

        def local(block: int) -> Sides:
            return self._block(rows(block), key, block)

        def remote(process: WorkerProcess, block: int) -> Sides:
            header = {"key": key, "block": block, "waited_for": self._calls == 1}
            answer = process.call(_to_message(rows(block), header))
            return _from_message(answer)

        blocks = range(-(-len(corpus) // BLOCK))
        if len(blocks) <= 1:  # starting a process takes longer
            yield from map(local, blocks)
        else:
            for _, new in self._pool.map(blocks, remote, local):
                yield new

    @cached_property
    def _pool(self) -> WorkerPool:
        return WorkerPool(__name__, Message(self._settings), count_processes())


def count_processes() -> int:
    """The number of processes that segment pairs: half of the cores, shared among the ranks of this machine.
    Each segments about 6,000 pairs of 13 words a second."""
    return max(1, count_cores() // 2 // read_launch().local_size)


def _make_block_resegmenter(data: DataConfig, tokenizer: Tokenizer, seed: int) -> ResegmentBlock:
    """A function that samples new segmentations of a block. They depend only on (seed, key, block).

    A pair that would become too long keeps its segmentation, so every epoch has the same rows.
    """
    assert data.subword_sampling is not None
    source = target = make_resegment(tokenizer.source, data.subword_sampling)
    if tokenizer.target is not tokenizer.source:
        target = make_resegment(tokenizer.target, data.subword_sampling)

    def resegment(block: Sides, key: Key, number: int) -> Sides:
        generator = random.Random(" ".join(map(str, (seed, *key, number))))
        rows: tuple[list[list[int]], list[list[int]]] = [], []
        for old in zip(*map(to_lists, block), strict=True):
            new = source(old[0], generator), target(old[1], generator)
            for side, ids in zip(rows, new if max(map(len, new)) <= data.max_length else old, strict=True):
                side.append(ids)
        return from_lists(rows[0]), from_lists(rows[1])

    return resegment


def _to_message(sides: Sides, header: dict[str, object]) -> Message:
    return Message(header, tuple(array.astype(np.int32).tobytes() for side in sides for array in side))


def _from_message(message: Message) -> Sides:
    arrays = [np.frombuffer(content, np.int32) for content in message.contents]
    return Rows(*arrays[:2]), Rows(*arrays[2:])


def serve() -> None:
    """The worker process: segment blocks until the pipe is closed."""
    serve_tasks(_prepare)


def _prepare(receive: Receive) -> Answer:
    settings = receive().header
    data, tokenizer = DataConfig.model_validate(settings["data"]), Tokenizer(Path(settings["tokenizer"]))
    resegment = _make_block_resegmenter(data, tokenizer, settings["seed"])
    has_low_priority = not hasattr(os, "nice")  # on Windows

    def answer(task: Message) -> Message:
        nonlocal has_low_priority
        if not task.header["waited_for"] and not has_low_priority:
            os.nice(_NICE)
            has_low_priority = True
        return _to_message(resegment(_from_message(task), task.header["key"], task.header["block"]), {})

    return answer
