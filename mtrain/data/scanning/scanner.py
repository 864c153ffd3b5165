"""The first pass over the raw text, which collects everything that is needed before the text is encoded.

A new run reads the raw text twice: once here, and once to encode it. This pass hashes the files, counts and
checks the pairs, draws the held-out pairs, and keeps a sample of the text for the tokenizer.

`BlockScanner` does what needs no other block, perhaps in a worker process. `CorpusScanner` collects the
results of all blocks.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

from mtrain.config.sections.corpora import Corpus, Holdout, JsonlCorpus, TextCorpus, TsvCorpus
from mtrain.config.sections.data import DataConfig
from mtrain.config.sections.filters import RULES
from mtrain.data import COMPRESSION, Pair
from mtrain.data.pairs.filters import BlockFilter, FilteredBlock, RejectionRecorder
from mtrain.data.pairs.rejections import EMPTY, Rejections, no_pair_left
from mtrain.data.reading.blocks import BLOCK, Block, RawBlock, parse_block, read_blocks
from mtrain.data.reading.digests import RawFiles
from mtrain.data.reading.files import existing_files
from mtrain.data.scanning import samples
from mtrain.data.scanning.block_check import BlockCheck, BlockFindings, Normalizers
from mtrain.data.scanning.check import SCRIPT_PAIRS, DataCheck, Findings
from mtrain.data.scanning.samples import HoldoutSampler, TextSample, draw_candidates, sample_block
from mtrain.processes.cores import count_cores
from mtrain.processes.pool import map_tasks
from mtrain.progress_bar import ProgressBar
from mtrain.tokenizer.learn import SAMPLED_CHARACTERS

LARGE = 2**26  # bytes of all files; scanning less takes less time than starting processes
_PEEKED = 10  # maximum number of blocks that are read to determine the scripts
CHECKED_CHARACTERS = 10_000_000  # of the sample from which a check segments pairs
IndexedBlock = tuple[int, RawBlock]  # with the index of the corpus, from 0


class ScanTask(NamedTuple):
    """A block to scan, and the bounds of the samples so far: pairs beyond them need not be returned."""

    corpus: int  # index, from 0
    raw: RawBlock
    threshold: int  # of the text sample
    max_digest: bytes  # of pairs to hold out


class ScannedBlock(NamedTuple):
    """What a scan collects from a block."""

    pairs: int  # readable pairs
    sample: samples.BlockSample
    candidates: list[samples.HoldoutCandidate]  # to be held out
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
        # Keys contain the direction; else, only the first of several corpora with the same sources would be
        # validated. Adding directions does not change the key of the direction of `data`.
        own = data.direction
        self._holdout_keys = [str(seed) if each == own else f"{seed} {each}" for each in data.directions]

    def __call__(self, task: ScanTask) -> ScannedBlock:
        """Scan a block. Raises DataError if, with `strict`, a pair is unreadable."""
        corpus = task.corpus
        spec = self._data.train[corpus]
        block = parse_block(task.raw, spec, self._data.score_of(spec))
        if self._strict:
            block.refuse_errors(self._data.bad_lines)
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


@dataclass
class ScanResult:
    """The result of one pass over the training corpora."""

    pairs: int  # readable pairs
    text: TextSample
    held_out: list[list[Pair]]  # by corpus; empty unless validation is a holdout
    findings: Findings | None  # None without a check
    rejections: Rejections | None  # None without filters
    seconds: float  # that the pass took

    @property
    def usable_pairs(self) -> int:
        """Readable pairs that no rule of `data.filters` rejects."""
        counts = self.rejections.counts() if self.rejections else {}
        return self.pairs - sum(count for reason, count in counts.items() if reason in RULES)

    def require_text(self) -> None:
        """Raise DataError if `data.filters` leave no pair."""
        counts = self.rejections.counts() if self.rejections else {}
        if self.rejections and sum(counts.values()) == len(self.rejections.codes):
            raise no_pair_left(counts)


@dataclass
class CorpusScanner:
    """Reads the training corpora of a config once, when `result` is first used. This hashes their files."""

    files: RawFiles
    seed: int
    folder: Path | None = None  # for temporary files
    check: bool = False  # whether the data is also checked
    strict: bool = True  # whether an unreadable pair is an error, unless `data.bad_lines` is `skip`
    # The number of processes that scan the text, which does not change the result. None: one for each core if
    # the corpora are large.
    workers: int | None = None
    for_tokenizer: bool = True  # otherwise, the sample of the text is only large enough for a check
    # Returns the normalizers that the tokenizer will apply, whose changes are to be counted.
    normalizers: Callable[[], Normalizers] | None = None

    @cached_property
    def result(self) -> ScanResult:
        """One pass over the training corpora. Raises DataError if one is missing, misaligned or, if strict,
        has an unreadable pair; StorageError if the temporary files cannot be written."""
        start = time.monotonic()
        data = self.files.data
        held_out = data.validation.holdout if isinstance(data.validation, Holdout) else 0
        characters = SAMPLED_CHARACTERS if self.for_tokenizer else CHECKED_CHARACTERS
        text, holdout = TextSample(characters, self.folder), HoldoutSampler(held_out)
        check = DataCheck(data, self.files.digests, self.folder) if self.check else None
        recorder = RejectionRecorder(data, self.folder) if data.filters else None
        files = [*chain.from_iterable(map(existing_files, data.train))]
        size = sum(file.stat().st_size for file in files)
        workers = self.workers or (count_cores() if size >= LARGE else 1)
        blocks = self._blocks(by_range=workers > 1)
        first, usable = self._read_first(blocks) if check else ([], [])
        normalizers = self.normalizers() if check and self.normalizers else (None, None)
        block_check = check.block_check(usable, normalizers) if check else None
        make_scanner = partial(BlockScanner, data, self.seed, self.strict, held_out, block_check)
        tasks = (ScanTask(i, raw, text.threshold, holdout.max_digest) for i, raw in chain(first, blocks))
        is_size_known, read = _are_plain_lines(data.train, files), 0
        with ProgressBar("data: read", "pairs") as progress:
            for task, block in map_tasks(make_scanner(), make_scanner, tasks, workers):
                read += task.raw.size
                progress.add(block.pairs, share=read / size if is_size_known and size else None)
                text.add(block.sample, task.corpus)
                holdout.add(block.candidates)
                if check is not None and block.findings is not None:
                    check.add(block.findings, task.corpus)
                if recorder is not None and block.filtered is not None:
                    recorder.add(task.corpus, block.filtered)
        rejections = recorder.finish() if recorder else None
        drawn = holdout.pairs(len(data.train))
        findings = None
        if check is not None:
            findings = check.findings([*chain.from_iterable(drawn)], rejections and rejections.counts())
        return ScanResult(progress.count, text, drawn, findings, rejections, time.monotonic() - start)

    def _blocks(self, by_range: bool) -> Iterator[IndexedBlock]:
        """The raw blocks of the training corpora, with the index of the corpus."""
        for index, corpus in enumerate(self.files.data.train):
            score = self.files.data.score_of(corpus)
            for raw in read_blocks(corpus, self.files.digests, BLOCK, by_range=by_range, score=score):
                yield index, raw

    def _read_first(self, blocks: Iterator[IndexedBlock]) -> tuple[list[IndexedBlock], list[Block]]:
        """The first blocks, until they have enough usable pairs to determine the scripts, and the usable
        pairs of blocks in the languages of the first block."""
        first, usable, data = [], list[Block](), self.files.data
        direction = data.direction_of(data.train[0])
        for index, raw in islice(blocks, _PEEKED):
            first.append((index, raw))
            corpus = data.train[index]
            if data.direction_of(corpus) == direction:
                usable.append(parse_block(raw, corpus).usable())
            if sum(len(block.sources) for block in usable) >= SCRIPT_PAIRS:
                break
        return first, usable


def _are_plain_lines(corpora: Iterable[Corpus], files: Iterable[Path]) -> bool:
    """Whether corpora are lines of uncompressed files, so that the size of the files is the size of the
    text."""
    are_lines = all(isinstance(corpus, TextCorpus | TsvCorpus | JsonlCorpus) for corpus in corpora)
    return are_lines and not any(file.suffix in COMPRESSION for file in files)
