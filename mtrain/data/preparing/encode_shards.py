"""Encodes the training corpora into shards, block by block.

`Encoder` turns the text of a block into rows of token ids, perhaps in a worker process. It drops pairs that
are rejected by the filters, empty, held out for validation, or too long. `ShardWriter` joins the blocks of
each shard, and resumes an interrupted encoding after the last complete shard.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np

from mtrain.config.sections.data import DataConfig
from mtrain.data import are_too_long
from mtrain.data.pairs.rejections import REASONS, Codes, Rejections
from mtrain.data.reading.blocks import BLOCK, START, RawBlock, RawPosition, parse_block, read_blocks
from mtrain.data.reading.digests import RawFiles
from mtrain.data.store.folder import DataFolder
from mtrain.data.store.shards import LAYOUT, SHARD, Shard, ShardInfo, buckets_of, shard_file, write_shard
from mtrain.errors import ModelError
from mtrain.processes.pool import map_tasks
from mtrain.progress_bar import ProgressBar
from mtrain.tokenizer.rows import Ids, Indices, Rows, Sides
from mtrain.tokenizer.tokenizer import Tokenizer

# Texts that are encoded at a time: so few that their ids are still in the processor's cache when they are
# copied.
_TEXTS = 1000
Encode = Callable[[list[str]], list[list[int]]]  # returns the ids of each text


class EncodingTask(NamedTuple):
    """A block to encode."""

    shard: int  # index, from 0
    corpus: int  # index, from 0
    raw: RawBlock
    is_last: bool  # of its shard
    codes: Codes | None  # of its pairs in `Rejections`, if there are filters


class EncodedBlock(NamedTuple):
    """The pairs of a block that are kept, as ids."""

    sides: Sides
    numbers: Indices  # of the pairs in their corpus, from 1
    dropped: Counter[str]  # number of other pairs by reason
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
        directions = map(data.direction_of, data.train)
        self._tags = [tokenizer.tags_of(direction, data.language_tags) for direction in directions]

    def __call__(self, task: EncodingTask) -> EncodedBlock:
        """Encode a block. Raises DataError if a pair is unreadable and `data.bad_lines` is not `skip`."""
        corpus, codes = task.corpus, task.codes
        block = parse_block(task.raw, self._data.train[corpus])
        block.refuse_errors(self._data.bad_lines)
        total, rejected = len(block.sources) + len(block.errors), dict[str, int]()
        if codes is not None:
            codes = codes[block.indices]
            block = block.select(codes == 0)
            counts = np.bincount(codes, minlength=len(REASONS) + 1)[1:].tolist()
            rejected = dict(zip(REASONS, counts, strict=True))
        tags = self._tags[corpus]
        source = self._encode(self._tokenizer.encode_source, block.sources, tags.source, tags.after_source)
        target = self._encode(self._tokenizer.encode_target, block.targets, tags.target)
        count = len(block.sources)
        blank = ~np.array(block.have_text(), np.bool_)
        # Also empty if normalization removes every character.
        added = [1 + count for count in tags.counts]
        empty = blank | (source.lengths == added[0]) | (target.lengths == added[1])
        # Including duplicates, since validation must not score training pairs.
        is_held_out = self._held_out.__contains__
        held_out = np.fromiter(map(is_held_out, block.sources), np.bool_, count)
        if self._data.has_several_directions:
            held_out |= np.fromiter(map(is_held_out, block.targets), np.bool_, count)
        held_out &= ~empty
        too_long = are_too_long(source.lengths, target.lengths, self._data.max_length) & ~empty & ~held_out
        kept = ~(empty | held_out | too_long)
        dropped = Counter(bad=len(block.errors), empty=int(empty.sum()))
        dropped.update({"held out": int(held_out.sum()), "too long": int(too_long.sum()), **rejected})
        rows = source.select(kept), target.select(kept)
        numbers = np.asarray(block.numbers, np.int64)[kept]
        return EncodedBlock(rows, numbers, dropped, total)

    def _encode(
        self, encode: Encode, texts: list[str], before: Sequence[int], after: Sequence[int] = ()
    ) -> Rows:
        """The ids of each text with EOS, and the ids of languages before and after them."""
        parts, end = [Rows.from_lists([])], [self._tokenizer.special.eos, *after]
        for start in range(0, len(texts), _TEXTS):
            rows = encode(texts[start : start + _TEXTS])
            parts.append(Rows.from_lists([[*before, *row, *end] for row in rows]))
        ids, lengths = Rows.join(parts)
        return Rows(ids.astype(self._dtype), lengths)


@dataclass
class ShardWriter:
    """Writes the shards of a data folder that are missing.

    Shards made from the same inputs are kept, unless they are `replaced`.
    """

    files: RawFiles  # as they were when they were scanned
    seed: int
    make_encoder: partial[Encoder]  # called in each process that encodes
    folder: DataFolder  # whose encoding has begun
    replaced: dict[int, str]  # by index: the SHA-256 of the index of the shard, which the new one must have
    rejections: Rejections | None = None  # the pairs that the filters leave out
    _infos: dict[int, ShardInfo] = field(default_factory=dict)
    _existed = 0  # readable pairs of shards that were kept

    def write(self, workers: int = 1) -> list[ShardInfo]:
        """Write all missing shards, and return what describes each shard.

        Raises DataError if a corpus has changed since it was scanned, and no shard of other text is written,
        or if a replaced shard would change; StorageError if a shard cannot be written.
        """
        with ProgressBar("data: encoded", "pairs", self.folder.summary["pairs"]) as progress:
            blocks: list[EncodedBlock] = []
            tasks = self._missing(by_range=workers > 1)
            for task, block in map_tasks(self.make_encoder(), self.make_encoder, tasks, workers):
                blocks.append(block)
                progress.set_done_before(self._existed)
                progress.add(block.pairs - block.dropped["bad"])
                if task.is_last:
                    self._infos[task.shard] = self._write(task, blocks)
                    blocks = []
        self.files.require_unchanged(self.files.data.train)  # a shorter corpus has fewer shards
        return [info for _, info in sorted(self._infos.items())]

    def _missing(self, by_range: bool) -> Iterator[EncodingTask]:
        """The raw blocks of the missing shards. The shards that are not missing are recorded in `_infos`."""
        index = 0
        for number, corpus in enumerate(self.files.data.train):
            position, pairs = START, SHARD
            blocks = None
            while pairs >= SHARD:  # until a shard has fewer pairs, or none
                if info := self._existing(index, number, position):
                    self._infos[index] = info
                    self._existed += info.pairs - info.dropped.get("bad", 0)
                    position = RawPosition(info.first + info.pairs, info.ends)
                    blocks, pairs = None, info.pairs
                else:
                    blocks = blocks or read_blocks(corpus, size=BLOCK, start=position, by_range=by_range)
                    first, raw = position.first, next(blocks, None)
                    while raw:
                        position = raw.end
                        is_full = position.first - first >= SHARD
                        following = None if is_full else next(blocks, None)
                        codes = self._codes(number, raw)
                        yield EncodingTask(index, number, raw, following is None, codes)
                        raw = following
                    pairs = position.first - first
                index += bool(pairs)

    def _codes(self, number: int, raw: RawBlock) -> Codes | None:
        """The codes of the pairs of a block of a corpus in `Rejections`; None without filters."""
        if self.rejections is None:
            return None
        codes = self.rejections.of_pairs(number, raw.first, raw.end.first)
        if len(codes) < raw.end.first - raw.first:  # the corpus has more pairs now
            self.files.require_unchanged([self.files.data.train[number]])
        return codes

    def _existing(self, index: int, corpus: int, position: RawPosition) -> ShardInfo | None:
        """What describes a shard of a corpus that is already in the folder; None if it must be written."""
        if index in self.replaced:
            return None
        try:
            info = Shard(shard_file(self.folder.path, index)).info
        except ModelError:
            return None
        summary = self.folder.summary
        found = info.layout, info.capacity, info.buckets, info.fingerprint, info.corpus, info.first
        wanted = LAYOUT, SHARD, summary["buckets"], summary["fingerprint"], corpus, position.first
        return info if found == wanted else None

    def _write(self, last: EncodingTask, blocks: list[EncodedBlock]) -> ShardInfo:
        """Write the shard of the given blocks; `last` is the task of the last one."""
        corpus, end = last.corpus, last.raw.end
        source, target = (Rows.join([block.sides[side] for block in blocks]) for side in (0, 1))
        numbers: Ids = np.concatenate([block.numbers for block in blocks])
        pairs = sum(block.pairs for block in blocks)
        dropped = dict(sum((block.dropped for block in blocks), Counter[str]()))  # without zeros
        first, kept = end.first - pairs, len(numbers)
        count, fingerprint = self.folder.summary["buckets"], self.folder.summary["fingerprint"]
        info = ShardInfo(LAYOUT, SHARD, count, fingerprint, corpus, first, pairs, kept, dropped, end.offsets)
        buckets = buckets_of(numbers, self.seed, corpus, count)
        file = shard_file(self.folder.path, last.shard)
        self.files.require_unchanged([self.files.data.train[corpus]])
        write_shard(file, (source, target), numbers - first, buckets, info, self.replaced.get(last.shard))
        return info
