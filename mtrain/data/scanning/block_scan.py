"""The scan of a block of training pairs."""

from typing import NamedTuple

from mtrain.config.languages import Direction
from mtrain.config.sections.data import DataConfig
from mtrain.data.pairs.filters import BlockFilter, FilteredBlock
from mtrain.data.pairs.rejections import EMPTY
from mtrain.data.reading.blocks import RawBlock
from mtrain.data.reading.parse import parse_block, refuse_unless_skipped
from mtrain.data.scanning.block_check import BlockCheck, BlockFindings
from mtrain.data.scanning.samples import BlockSample, HoldoutCandidate, draw_candidates, sample_block


class ScanTask(NamedTuple):
    """A block to scan, and the bounds of the samples so far: pairs beyond them need not be returned."""

    corpus: int  # index, from 0
    raw: RawBlock
    threshold: int  # of the text sample
    max_digest: str  # of pairs to hold out


class ScannedBlock(NamedTuple):
    """What a scan collects from a block."""

    pairs: int  # readable pairs
    sample: BlockSample
    candidates: list[HoldoutCandidate]  # to be held out
    findings: BlockFindings | None
    filtered: FilteredBlock | None  # samples, candidates and findings are of the pairs that are kept


class BlockScanner:
    """Scans blocks of the training corpora."""

    def __init__(self, data: DataConfig, seed: int, strict: bool, held_out: int, check: BlockCheck | None):
        """With `strict`, an unreadable pair is an error, unless `data.bad_lines` is `skip`. `held_out` is the
        number of pairs to hold out. Raises UsageError if a filter cannot be applied."""
        self._data, self._check = data, check
        self._seed, self._held_out = seed, held_out
        self._strict = strict
        self._filter = BlockFilter(data) if data.filters else None
        # Else, of corpora that have the same sources, only the first one would be validated. Further
        # directions change nothing in that of `data`.
        own = Direction(data.source_lang, data.target_lang)
        self._holdout_keys = [str(seed) if each == own else f"{seed} {each}" for each in data.directions]

    def __call__(self, task: ScanTask) -> ScannedBlock:
        """Scan a block. Raises DataError if, with `strict`, a pair is unreadable."""
        corpus = task.corpus
        spec = self._data.train[corpus]
        block = parse_block(task.raw, spec, self._data.score_of(spec))
        if self._strict:
            for error in block.errors.values():
                refuse_unless_skipped(error, self._data.bad_lines)
        unfiltered, filtered = block, None
        if self._filter:
            filtered = self._filter.apply(block, corpus)
            codes = filtered.codes[block.indices]
            block = block.select((codes == 0) | (codes == EMPTY))
        return ScannedBlock(
            len(unfiltered.sources),
            sample_block(block, corpus, self._seed, task.threshold),
            draw_candidates(block, corpus, self._holdout_keys[corpus], self._held_out, task.max_digest),
            self._check.check(block, corpus, unfiltered) if self._check else None,
            filtered,
        )
