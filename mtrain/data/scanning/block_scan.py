"""The scan of blocks of training pairs, in this process or in several."""

from collections.abc import Iterable, Iterator
from dataclasses import astuple
from typing import NamedTuple

import numpy as np
from safetensors.numpy import load, save

from mtrain.config.data import DataConfig
from mtrain.config.languages import Direction
from mtrain.data.pairs.filters import BlockFilter, FilteredBlock
from mtrain.data.pairs.rejections import EMPTY
from mtrain.data.reading.blocks import RawBlock
from mtrain.data.reading.parse import Block, parse_block, refuse_unless_skipped
from mtrain.data.scanning.block_check import BlockCheck, BlockFindings
from mtrain.data.scanning.block_messages import pack_block, unpack_block
from mtrain.data.scanning.leaks import PairHashes
from mtrain.data.scanning.samples import BlockSample, HoldoutCandidate, draw_candidates, sample_block
from mtrain.data.scanning.shifts import Shift
from mtrain.processes import Job, map_tasks
from mtrain.worker_messages import Answer, Message, Receive
from mtrain.worker_messages import serve as serve_tasks

_COLUMNS = [f"{name}_{column}" for name in ("hashes", "overlap") for column in PairHashes._fields]


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
        self.data, self._seed, self._strict, self._held_out = data, seed, strict, held_out
        self._check = check
        self._filter = BlockFilter(data) if data.filters else None
        # Else, of corpora that have the same sources, only the first one would be validated. Further
        # directions change nothing in that of `data`.
        own = Direction(data.source_lang, data.target_lang)
        self._holdout_keys = [str(seed) if each == own else f"{seed} {each}" for each in data.directions]

    def scan(self, task: ScanTask) -> ScannedBlock:
        """Scan a block. Raises DataError if, with `strict`, a pair is unreadable."""
        corpus = self.data.train[task.corpus]
        block = parse_block(task.raw, corpus, self.data.score_of(corpus))
        return self.scan_block(block, task.corpus, task.threshold, task.max_digest)

    def scan_block(self, block: Block, corpus: int, threshold: int, max_digest: str) -> ScannedBlock:
        """Like `scan`, for a decoded block."""
        if self._strict:
            for error in block.errors.values():
                refuse_unless_skipped(error, self.data.bad_lines)
        unfiltered, filtered = block, None
        if self._filter:
            filtered = self._filter.apply(block, corpus)
            codes = filtered.codes[block.indices]
            block = block.select((codes == 0) | (codes == EMPTY))
        return ScannedBlock(
            len(unfiltered.sources),
            sample_block(block, corpus, self._seed, threshold),
            draw_candidates(block, corpus, self._holdout_keys[corpus], self._held_out, max_digest),
            self._check.check(block, corpus, unfiltered) if self._check else None,
            filtered,
        )

    def settings(self) -> Message:
        """What another process needs to make this scanner."""
        header = {"data": self.data.model_dump(mode="json"), "seed": self._seed, "strict": self._strict}
        header |= {"held_out": self._held_out}
        if self._check is None:
            return Message(header)
        check = {"scripts": self._check.scripts, "keep_source_hashes": self._check.keep_source_hashes}
        return Message({**header, **check}, (save(self._check.evaluation_hashes._asdict()),))

    @classmethod
    def with_settings(cls, settings: Message) -> "BlockScanner":
        """A scanner with the `settings` of another one."""
        header, contents = settings
        check = None
        if contents:
            hashes = PairHashes(**load(contents[0]))
            check = BlockCheck(header["scripts"], hashes, header["keep_source_hashes"])
        data = DataConfig.model_validate(header["data"])
        return cls(data, header["seed"], header["strict"], header["held_out"], check)


def scan_all(
    scanner: BlockScanner, tasks: Iterable[ScanTask], workers: int
) -> Iterator[tuple[ScanTask, ScannedBlock]]:
    """Scan blocks in order, with `workers` processes if these are several. Raises what `BlockScanner.scan`
    raises."""

    def pack(task: ScanTask) -> Message:
        header = {"corpus": task.corpus, "threshold": task.threshold, "max_digest": task.max_digest}
        corpus = scanner.data.train[task.corpus]
        return pack_block(task.raw, corpus, header, scanner.data.score_of(corpus))

    return map_tasks(Job(__name__, scanner.settings(), pack, _unpack, scanner.scan), tasks, workers)


def serve() -> None:
    """The worker process: scan blocks until the pipe is closed."""
    serve_tasks(_prepare)


def _prepare(receive: Receive) -> Answer:
    scanner = BlockScanner.with_settings(receive())

    def answer(task: Message) -> Message:
        corpus = task.header["corpus"]
        spec = scanner.data.train[corpus]
        block = unpack_block(task, spec, scanner.data.score_of(spec))
        return _pack(scanner.scan_block(block, corpus, task.header["threshold"], task.header["max_digest"]))

    return answer


def _pack(scanned: ScannedBlock) -> Message:
    header = {"pairs": scanned.pairs, "candidates": scanned.candidates}
    arrays: dict[str, np.ndarray] = {
        "random_numbers": scanned.sample.random_numbers,
        "sizes": scanned.sample.sizes,
    }
    if (findings := scanned.findings) is not None:
        found = {**findings._asdict(), "shifts": [*map(astuple, findings.shifts)]}
        columns = (*found.pop("hashes"), *found.pop("overlap"))
        arrays |= dict(zip(_COLUMNS, columns, strict=True))
        header["findings"] = found
    if scanned.filtered is not None:
        arrays |= {"codes": scanned.filtered.codes, "keys": scanned.filtered.keys}
    return Message(header, (save(arrays), *scanned.sample.texts))


def _unpack(answer: Message) -> ScannedBlock:
    header, (packed, source, target) = answer
    arrays, findings = load(packed), None
    if found := header.get("findings"):
        found["shifts"] = [Shift(*shift) for shift in found["shifts"]]
        columns = [arrays[name] for name in _COLUMNS]
        findings = BlockFindings(**found, hashes=PairHashes(*columns[:3]), overlap=PairHashes(*columns[3:]))
    candidates = [HoldoutCandidate(*each) for each in header["candidates"]]
    return ScannedBlock(
        header["pairs"],
        BlockSample(arrays["random_numbers"], arrays["sizes"], (source, target)),
        candidates,
        findings,
        FilteredBlock(arrays["codes"], arrays["keys"]) if "codes" in arrays else None,
    )
