"""Encodes the training corpora into shards. An interrupted encoding resumes after the last complete shard."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mtrain.data.pairs.rejections import Rejections
from mtrain.data.preparing.encoder import EncodedBlock, Encoder, EncodingTask
from mtrain.data.reading.blocks import BLOCK, START, RawPosition, read_blocks
from mtrain.data.scanning.scanner import CorpusScanner
from mtrain.data.store.shards import LAYOUT, SHARD, Shard, ShardInfo, buckets_of, shard_file, write_shard
from mtrain.errors import ModelError
from mtrain.processes import map_tasks
from mtrain.progress_bar import ProgressBar
from mtrain.tokenizer.rows import Ids, Rows


class ShardWriter:
    """Writes the shards of a data folder that are missing."""

    def __init__(
        self,
        scanner: CorpusScanner,
        encoder: Encoder,
        folder: Path,
        fingerprint: str,
        buckets: int,
        replaced: dict[int, str],
        rejections: Rejections | None = None,
    ):
        """`fingerprint` identifies the inputs, which `scanner` has read. Shards made from the same inputs are
        kept, except for those that are `replaced`, which are given with the SHA-256 of their index: the new
        shard must have the same. `rejections` are the pairs that the filters leave out."""
        self._scanner, self._encoder, self._folder = scanner, encoder, folder
        self._corpora, self._seed = scanner.data.train, scanner.seed
        self._fingerprint, self._buckets, self._replaced = fingerprint, buckets, replaced
        self._rejections = rejections
        self._infos: dict[int, ShardInfo] = {}
        self._existed = 0  # readable pairs of shards that were kept

    def write(self, pairs: int, workers: int = 1) -> list[ShardInfo]:
        """Write all missing shards, and return what describes each shard.

        `pairs` is the number of readable pairs of all corpora, for the progress bar.
        Raises DataError if a corpus has changed since it was scanned, and no shard of other text is written,
        or if a replaced shard would change; StorageError if a shard cannot be written.
        """
        with ProgressBar("data: encoded", "pairs", pairs) as progress:
            blocks: list[EncodedBlock] = []
            tasks = self._missing(by_range=workers > 1)
            for task, block in map_tasks(self._encoder, self._encoder.in_worker(), tasks, workers):
                blocks.append(block)
                progress.set_done_before(self._existed)
                progress.add(block.pairs - block.dropped.get("bad", 0))
                if task.is_last:
                    self._infos[task.shard] = self._write(task, blocks)
                    blocks = []
        self._scanner.files.require_unchanged(self._corpora)  # a shorter corpus has fewer shards
        return [info for _, info in sorted(self._infos.items())]

    def _missing(self, by_range: bool) -> Iterator[EncodingTask]:
        """The raw blocks of the missing shards. The shards that are not missing are recorded in `_infos`."""
        index = 0
        for number, corpus in enumerate(self._corpora):
            position, blocks, pairs = START, None, SHARD
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
                        codes = None
                        if self._rejections is not None:
                            codes = self._rejections.of_pairs(number, raw.first, raw.end.first)
                            if len(codes) < raw.end.first - raw.first:  # the corpus has more pairs now
                                self._scanner.files.require_unchanged([corpus])
                        yield EncodingTask(index, number, raw, following is None, codes)
                        raw = following
                    pairs = position.first - first
                index += bool(pairs)

    def _existing(self, index: int, corpus: int, position: RawPosition) -> ShardInfo | None:
        """What describes a shard of a corpus that is already in the folder; None if it must be written."""
        if index in self._replaced:
            return None
        try:
            info = Shard(shard_file(self._folder, index)).info
        except ModelError:
            return None
        made_from = (info.fingerprint, info.corpus, info.first)
        made_as = (info.layout, info.capacity, info.buckets)
        is_wanted = made_from == (self._fingerprint, corpus, position.first)
        return info if is_wanted and made_as == (LAYOUT, SHARD, self._buckets) else None

    def _write(self, last: EncodingTask, blocks: list[EncodedBlock]) -> ShardInfo:
        """Write the shard of the given blocks; `last` is the task of the last one."""
        corpus, end = last.corpus, last.raw.end
        sides = (
            Rows.join([block.sides[0] for block in blocks]),
            Rows.join([block.sides[1] for block in blocks]),
        )
        numbers: Ids = np.concatenate([block.numbers for block in blocks])
        pairs = sum(block.pairs for block in blocks)
        dropped = Counter[str]()
        for block in blocks:
            dropped.update(block.dropped)
        first = end.first - pairs
        info = ShardInfo(
            LAYOUT,
            SHARD,
            self._buckets,
            self._fingerprint,
            corpus,
            first,
            pairs,
            len(numbers),
            dict(dropped),
            end.offsets,
        )
        buckets = buckets_of(numbers, self._seed, corpus, self._buckets)
        file = shard_file(self._folder, last.shard)
        self._scanner.files.require_unchanged([self._corpora[corpus]])
        write_shard(file, sides, numbers - first, buckets, info, self._replaced.get(last.shard))
        return info
