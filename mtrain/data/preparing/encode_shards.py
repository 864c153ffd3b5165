"""Encodes blocks of the training corpora, from text to rows of token ids, and drops unsuitable pairs: those
that are rejected by the filters, empty, held out for validation, or too long."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mtrain.config.sections.data import DataConfig
from mtrain.data import are_too_long
from mtrain.data.pairs.rejections import REASONS, Codes
from mtrain.data.reading.blocks import RawBlock
from mtrain.data.reading.parse import parse_block, refuse_unless_skipped
from mtrain.tokenizer.rows import Ids, Indices, Rows
from mtrain.tokenizer.tokenizer import Tokenizer

# Texts that are encoded at a time: so few that their ids are still in the processor's cache when they are
# copied.
_TEXTS = 1000


class EncodingTask(NamedTuple):
    """A block to encode."""

    shard: int  # index, from 0
    corpus: int  # index, from 0
    raw: RawBlock
    is_last: bool  # of its shard
    codes: Codes | None  # of its pairs in `Rejections`, if there are filters


class EncodedBlock(NamedTuple):
    """The pairs of a block that are kept, as ids."""

    sides: tuple[Rows, Rows]
    numbers: Indices  # of the pairs in their corpus, from 1
    dropped: dict[str, int]  # number of other pairs by reason
    pairs: int  # all pairs


class Encoder:
    """Encodes blocks of the training corpora."""

    def __init__(self, data: DataConfig, tokenizer: Tokenizer, held_out: frozenset[str]):
        """`held_out` are the sources of pairs held out for validation; if there are several directions, also
        their targets, which may be sources or targets of other corpora."""
        self._data, self._held_out = data, held_out
        self._tokenizer = tokenizer
        largest = max(tokenizer.source_vocab_size, tokenizer.target_vocab_size)
        self._dtype: type[np.integer] = np.uint16 if largest <= 2**16 else np.int32
        self._tags = [tokenizer.tag_ids(data.tag_of(corpus)) for corpus in data.train]

    def in_worker(self) -> "partial[Encoder]":
        """Makes the same encoder in a worker process, where it uses one thread; see `map_tasks`."""
        folder = self._tokenizer.files[0].parent.resolve()
        return partial(_load_encoder, self._data, folder, self._held_out)

    def __call__(self, task: EncodingTask) -> EncodedBlock:
        """Encode a block. Raises DataError if a pair is unreadable and `data.bad_lines` is not `skip`."""
        corpus, codes = task.corpus, task.codes
        block = parse_block(task.raw, self._data.train[corpus])
        for error in block.errors.values():
            refuse_unless_skipped(error, self._data.bad_lines)
        total, rejected = len(block.sources) + len(block.errors), dict[str, int]()
        if codes is not None:
            codes = codes[block.indices]
            block = block.select(codes == 0)
            counts = np.bincount(codes, minlength=len(REASONS) + 1)[1:].tolist()
            rejected = dict(zip(REASONS, counts, strict=True))
        sides = [
            self._encode(self._tokenizer.encode_source, block.sources, self._tags[corpus]),
            self._encode(self._tokenizer.encode_target, block.targets),
        ]
        lengths, count = [side.lengths for side in sides], len(block.sources)
        blank = ~np.array(block.have_text(), np.bool_)
        # Also empty if normalization removes every character.
        empty = blank | (lengths[0] == 1 + len(self._tags[corpus])) | (lengths[1] == 1)
        # Including duplicates, since validation must not score training pairs.
        is_held_out = self._held_out.__contains__
        held_out = np.fromiter(map(is_held_out, block.sources), np.bool_, count)
        if self._data.has_several_directions:
            held_out |= np.fromiter(map(is_held_out, block.targets), np.bool_, count)
        held_out &= ~empty
        too_long = are_too_long(lengths[0], lengths[1], self._data.max_length) & ~empty & ~held_out
        kept = np.flatnonzero(~(empty | held_out | too_long))
        dropped = Counter(bad=len(block.errors), empty=int(empty.sum()))
        dropped.update({"held out": int(held_out.sum()), "too long": int(too_long.sum()), **rejected})
        rows = sides[0].take(kept), sides[1].take(kept)
        numbers = np.asarray(block.numbers, np.int64)[kept]
        reasons = {reason: number for reason, number in dropped.items() if number}
        return EncodedBlock(rows, numbers, reasons, total)

    def _encode(
        self, encode: Callable[[list[str]], list[list[int]]], texts: list[str], tag: Sequence[int] = ()
    ) -> Rows:
        """The ids of each text, preceded by the ids of a language tag and followed by EOS."""
        ids: list[Ids] = [np.empty(0, self._dtype)]
        lengths: list[int] = []
        for start in range(0, len(texts), _TEXTS):
            rows = encode(texts[start : start + _TEXTS])
            for row in rows:
                row[:0] = tag
                row.append(self._tokenizer.special.eos)
            lengths += map(len, rows)
            ids.append(np.fromiter(chain.from_iterable(rows), self._dtype))
        return Rows(np.concatenate(ids), np.array(lengths, np.int64))


def _load_encoder(data: DataConfig, tokenizer_folder: Path, held_out: frozenset[str]) -> Encoder:
    tokenizer = Tokenizer(tokenizer_folder)
    tokenizer.set_threads(1)
    return Encoder(data, tokenizer, held_out)
