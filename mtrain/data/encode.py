"""Encodes the training pairs once, into a memory-mapped Arrow file with a fingerprint of its inputs.

With subword sampling, each epoch has a temporary file with new segmentations of the same rows.
"""

import hashlib
import json
import logging
import random
from collections import Counter
from collections.abc import Callable
from itertools import chain
from operator import not_
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mtrain.config.corpora import Corpus, Holdout
from mtrain.config.data import DataConfig
from mtrain.data import Pair
from mtrain.data.corpus import Block, files_of, good_pairs, parse_block, read_blocks, refuse_unless_skipped
from mtrain.data.scan import CorpusScanner
from mtrain.errors import DataError, ModelError, StorageError
from mtrain.storage.atomic import write_folder
from mtrain.storage.manifest import verify_folder
from mtrain.tokenizer.sampling import make_resegment
from mtrain.tokenizer.tokenizer import Tokenizer

log = logging.getLogger(__name__)

FORMAT = 2  # version of the encoded files and of the holdout; if it changes, runs encode again
BLOCK = 10_000  # pairs that are segmented and written at a time
_IDS = pa.list_(pa.int32())
_COLUMNS = {"source": _IDS, "target": _IDS, "source_length": pa.int32(), "target_length": pa.int32()}
_SCHEMA = pa.schema(list(_COLUMNS.items()))
# Its arguments are a block, the epoch and the number of the block.
ResegmentBlock = Callable[[pa.Table, int, int], pa.RecordBatch]


class EncodedCorpus:
    """Token ids of the training pairs, memory-mapped. Each side of a row ends in EOS; lengths include it.

    `weights[i]` is how often row i occurs in an epoch.
    """

    def __init__(self, path: Path, weights: npt.NDArray[np.float64], resegment: ResegmentBlock | None = None):
        import datasets

        self._folder, self._resegment = path.parent, resegment
        self._dataset = datasets.Dataset.from_file(str(path)).with_format("arrow")
        self.source_lengths: npt.NDArray[np.int32] = self._dataset.data.column("source_length").to_numpy()
        self.target_lengths: npt.NDArray[np.int32] = self._dataset.data.column("target_length").to_numpy()
        self.weights = weights

    def __len__(self) -> int:
        return len(self.source_lengths)

    def fetch(self, rows: list[int]) -> tuple[pa.ListArray, pa.ListArray]:
        """Source and target ids of the given rows, in the given order."""
        table = self._dataset[rows]
        return table.column("source").combine_chunks(), table.column("target").combine_chunks()

    def epoch(self, number: int) -> "EncodedCorpus":
        """The corpus of epoch `number` (from 0): this one or, with subword sampling, its rows with new
        segmentations, which depend only on the epoch and the seed. Raises StorageError if they cannot be
        written."""
        if self._resegment is None:
            return self
        try:
            # The file is unlinked at once; its space is freed when the corpus is garbage-collected.
            with NamedTemporaryFile(dir=self._folder, prefix=".epoch-") as file:
                with pa.OSFile(file.name, "wb") as sink, pa.ipc.new_stream(sink, _SCHEMA) as writer:
                    for block, start in enumerate(range(0, len(self), BLOCK)):
                        rows = self._dataset[start : start + BLOCK]
                        writer.write_batch(self._resegment(rows, number, block))
                return EncodedCorpus(Path(file.name), self.weights)
        except OSError as error:
            raise StorageError(f"{self._folder}: cannot write: {error.strerror or error}") from error


class PreparedData(NamedTuple):
    """What training reads: encoded training pairs, validation pairs as text, and a hash of their inputs."""

    train: EncodedCorpus
    validation: list[Pair]
    fingerprint: str


def check_corpora(data: DataConfig) -> None:
    """Raise DataError if a file that the config names does not exist."""
    for corpus in chain(_train_and_validation(data), data.test.values()):
        files_of(corpus)


