"""Worker processes that encode blocks of pairs. They answer with arrays in the format of safetensors."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from typing import NamedTuple

from safetensors.numpy import load, save

from mtrain.data.block_messages import pack_block, unpack_block
from mtrain.data.corpus import START, RawBlock
from mtrain.data.encoder import EncodedBlock, Encoder
from mtrain.data.shards import Ids, Rows
from mtrain.errors import DataError
from mtrain.processes import Message, WorkerPool, WorkerProcess
from mtrain.processes import serve as serve_tasks


class Task(NamedTuple):
    """A block to encode; None after the last block of a shard."""

    shard: int  # index, from 0
    corpus: int  # index, from 0
    raw: RawBlock | None


Encoded = tuple[Task, EncodedBlock | None]


def encode_all(encoder: Encoder, tasks: Iterable[Task], workers: int) -> Iterator[Encoded]:
    """Encode blocks in order, with `workers` processes if these are several. Raises what encoding raises."""

    def encode(task: Task) -> EncodedBlock | None:
        return task.raw and encoder.encode(task.raw, task.corpus)

    def call(process: WorkerProcess, task: Task) -> EncodedBlock | None:
        return task.raw and _call(process, encoder, task.raw, task.corpus)

    if workers == 1:
        yield from ((task, encode(task)) for task in tasks)
        return
    with closing(WorkerPool(__name__, Message(encoder.settings()), workers)) as pool:
        yield from pool.map(tasks, remote=call, local=encode)


def _call(process: WorkerProcess, encoder: Encoder, raw: RawBlock, corpus: int) -> EncodedBlock:
    """Encode a block in a process. Raises DataError as `Encoder.encode` does; WorkerEndedError if the process
    has ended."""
    message = pack_block(raw, encoder.corpora[corpus], {"corpus": corpus})
    answer, contents = process.call(message)
    if "error" in answer:
        raise DataError(answer["error"])
    arrays = load(contents[0])
    sides = (Rows(arrays[f"{name}"], arrays[f"{name}_length"]) for name in ("source", "target"))
    return EncodedBlock(
        (next(sides), next(sides)), arrays["number"], answer["dropped"], answer["pairs"], raw.end
    )


def serve() -> None:
    """The worker process: encode blocks until the pipe is closed."""

    def prepare(settings: Message) -> Callable[[Message], Message]:
        encoder = Encoder.with_settings(settings.header)
        return lambda task: _answer(encoder, task)

    serve_tasks(prepare)


def _answer(encoder: Encoder, task: Message) -> Message:
    try:
        number = task.header["corpus"]
        block = encoder.encode_block(unpack_block(task, encoder.corpora[number]), START)
    except DataError as error:
        return Message({"error": str(error)})
    arrays: dict[str, Ids] = {"number": block.numbers}
    for name, side in zip(("source", "target"), block.sides, strict=True):
        arrays |= {name: side.ids, f"{name}_length": side.lengths}
    return Message({"dropped": block.dropped, "pairs": block.pairs}, (save(arrays),))
