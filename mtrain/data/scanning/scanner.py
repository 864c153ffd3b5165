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
from mtrain.data.pairs.rejections import EMPTY, Rejections
from mtrain.data.reading.blocks import BLOCK, Block, RawBlock, parse_block, read_blocks, refuse_unless_skipped
from mtrain.data.reading.digests import RawFiles
from mtrain.data.reading.files import existing_files
from mtrain.data.scanning.block_check import BlockCheck, BlockFindings, Normalizers
from mtrain.data.scanning.check import SCRIPT_PAIRS, DataCheck, Findings
from mtrain.data.scanning.samples import (
    BlockSample,
    HoldoutCandidate,
    HoldoutSampler,
    TextSample,
    draw_candidates,
    sample_block,
)
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


class CorpusScanner:
    """Reads the training corpora of a config once, when `result` is first used. This hashes their files."""

    def __init__(
        self,
        files: RawFiles,
        seed: int,
        folder: Path | None = None,
        check: bool = False,
        strict: bool = True,
        workers: int | None = None,
        for_tokenizer: bool = True,
        normalizers: Callable[[], Normalizers] | None = None,
    ):
        """With `check`, the data is also checked. With `strict`, an unreadable pair is an error, unless
        `data.bad_lines` is `skip`. Temporary files are written to `folder`. The result does not depend on
        the number of `workers`, the processes that scan the text; None is one for each core if the corpora
        are large. Without `for_tokenizer`, the sample of the text is only large enough for a check.
        `normalizers` returns the ones that the tokenizer will apply, whose changes are to be counted."""
        self.files, self.data = files, files.data
        self.seed, self.checks = seed, check
        self._folder, self._strict = folder, strict
        self._workers, self._for_tokenizer = workers, for_tokenizer
        self._normalizers = normalizers

    @cached_property
    def result(self) -> ScanResult:
        """One pass over the training corpora. Raises DataError if one is missing, misaligned or, if strict,
        has an unreadable pair; StorageError if the temporary files cannot be written."""
        start = time.monotonic()
        data = self.data
        held_out = data.validation.holdout if isinstance(data.validation, Holdout) else 0
        characters = SAMPLED_CHARACTERS if self._for_tokenizer else CHECKED_CHARACTERS
        text, holdout = TextSample(characters, self._folder), HoldoutSampler(held_out)
        check = DataCheck(data, self.files.digests, self._folder) if self.checks else None
        recorder = RejectionRecorder(data, self._folder) if data.filters else None
        files = chain.from_iterable(map(existing_files, data.train))
        is_large = sum(file.stat().st_size for file in files) >= LARGE
        workers = self._workers or (count_cores() if is_large else 1)
        blocks = self._blocks(by_range=workers > 1)
        first, usable = self._read_first(blocks) if check else ([], [])
        normalizers = self._normalizers() if check and self._normalizers else (None, None)
        block_check = check.block_check(usable, normalizers) if check else None
        make_scanner = partial(BlockScanner, data, self.seed, self._strict, held_out, block_check)
        tasks = (ScanTask(i, raw, text.threshold, holdout.max_digest) for i, raw in chain(first, blocks))
        size, read = _size_of_text(data.train), 0
        with ProgressBar("data: read", "pairs") as progress:
            for task, block in map_tasks(make_scanner(), make_scanner, tasks, workers):
                read += task.raw.size
                progress.add(block.pairs, share=read / size if size else None)
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
        for index, corpus in enumerate(self.data.train):
            score = self.data.score_of(corpus)
            for raw in read_blocks(corpus, self.files.digests, BLOCK, by_range=by_range, score=score):
                yield index, raw

    def _read_first(self, blocks: Iterator[IndexedBlock]) -> tuple[list[IndexedBlock], list[Block]]:
        """The first blocks, until they have enough usable pairs to determine the scripts, and the usable
        pairs of blocks in the languages of the first block."""
        first, usable = [], list[Block]()
        direction = self.data.direction_of(self.data.train[0])
        for index, raw in islice(blocks, _PEEKED):
            first.append((index, raw))
            corpus = self.data.train[index]
            if self.data.direction_of(corpus) == direction:
                usable.append(parse_block(raw, corpus).usable())
            if sum(len(block.sources) for block in usable) >= SCRIPT_PAIRS:
                break
        return first, usable


def _size_of_text(corpora: Iterable[Corpus]) -> int:
    """The size of the text of some corpora in bytes; 0 if it is unknown, as for compressed files."""
    size = 0
    for corpus in corpora:
        files = existing_files(corpus)
        is_plain = isinstance(corpus, TextCorpus | TsvCorpus | JsonlCorpus) and files
        if not is_plain or any(file.suffix in COMPRESSION for file in files):
            return 0
        size += sum(file.stat().st_size for file in files)
    return size
