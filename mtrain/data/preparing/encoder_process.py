"""Worker processes that encode blocks of pairs. They answer with arrays in the format of safetensors."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from safetensors.numpy import load, save

from mtrain.data.pairs.rejections import Codes
from mtrain.data.preparing.encoder import EncodedBlock, Encoder
from mtrain.data.reading.blocks import RawBlock
from mtrain.data.scanning.block_messages import pack_block, unpack_block
from mtrain.processes import Job, map_tasks
from mtrain.tokenizer.rows import Ids, Rows
from mtrain.worker_messages import Answer, Message, Receive
from mtrain.worker_messages import serve as serve_tasks


class EncodingTask(NamedTuple):
    """A block to encode."""

    shard: int  # index, from 0
    corpus: int  # index, from 0
    raw: RawBlock
    is_last: bool  # of its shard
    codes: Codes | None  # of its pairs, if there are filters


def encode_all(
    encoder: Encoder, tasks: Iterable[EncodingTask], workers: int
) -> Iterator[tuple[EncodingTask, EncodedBlock]]:
    """Encode blocks in order, with `workers` processes if these are several. Raises what `Encoder.encode`
    raises."""

    def encode(task: EncodingTask) -> EncodedBlock:
        return encoder.encode(task.raw, task.corpus, task.codes)

    def pack(task: EncodingTask) -> Message:
        header = {"corpus": task.corpus, "is_filtered": task.codes is not None}
        packed = pack_block(task.raw, encoder.corpora[task.corpus], header)
        codes = () if task.codes is None else (task.codes.tobytes(),)
        return packed._replace(contents=(*packed.contents, *codes))

    return map_tasks(Job(__name__, Message(encoder.settings()), pack, _unpack, encode), tasks, workers)


def serve() -> None:
    """The worker process: encode blocks until the pipe is closed."""
    serve_tasks(_prepare)


def _prepare(receive: Receive) -> Answer:
    encoder = Encoder.with_settings(receive().header)

    def answer(task: Message) -> Message:
        corpus = task.header["corpus"]
        codes = np.frombuffer(task.contents[-1], np.uint8) if task.header["is_filtered"] else None
        return _pack(encoder.encode_block(unpack_block(task, encoder.corpora[corpus]), corpus, codes))

    return answer


def _pack(block: EncodedBlock) -> Message:
    arrays: dict[str, Ids] = {"number": block.numbers}
    for name, side in zip(("source", "target"), block.sides, strict=True):
        arrays |= {name: side.ids, f"{name}_length": side.lengths}
    return Message({"dropped": block.dropped, "pairs": block.pairs}, (save(arrays),))


def _unpack(message: Message) -> EncodedBlock:
    arrays = load(message.contents[0])
    source, target = (Rows(arrays[name], arrays[f"{name}_length"]) for name in ("source", "target"))
    return EncodedBlock((source, target), arrays["number"], **message.header)
