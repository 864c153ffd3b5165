"""The first pass over the raw text, which collects everything that is needed before the text is encoded.

A new run reads the raw text twice: once here, and once to encode it. This pass hashes the files, counts and
checks the pairs, draws the held-out pairs, and keeps a sample of the text for the tokenizer.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice, zip_longest
from pathlib import Path

from mtrain.config.corpora import Corpus, Holdout, JsonlCorpus, TextCorpus, TsvCorpus
from mtrain.config.data import DataConfig
from mtrain.data import COMPRESSION, Pair
from mtrain.data.block_check import usable_pairs
from mtrain.data.block_scan import BlockScanner, ScanTask, scan_all
from mtrain.data.check import SCRIPT_PAIRS, DataCheck, Findings, segment
from mtrain.data.corpus import Block, content_hash, parse_block
from mtrain.data.corpus_files import files_of
from mtrain.data.lines import Digests
from mtrain.data.raw_blocks import BLOCK, RawBlock, read_blocks
from mtrain.data.samples import HoldoutSampler, TextSample
from mtrain.data.sources import read_digests, require_unchanged, stamps_of
from mtrain.errors import DataError
from mtrain.processes import count_cores
from mtrain.progress_bar import ProgressBar
from mtrain.tokenizer.learn import SAMPLED_CHARACTERS
from mtrain.tokenizer.tokenizer import Tokenizer

LARGE = 2**26  # bytes of all files; scanning less takes less time than starting processes
_PEEKED = 10  # maximum number of blocks that are read to determine the scripts
_SEGMENTED = 20_000  # maximum number of pairs that a check segments
CHECKED_CHARACTERS = 10_000_000  # of the sample that they are taken from
IndexedBlock = tuple[int, RawBlock]  # with the index of the corpus, from 0


@dataclass
class ScanResult:
    """The result of one pass over the training corpora."""

    pairs: int  # readable pairs
    text: TextSample
    held_out: list[Pair]  # empty unless validation is a holdout
    findings: Findings | None  # None without a check
    seconds: float  # that the pass took


class CorpusScanner:
    """Reads the raw corpora of a config once, when `result` or `content_hashes` is first used."""

    def __init__(
        self,
        data: DataConfig,
        seed: int,
        folder: Path | None = None,
        check: bool = False,
        strict: bool = True,
        data_folders: Sequence[Path] = (),
        missing: Sequence[str | None] = (),
        workers: int | None = None,
        quiet: bool = True,
        for_tokenizer: bool = True,
    ):
        """With `check`, the data is also checked. With `strict`, an unreadable pair is an error, unless
        `data.bad_lines` is `skip`. Temporary files are written to `folder`. Files whose SHA-256 is recorded
        in one of `data_folders` are not read to hash them. `missing` are the content hashes of the training
        and validation corpora whose files are missing, and None for the others. The result does not depend on
        the number of `workers`, the processes that scan the text; None is one for each core if the corpora
        are large. `quiet` disables the progress bar. Without `for_tokenizer`, the sample of the text is only
        large enough for a check."""
        self.data, self.seed = data, seed
        self._folder, self._check, self._strict = folder, check, strict
        self._workers, self._quiet, self._for_tokenizer = workers, quiet, for_tokenizer
        # First the time and the stamps, so that every later change of a file is noticed.
        self.started = time.time_ns()
        self.stamps = stamps_of(chain.from_iterable(map(_existing_files, train_and_validation(data))))
        # Of all files hashed so far.
        self.digests: Digests = {}
        for each in data_folders:
            self.digests |= read_digests(each)
        self._missing = missing

    @cached_property
    def result(self) -> ScanResult:
        """One pass over the training corpora. Raises DataError if one is missing, misaligned or, if strict,
        has an unreadable pair; StorageError if the temporary files cannot be written."""
        start = time.monotonic()
        data = self.data
        held_out = data.validation.holdout if isinstance(data.validation, Holdout) else 0
        characters = SAMPLED_CHARACTERS if self._for_tokenizer else CHECKED_CHARACTERS
        text, holdout = TextSample(characters, self._folder), HoldoutSampler(held_out)
        check = DataCheck(data, self.digests, self._folder) if self._check else None
        workers = self._workers or self._choose_workers()
        blocks = self._blocks(by_range=workers > 1)
        first, usable = self._read_first(blocks) if check else ([], [])
        block_check = check.block_check(usable) if check else None
        scanner = BlockScanner(data, self.seed, self._strict, held_out, block_check)
        tasks = (ScanTask(i, raw, text.threshold, holdout.max_digest) for i, raw in chain(first, blocks))
        size, read = _size_of_text(data.train), 0
        with ProgressBar("data: read", "pairs", quiet=self._quiet) as progress:
            for task, block in scan_all(scanner, tasks, workers):
                read += task.raw.size
                progress.add(block.pairs, share=read / size if size else None)
                text.add(block.sample)
                holdout.add(block.candidates)
                if check is not None and block.findings is not None:
                    check.add(block.findings)
        drawn = holdout.pairs()
        findings = check.findings(drawn) if check else None
        return ScanResult(progress.count, text, drawn, findings, time.monotonic() - start)

    def _blocks(self, by_range: bool) -> Iterator[IndexedBlock]:
        """The raw blocks of the training corpora, with the index of the corpus."""
        for index, corpus in enumerate(self.data.train):
            for raw in read_blocks(corpus, self.digests, BLOCK, by_range=by_range):
                yield index, raw

    def _read_first(self, blocks: Iterator[IndexedBlock]) -> tuple[list[IndexedBlock], list[Block]]:
        """The first blocks, up to enough usable pairs to determine the scripts, and their usable pairs."""
        first, usable = [], list[Block]()
        for index, raw in islice(blocks, _PEEKED):
            first.append((index, raw))
            usable.append(usable_pairs(parse_block(raw, self.data.train[index])))
            if sum(len(block.sources) for block in usable) >= SCRIPT_PAIRS:
                break
        return first, usable

    def _choose_workers(self) -> int:
        files = chain.from_iterable(map(_existing_files, self.data.train))
        return count_cores() if sum(file.stat().st_size for file in files) >= LARGE else 1

    @property
    def text(self) -> TextSample:
        """The text to learn a tokenizer from. Raises the errors of `result`."""
        assert self._for_tokenizer
        return self.result.text

    @cached_property
    def content_hashes(self) -> list[str]:
        """The content hash of each training corpus, then of each validation corpus. Files in `digests`, such
        as those that `result` has read, are not read."""
        corpora = zip_longest(train_and_validation(self.data), self._missing)
        return [known or content_hash(corpus, self.digests) for corpus, known in corpora]

    def require_unchanged(self, corpora: Iterable[Corpus]) -> None:
        """Raise DataError if a file of these training or validation corpora has changed since the scanner was
        made, so that its hash may not be the hash of the text that was read."""
        require_unchanged(chain.from_iterable(map(files_of, corpora)), self.stamps)

    @property
    def training_hashes(self) -> list[str]:
        """The content hash of each training corpus."""
        return self.content_hashes[: len(self.data.train)]


def train_and_validation(data: DataConfig) -> list[Corpus]:
    """The training corpora, then the validation corpora."""
    return data.train + ([] if isinstance(data.validation, Holdout) else data.validation)


def _size_of_text(corpora: Iterable[Corpus]) -> int:
    """The size of the text of some corpora in bytes; 0 if it is unknown, as that of compressed files."""
    sizes = [0]
    for corpus in corpora:
        files = _existing_files(corpus)
        is_plain = isinstance(corpus, TextCorpus | TsvCorpus | JsonlCorpus) and files
        if not is_plain or any(file.suffix in COMPRESSION for file in files):
            return 0
        sizes += (file.stat().st_size for file in files)
    return sum(sizes)


def _existing_files(corpus: Corpus) -> list[Path]:
    with suppress(DataError):  # reported when the file is read
        return files_of(corpus)
    return []


def check_data(
    data: DataConfig, tokenizer: Tokenizer | None = None, scanner: CorpusScanner | None = None
) -> Findings:
    """Check every corpus of a config, and the tokenizer on a sample of the training pairs.

    `scanner` must have been made with `check`. Raises DataError if a corpus is missing or its sides differ in
    length; unreadable lines are counted, if `scanner` is not strict.
    """
    scanner = scanner or CorpusScanner(data, seed=0, check=True, strict=False, for_tokenizer=False)
    scan = scanner.result
    findings = scan.findings
    assert findings is not None, "`scanner` must be made with check=True"
    usable = (pair for pair in scan.text.pairs() if pair.source.strip() and pair.target.strip())
    if tokenizer is not None and (count := min(findings.sets["train"].usable, len(scan.text))):
        sample = list(islice(usable, 0, None, -(-count // _SEGMENTED)))
        findings.segmentation = segment(sample, tokenizer, data.max_length)
    return findings
