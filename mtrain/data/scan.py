"""The first pass over the raw text, which collects everything that is needed before the text is encoded.

A new run reads the raw text twice: once here, and once to encode it. This pass hashes the files, counts and
checks the pairs, draws the held-out pairs, and keeps a sample of the text for the tokenizer.
"""

import hashlib
import heapq
import random
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, compress, islice, zip_longest
from pathlib import Path
from tempfile import SpooledTemporaryFile

import numpy as np

from mtrain.config.corpora import Corpus, Holdout
from mtrain.config.data import DataConfig
from mtrain.data import Pair
from mtrain.data.check import DataCheck, Findings, segment
from mtrain.data.corpus import content_hash, parse_block, read_blocks, refuse_unless_skipped
from mtrain.data.corpus_files import files_of
from mtrain.data.lines import Digests
from mtrain.data.sources import read_digests, require_unchanged, stamps_of
from mtrain.errors import DataError, StorageError
from mtrain.tokenizer.learn import SAMPLED_SENTENCES
from mtrain.tokenizer.tokenizer import Tokenizer

_IN_MEMORY = 2**26  # bytes of the sample, on each side; a larger sample goes to a temporary file
_CANDIDATES = 10_000  # held-out candidates kept in memory in addition to twice the requested number
_SEGMENTED = 20_000  # maximum number of pairs that a check segments


@dataclass
class ScanResult:
    """The result of one pass over the training corpora."""

    pairs: int  # readable pairs
    text: "TextSample"
    held_out: list[Pair]  # empty unless validation is a holdout
    findings: Findings | None  # None without a check


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
    ):
        """With `check`, the data is also checked. With `strict`, an unreadable pair is an error, unless
        `data.bad_lines` is `skip`. Temporary files are written to `folder`. Files whose SHA-256 is recorded
        in one of `data_folders` are not read to hash them. `missing` are the content hashes of the training
        and validation corpora whose files are missing, and None for the others."""
        self.data, self.seed = data, seed
        self._folder, self._check = folder, check
        self._bad_lines = data.bad_lines if strict else "skip"
        # First the time and the stamps, so that every later change of a file is noticed.
        self.started = time.time_ns()
        self._stamps = stamps_of(chain.from_iterable(map(_existing_files, train_and_validation(data))))
        # Of all files hashed so far.
        self.digests: Digests = {}
        for each in data_folders:
            self.digests |= read_digests(each)
        self._missing = missing

    @cached_property
    def result(self) -> ScanResult:
        """One pass over the training corpora. Raises DataError if one is missing, misaligned or, if strict,
        has an unreadable pair; StorageError if the temporary files cannot be written."""
        data, digests = self.data, self.digests
        check = DataCheck(data, digests) if self._check else None
        text = TextSample(SAMPLED_SENTENCES, self.seed, self._folder)
        count = data.validation.holdout if isinstance(data.validation, Holdout) else 0
        holdout, pairs = HoldoutSampler(count, self.seed), 0
        try:
            for corpus in data.train:
                for raw in read_blocks(corpus, digests):
                    block = parse_block(raw, corpus)
                    if check is not None:
                        check.add(block, corpus)
                    for error in block.errors.values():
                        refuse_unless_skipped(error, self._bad_lines)
                    pairs += len(block.sources)
                    text.add(block.sources, block.targets)
                    holdout.add(block.sources, block.targets)
        except OSError as error:
            raise StorageError(f"cannot write temporary files: {error.strerror or error}") from error
        held_out = holdout.pairs()
        findings = check.findings(held_out) if check else None
        return ScanResult(pairs, text, held_out, findings)

    @cached_property
    def content_hashes(self) -> list[str]:
        """The content hash of each training corpus, then of each validation corpus. Files in `digests`, such
        as those that `result` has read, are not read."""
        corpora = zip_longest(train_and_validation(self.data), self._missing)
        return [known or content_hash(corpus, self.digests) for corpus, known in corpora]

    def require_unchanged(self, corpora: Iterable[Corpus]) -> None:
        """Raise DataError if a file of these training or validation corpora has changed since the scanner was
        made, so that its hash may be that of other text."""
        require_unchanged(chain.from_iterable(map(files_of, corpora)), self._stamps)

    @property
    def training_hashes(self) -> list[str]:
        """The content hash of each training corpus."""
        return self.content_hashes[: len(self.data.train)]


