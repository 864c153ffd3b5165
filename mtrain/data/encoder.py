"""Encodes the training corpora into shards. An interrupted encoding resumes after the last complete shard."""

import logging
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from operator import not_
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mtrain.config.data import DataConfig
from mtrain.data.corpus import (
    BLOCK,
    START,
    Position,
    RawBlock,
    parse_block,
    read_blocks,
    refuse_unless_skipped,
)
from mtrain.data.shards import (
    SHARD,
    Ids,
    Indices,
    Rows,
    Shard,
    ShardInfo,
    buckets_of,
    ranges,
    shard_file,
    write_shard,
)
from mtrain.errors import ModelError
from mtrain.tokenizer.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class EncodedBlock(NamedTuple):
    """The usable pairs of a block, as ids."""

    sides: tuple[Rows, Rows]
    numbers: Indices  # of the pairs in their corpus, from 1
    dropped: dict[str, int]  # number of other pairs by reason
    pairs: int  # all pairs
    end: Position


class Encoder:
    """Encodes blocks of the training corpora."""

    def __init__(self, data: DataConfig, tokenizer: Tokenizer, held_out: frozenset[str]):
        """`held_out` are the sources of pairs held out for validation."""
        self._data, self._tokenizer, self._held_out = data, tokenizer, held_out
        largest = max(tokenizer.source_vocab_size, tokenizer.target_vocab_size)
        self._dtype: type[np.integer] = np.uint16 if largest <= 2**16 else np.int32

    def encode(self, raw: RawBlock, corpus: int) -> EncodedBlock:
        """Encode a block of corpus number `corpus` (from 0). Raises DataError if a pair is unreadable and
        `data.bad_lines` is not `skip`."""
        block, tokenizer = parse_block(raw, self._data.train[corpus]), self._tokenizer
        for error in block.errors.values():
            refuse_unless_skipped(error, self._data.bad_lines)
        ids = tokenizer.encode_source(block.sources), tokenizer.encode_target(block.targets)
        sides = self._with_eos(ids[0]), self._with_eos(ids[1])
        lengths, count = [side.lengths for side in sides], len(block.sources)
        blank = [np.fromiter(map(not_, map(str.strip, texts)), np.bool_, count) for texts in block[:2]]
        # Also empty if normalization removes every character.
        empty = blank[0] | blank[1] | (np.minimum(*lengths) == 1)
        # Including duplicates, since validation must not score training pairs.
        held_out = np.fromiter(map(self._held_out.__contains__, block.sources), np.bool_, count) & ~empty
        too_long = (np.maximum(*lengths) > self._data.max_length) & ~empty & ~held_out
        kept = np.flatnonzero(~(empty | held_out | too_long))
        reasons = {"empty": empty, "held out": held_out, "too long": too_long}
        counts = {"bad": len(block.errors), **{name: int(mask.sum()) for name, mask in reasons.items()}}
        return EncodedBlock(
            (sides[0].take(kept), sides[1].take(kept)),
            np.asarray(block.numbers, np.int64)[kept],
            {reason: number for reason, number in counts.items() if number},
            count + len(block.errors),
            raw.end,
        )

    def _with_eos(self, rows: list[list[int]]) -> Rows:
        lengths = np.fromiter(map(len, rows), np.int64, len(rows)) + 1
        ids: Ids = np.full(int(lengths.sum()), self._tokenizer.special.eos, self._dtype)
        starts = np.cumsum(lengths) - lengths
        ids[ranges(starts, lengths - 1)] = np.fromiter(chain.from_iterable(rows), self._dtype)
        return Rows(ids, lengths)


class ShardWriter:
    """Writes the shards of a data folder that are missing."""

    def __init__(
        self, data: DataConfig, encoder: Encoder, folder: Path, seed: int, fingerprint: str, buckets: int
    ):
        """`fingerprint` identifies the inputs. Shards made from the same inputs are kept."""
        self._data, self._encoder, self._folder = data, encoder, folder
        self._seed, self._fingerprint, self._buckets = seed, fingerprint, buckets
        self._infos: dict[int, ShardInfo] = {}

    def write(self) -> list[ShardInfo]:
        """Write all missing shards, and return what describes each shard."""
        blocks: list[EncodedBlock] = []
        for index, corpus, block in self._encoded():
            if block is not None:
                blocks.append(block)
            else:
                self._infos[index] = self._write(index, corpus, blocks)
                blocks = []
        return [info for _, info in sorted(self._infos.items())]

    def _encoded(self) -> Iterator[tuple[int, int, EncodedBlock | None]]:
        """The encoded blocks of the missing shards, each with the indices of its shard and its corpus; None
        after the last block of a shard."""
        for index, corpus, raw in self._missing():
            yield index, corpus, None if raw is None else self._encoder.encode(raw, corpus)

    def _missing(self) -> Iterator[tuple[int, int, RawBlock | None]]:
        """Like `_encoded`, but before encoding. The shards that are not missing are recorded in `_infos`."""
        index = 0
        for number, corpus in enumerate(self._data.train):
            position, blocks, pairs = START, None, SHARD
            while pairs >= SHARD:  # until a shard has fewer pairs, or none
                if info := self._existing(index, number, position):
                    self._infos[index] = info
                    position, blocks, pairs = Position(info.first + info.pairs, info.ends), None, info.pairs
                else:
                    blocks = blocks or read_blocks(corpus, size=BLOCK, start=position)
                    first = position.first
                    while position.first - first < SHARD and (raw := next(blocks, None)):
                        yield index, number, raw
                        position = raw.end
                    if pairs := position.first - first:
                        yield index, number, None
                index += bool(pairs)

    def _existing(self, index: int, corpus: int, position: Position) -> ShardInfo | None:
        """What describes a shard of a corpus that is already in the folder; None if it must be written."""
        try:
            info = Shard(shard_file(self._folder, index)).info
        except ModelError:
            return None
        wanted = (self._fingerprint, corpus, position.first)
        return info if (info.fingerprint, info.corpus, info.first) == wanted else None

    def _write(self, index: int, corpus: int, blocks: list[EncodedBlock]) -> ShardInfo:
        sides = (
            Rows.join([block.sides[0] for block in blocks]),
            Rows.join([block.sides[1] for block in blocks]),
        )
        numbers: Ids = np.concatenate([block.numbers for block in blocks])
        pairs, end = sum(block.pairs for block in blocks), blocks[-1].end
        dropped = Counter[str]()
        for block in blocks:
            dropped.update(block.dropped)
        first = end.first - pairs
        info = ShardInfo(self._fingerprint, corpus, first, pairs, len(numbers), dict(dropped), end.offsets)
        buckets = buckets_of(numbers, self._seed, corpus, self._buckets)
        file = shard_file(self._folder, index)
        write_shard(file, sides, numbers - first, buckets, self._buckets, info)
        return info
