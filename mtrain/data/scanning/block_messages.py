"""Blocks of raw pairs as messages to worker processes, which decode them."""

from typing import Any

from mtrain.config.corpora import Corpus
from mtrain.data.reading.blocks import START, Column, RawBlock
from mtrain.data.reading.parse import Block, parse_block
from mtrain.errors import DataError
from mtrain.worker_messages import Message


def pack_block(raw: RawBlock, corpus: Corpus, header: dict[str, Any], score: Column | None = None) -> Message:
    """A raw block as a message, with some more keys in its header. `score` is as in `parse_block`."""
    if raw.lines or raw.ranges:
        header = {**header, "first": raw.first, "names": raw.names, "skipped": raw.skipped}
        return Message({**header, "ranges": raw.ranges}, raw.lines)
    # Rows of a table may contain values that JSON cannot represent.
    block = parse_block(raw, corpus, score)
    header = {**header, **block._asdict(), "numbers": [*block.numbers]}
    return Message({**header, "errors": {number: str(error) for number, error in block.errors.items()}})


def unpack_block(message: Message, corpus: Corpus, score: Column | None = None) -> Block:
    """The decoded block in a message, with the same `score`. Contents of the message after those that
    `pack_block` gave it are ignored."""
    header = message.header
    if "ranges" in header:
        fields = {key: header[key] for key in ("first", "names", "skipped", "ranges")}
        lines = () if header["ranges"] else message.contents[: len(header["names"])]
        return parse_block(RawBlock(end=START, lines=lines, records=(), **fields), corpus, score)
    errors = {int(number): DataError(text) for number, text in header["errors"].items()}
    fields = {key: header[key] for key in Block._fields}
    return Block(**{**fields, "errors": errors})
