"""Encodes the training corpora into shards. An interrupted encoding resumes after the last complete shard."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from mtrain.data.pairs.rejections import Codes, Rejections
from mtrain.data.preparing.encode_shards import EncodedBlock, Encoder, EncodingTask
from mtrain.data.reading.blocks import BLOCK, START, RawBlock, RawPosition, read_blocks
from mtrain.data.scanning.scanner import CorpusScanner
from mtrain.data.store.folder import DataFolder
from mtrain.data.store.shards import LAYOUT, SHARD, Shard, ShardInfo, buckets_of, shard_file, write_shard
from mtrain.errors import ModelError
from mtrain.processes import map_tasks
from mtrain.progress_bar import ProgressBar
from mtrain.tokenizer.rows import Ids, Rows


@dataclass
class ShardWriter:
    """Writes the shards of a data folder that are missing.

    Shards made from the same inputs are kept, except for those that are `replaced`.
    """

    scanner: CorpusScanner  # which has read the inputs
    encoder: Encoder
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
            for task, block in map_tasks(self.encoder, self.encoder.in_worker(), tasks, workers):
                blocks.append(block)
                progress.set_done_before(self._existed)
                progress.add(block.pairs - block.dropped.get("bad", 0))
                if task.is_last:
                    self._infos[task.shard] = self._write(task, blocks)
                    blocks = []
        self.scanner.files.require_unchanged(self.scanner.data.train)  # a shorter corpus has fewer shards
        return [info for _, info in sorted(self._infos.items())]

    def _missing(self, by_range: bool) -> Iterator[EncodingTask]:
        """The raw blocks of the missing shards. The shards that are not missing are recorded in `_infos`."""
        index = 0
        for number, corpus in enumerate(self.scanner.data.train):
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
            self.scanner.files.require_unchanged([self.scanner.data.train[number]])
        return codes

    def _existing(self, index: int, corpus: int, position: RawPosition) -> ShardInfo | None:
        """What describes a shard of a corpus that is already in the folder; None if it must be written."""
        if index in self.replaced:
            return None
        try:
            info = Shard(shard_file(self.folder.path, index)).info
        except ModelError:
            return None
        made_from = (info.fingerprint, info.corpus, info.first)
        made_as = (info.layout, info.capacity, info.buckets)
        is_wanted = made_from == (self.folder.summary["fingerprint"], corpus, position.first)
        return info if is_wanted and made_as == (LAYOUT, SHARD, self.folder.summary["buckets"]) else None

    def _write(self, last: EncodingTask, blocks: list[EncodedBlock]) -> ShardInfo:
        """Write the shard of the given blocks; `last` is the task of the last one."""
        corpus, end = last.corpus, last.raw.end
        source, target = (Rows.join([block.sides[side] for block in blocks]) for side in (0, 1))
        numbers: Ids = np.concatenate([block.numbers for block in blocks])
        pairs = sum(block.pairs for block in blocks)
        dropped = dict(sum((Counter(block.dropped) for block in blocks), Counter[str]()))
        first, kept = end.first - pairs, len(numbers)
        count, fingerprint = self.folder.summary["buckets"], self.folder.summary["fingerprint"]
        info = ShardInfo(
            LAYOUT, SHARD, count, fingerprint, corpus, first, pairs, kept, dropped, ends=end.offsets
        )
        buckets = buckets_of(numbers, self.scanner.seed, corpus, count)
        file = shard_file(self.folder.path, last.shard)
        self.scanner.files.require_unchanged([self.scanner.data.train[corpus]])
        write_shard(file, (source, target), numbers - first, buckets, info, self.replaced.get(last.shard))
        return info