def train_and_validation(data: DataConfig) -> list[Corpus]:
    """The training corpora, then the validation corpora."""
    return data.train + ([] if isinstance(data.validation, Holdout) else data.validation)


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
    scan = (scanner or CorpusScanner(data, seed=0, check=True, strict=False)).result
    findings = scan.findings
    assert findings is not None, "`scanner` must be made with check=True"
    usable = (pair for pair in scan.text.pairs() if pair.source.strip() and pair.target.strip())
    if tokenizer is not None and (count := min(findings.sets["train"].usable, len(scan.text))):
        sample = list(islice(usable, 0, None, -(-count // _SEGMENTED)))
        findings.segmentation = segment(sample, tokenizer, data.max_length)
    return findings


class TextSample:
    """A uniform sample of at most `limit` pairs, in the order of the corpus. A corpus of up to `limit` pairs
    is sampled completely.

    Each pair draws a number in [0, 1) and is kept if that is below `rate`; when the sample is full, `rate` is
    halved. The text is stored in files; in memory, each pair that was ever in the sample takes 8 bytes.
    """

    def __init__(self, limit: int, seed: int, folder: Path | None = None):
        self._limit, self._rate, self._random = limit, 1.0, random.Random(seed)
        self._draws = array("d")  # of the pairs in the files; those at or above `_rate` left the sample
        self._size = 0
        place = None if folder is None else str(folder)
        self._files = [SpooledTemporaryFile(_IN_MEMORY, dir=place) for _ in Pair._fields]  # noqa: SIM115

    def __len__(self) -> int:
        return self._size

    def add(self, sources: Sequence[str], targets: Sequence[str]) -> None:
        """Consider the next pairs."""
        draws = [self._random.random() for _ in sources]
        kept = [draw < self._rate for draw in draws]
        for file, texts in zip(self._files, (sources, targets), strict=True):
            # Text has no NUL, but a field of JSON may have a line break.
            chosen = (text.replace("\n", "\0") + "\n" for text in compress(texts, kept))
            file.write("".join(chosen).encode())
        self._draws.extend(compress(draws, kept))
        self._size += sum(kept)
        while self._size > self._limit:
            self._rate /= 2
            self._size = int((np.frombuffer(self._draws) < self._rate).sum())

    def side(self, index: int) -> Iterator[str]:
        """The source (0) or target (1) texts of the sample."""
        file = self._files[index]
        file.seek(0)
        for draw, line in zip(self._draws, file, strict=True):
            if draw < self._rate:
                yield line[:-1].decode().replace("\0", "\n")

    def pairs(self) -> Iterator[Pair]:
        """The pairs of the sample."""
        return map(Pair, self.side(0), self.side(1))


class HoldoutSampler:
    """Draws `count` pairs with distinct sources; each source is equally likely.

    They are the pairs with the smallest hash of seed and source. If the corpus grows, no pair that was in it
    before becomes held out; if it shrinks, only the missing held-out pairs are replaced.
    """

    def __init__(self, count: int, seed: int):
        self._count, self._seed, self._seen = count, seed, 0
        self._drawn: dict[bytes, tuple[int, Pair]] = {}  # position and pair, by hash

    def add(self, sources: Sequence[str], targets: Sequence[str]) -> None:
        """Consider the next pairs of the corpus."""
        if not self._count:
            return
        for source, target in zip(sources, targets, strict=True):
            if source.strip() and target.strip():
                digest = hashlib.blake2b(f"{self._seed} {source}".encode(), digest_size=16).digest()
                self._drawn.setdefault(digest, (self._seen, Pair(source, target)))
                self._seen += 1
        if len(self._drawn) > 2 * self._count + _CANDIDATES:
            self._drawn = dict(heapq.nsmallest(self._count, self._drawn.items()))

    def pairs(self) -> list[Pair]:
        """The drawn pairs, in the order of the corpus."""
        return [pair for _, pair in sorted(dict(heapq.nsmallest(self._count, self._drawn.items())).values())]