def prepare_data(
    data: DataConfig,
    tokenizer: Tokenizer,
    folder: Path,
    seed: int,
    expected: str | None = None,
    scanner: CorpusScanner | None = None,
) -> PreparedData:
    """Encode the corpora into `folder`, or reuse its contents if none of their inputs has changed.

    `expected` is the fingerprint of the data that a checkpoint was trained on. Raises ModelError if the data
    differs from it, and DataError if a corpus is missing, malformed or misaligned, or if no training pair is
    left.
    """
    scanner = scanner or CorpusScanner(data, seed, folder.parent)
    fingerprint = _fingerprint(data, tokenizer, scanner)
    if expected not in (None, fingerprint):
        raise ModelError(
            f"{folder}: the corpus or the tokenizer changed since the checkpoints of this run were written; "
            "restore it, resume with --allow-data-change, or start another run with --run-dir"
        )
    prepared = _load(folder, data, tokenizer, seed, fingerprint)
    if prepared is None:
        log.info("data: encoding the corpus into %s", folder)
        write_folder(folder, lambda temporary: _encode_all(data, tokenizer, temporary, scanner, fingerprint))
        prepared = _load(folder, data, tokenizer, seed, fingerprint)
        assert prepared is not None
    return prepared


def _train_and_validation(data: DataConfig) -> list[Corpus]:
    return data.train + ([] if isinstance(data.validation, Holdout) else data.validation)


def _fingerprint(data: DataConfig, tokenizer: Tokenizer, scanner: CorpusScanner) -> str:
    """SHA-256 of settings and contents. Modification times and corpus weights do not change it."""
    keys = {"train", "validation", "max_length", "bad_lines", "subword_sampling"}
    settings = {
        "format": FORMAT,
        "data": data.model_dump(mode="json", include=keys, exclude={"train": {"__all__": {"weight"}}}),
        "seed": scanner.seed,
        "tokenizer": tokenizer.fingerprint(),
    }
    value = [settings, scanner.content_hashes]
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _load(
    folder: Path, data: DataConfig, tokenizer: Tokenizer, seed: int, fingerprint: str
) -> PreparedData | None:
    """The encoded data in a folder, or None if it is missing, damaged or made from different inputs."""
    if not folder.exists():
        return None
    try:
        summary = json.loads((folder / "summary.json").read_bytes())
        if summary["fingerprint"] != fingerprint:
            return None
        verify_folder(folder, ("train.arrow", "validation.jsonl", "summary.json"))
        weights = np.repeat([corpus.weight for corpus in data.train], summary["kept"])
        train = EncodedCorpus(folder / "train.arrow", weights, _block_resegmenter(data, tokenizer, seed))
        with (folder / "validation.jsonl").open(encoding="utf-8", newline="\n") as lines:
            validation = [Pair(*json.loads(line)) for line in lines]
    except (ModelError, OSError, ValueError, TypeError, KeyError) as error:
        log.warning("%s: damaged; encoding the corpus again (%s)", folder, error)
        return None
    train_size = f"{len(train):,} training pairs (dropped: {_format_counts(summary['dropped']) or 'none'})"
    log.info("data: %s, %s validation pairs", train_size, f"{len(validation):,}")
    return PreparedData(train, validation, fingerprint)


def _encode_all(
    data: DataConfig, tokenizer: Tokenizer, folder: Path, scanner: CorpusScanner, fingerprint: str
) -> None:
    """Write `train.arrow`, `validation.jsonl` and `summary.json` into an empty folder."""
    held_out: set[str] = set()
    if isinstance(data.validation, Holdout):
        validation = scanner.result.held_out
        held_out = {pair.source for pair in validation}
    else:
        validation = list(good_pairs(data.validation, data.bad_lines))
    if not validation:
        raise DataError("data.validation has no pairs; give another corpus, or {holdout: N}")
    with (folder / "validation.jsonl").open("w", encoding="utf-8", newline="\n") as lines:
        lines.writelines(json.dumps(pair, ensure_ascii=False) + "\n" for pair in validation)
    kept, dropped = [0] * len(data.train), Counter[str]()
    with pa.OSFile(str(folder / "train.arrow"), "wb") as sink, pa.ipc.new_stream(sink, _SCHEMA) as writer:
        for index, corpus in enumerate(data.train):
            for raw in read_blocks(corpus, size=BLOCK):
                block = parse_block(raw, corpus)
                for error in block.errors.values():
                    refuse_unless_skipped(error, data.bad_lines)
                batch = _encode_block(block, tokenizer, data.max_length, held_out, dropped)
                writer.write_batch(batch)
                kept[index] += batch.num_rows
    if not sum(kept):
        reasons = _format_counts(dropped) or "none, the corpora are empty"
        raise DataError(f"no training pair is left; dropped: {reasons}")
    summary = {"fingerprint": fingerprint, "kept": kept, "dropped": dropped}
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")


def _format_counts(dropped: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in dropped.items())


def _encode_block(
    block: Block, tokenizer: Tokenizer, max_length: int, held_out: set[str], dropped: Counter[str]
) -> pa.RecordBatch:
    """The usable pairs of a block, as ids; the others are counted in `dropped`."""
    rows = tokenizer.encode_source(block.sources), tokenizer.encode_target(block.targets)
    sides = [_Ragged.of(ids, tokenizer.special.eos) for ids in rows]
    count = len(block.sources)
    blank = [np.fromiter(map(not_, map(str.strip, texts)), np.bool_, count) for texts in block[:2]]
    # Also empty if normalization removes every character.
    empty = blank[0] | blank[1] | (np.minimum(sides[0].lengths, sides[1].lengths) == 1)
    # Including duplicates, since validation must not score training pairs.
    held = np.fromiter(map(held_out.__contains__, block.sources), np.bool_, count) & ~empty
    too_long = (np.maximum(sides[0].lengths, sides[1].lengths) > max_length) & ~empty & ~held
    counts = {
        "bad": len(block.errors),
        "empty": empty.sum(),
        "held out": held.sum(),
        "too long": too_long.sum(),
    }
    for reason, number in counts.items():
        if number:
            dropped[reason] += int(number)
    kept = [side.select(~(empty | held | too_long)) for side in sides]
    lists, lengths = [side.as_lists() for side in kept], [pa.array(side.lengths) for side in kept]
    return pa.record_batch([*lists, *lengths], _SCHEMA)


class _Ragged(NamedTuple):
    """Rows of ids of different lengths."""

    ids: npt.NDArray[np.int32]  # of all rows
    lengths: npt.NDArray[np.int32]  # of each row

    @classmethod
    def of(cls, rows: list[list[int]], eos: int) -> "_Ragged":
        """The given rows, with `eos` at the end of each."""
        lengths = np.fromiter(map(len, rows), np.int32, len(rows)) + np.int32(1)
        ids = np.full(int(lengths.sum()), eos, np.int32)
        inside = np.ones(len(ids), np.bool_)
        inside[np.cumsum(lengths) - 1] = False
        ids[inside] = np.fromiter(chain.from_iterable(rows), np.int32, len(ids) - len(rows))
        return cls(ids, lengths)

    def select(self, rows: npt.NDArray[np.bool_]) -> "_Ragged":
        """The rows for which a mask is True."""
        return _Ragged(self.ids[np.repeat(rows, self.lengths)], self.lengths[rows])

    def as_lists(self) -> pa.ListArray:
        """The rows as an Arrow array."""
        offsets = np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int32)
        return pa.ListArray.from_arrays(offsets, self.ids)


def _as_batch(rows: list[tuple[list[int], list[int]]]) -> pa.RecordBatch:
    sides = [pa.array([ids[side] for ids in rows], _IDS) for side in (0, 1)]
    return pa.record_batch([*sides, *(side.value_lengths() for side in sides)], _SCHEMA)


def _block_resegmenter(data: DataConfig, tokenizer: Tokenizer, seed: int) -> ResegmentBlock | None:
    """A function that samples new segmentations of a block, or None without subword sampling. The
    segmentations depend only on (seed, epoch, block).

    A pair that would become too long keeps its segmentation, so every epoch has the same rows.
    """
    if data.subword_sampling is None:
        return None
    source = target = make_resegment(tokenizer.source, data.subword_sampling)
    if tokenizer.target is not tokenizer.source:
        target = make_resegment(tokenizer.target, data.subword_sampling)

    def resegment(block: pa.Table, epoch: int, number: int) -> pa.RecordBatch:
        generator, rows = random.Random(f"{seed} {epoch} {number}"), []
        for old in zip(block["source"].to_pylist(), block["target"].to_pylist(), strict=True):
            new = source(old[0], generator), target(old[1], generator)
            rows.append(new if max(map(len, new)) <= data.max_length else old)
        return _as_batch(rows)

    return resegment
