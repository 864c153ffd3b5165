"""Pairs to token ids, once: a memory-mapped Arrow file with a fingerprint of all that it was made from.

Where segmentation is sampled, every epoch has a file of its own, made from this one.
"""

import hashlib
import heapq
import json
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import chain, islice
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mtrain.config.corpora import Corpus, Holdout
from mtrain.config.schema import DataConfig
from mtrain.data import Pair
from mtrain.data.corpus import content_hash, files_of, good_pairs, read_pairs
from mtrain.errors import DataError, ModelError, StorageError
from mtrain.storage.atomic import verify_folder, write_folder
from mtrain.tokenizer.sampling import make_resegment
from mtrain.tokenizer.tokenizer import Tokenizer

log = logging.getLogger(__name__)

FORMAT = 2  # of the files below and of how pairs are held out; a change re-encodes
BLOCK = 10_000  # pairs that are segmented, and written, at a time
_IDS = pa.list_(pa.int32())
_COLUMNS = {"source": _IDS, "target": _IDS, "source_length": pa.int32(), "target_length": pa.int32()}
_SCHEMA = pa.schema(list(_COLUMNS.items()))
ResegmentBlock = Callable[[pa.Table, int, int], pa.RecordBatch]  # of a block, epoch and number of the block


class EncodedCorpus:
    """Token ids of the training pairs, memory-mapped. Each side of a row ends in EOS; lengths count it.

    `weights` has one number for each row: how often it occurs in an epoch.
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
        """Source and target ids of some rows, in their order."""
        table = self._dataset[rows]
        return table.column("source").combine_chunks(), table.column("target").combine_chunks()

    def epoch(self, number: int) -> "EncodedCorpus":
        """What epoch `number`, from 0, trains on: this corpus or, where segmentation is sampled, its rows
        segmented anew, the same for a number at any time. Raises StorageError if they cannot be written."""
        if self._resegment is None:
            return self
        try:
            # The file has no name any more when this returns; its space is free once nobody holds the corpus.
            with NamedTemporaryFile(dir=self._folder, prefix=".epoch-") as file:
                with pa.OSFile(file.name, "wb") as sink, pa.ipc.new_stream(sink, _SCHEMA) as writer:
                    for block, start in enumerate(range(0, len(self), BLOCK)):
                        rows = self._dataset[start : start + BLOCK]
                        writer.write_batch(self._resegment(rows, number, block))
                return EncodedCorpus(Path(file.name), self.weights)
        except OSError as error:
            raise StorageError(f"{self._folder}: cannot write: {error.strerror or error}") from error


class PreparedData(NamedTuple):
    """What training reads: encoded training pairs, validation pairs as text, and what both came from."""

    train: EncodedCorpus
    validation: list[Pair]
    fingerprint: str


def check_corpora(data: DataConfig) -> None:
    """Look for every file that the config names, before any work. Raises DataError naming what is missing."""
    for corpus in chain(_training_side(data), data.test.values()):
        files_of(corpus)


def prepare_data(
    data: DataConfig, tokenizer: Tokenizer, folder: Path, seed: int, expected: str | None = None
) -> PreparedData:
    """Encode the corpora into `folder`, or reuse what lies there if nothing that it was made from changed.

    `expected` is the fingerprint of the data that a checkpoint was trained on; other data is a ModelError.
    Raises DataError if a corpus is missing, malformed or misaligned, or if no pair is left to train on.
    """
    fingerprint = _fingerprint(data, tokenizer, seed)
    if expected not in (None, fingerprint):
        raise ModelError(
            f"{folder}: the corpus or the tokenizer changed under the checkpoints of this run; "
            "restore them, go on with --allow-data-change, or start another run with --run-dir"
        )
    prepared = _load(folder, data, tokenizer, seed, fingerprint)
    if prepared is None:
        write_folder(folder, lambda temporary: _encode_all(data, tokenizer, temporary, seed, fingerprint))
        prepared = _load(folder, data, tokenizer, seed, fingerprint)
        assert prepared is not None
    return prepared


def _training_side(data: DataConfig) -> list[Corpus]:
    return data.train + ([] if isinstance(data.validation, Holdout) else data.validation)


def _fingerprint(data: DataConfig, tokenizer: Tokenizer, seed: int) -> str:
    """SHA-256 over settings and contents: a touched file is the same data, and so are other weights."""
    keys = {"train", "validation", "max_length", "bad_lines", "subword_sampling"}
    settings = {
        "format": FORMAT,
        "data": data.model_dump(mode="json", include=keys, exclude={"train": {"__all__": {"weight"}}}),
        "seed": seed,
        "tokenizer": tokenizer.fingerprint(),
    }
    value = [settings, [content_hash(corpus) for corpus in _training_side(data)]]
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _load(
    folder: Path, data: DataConfig, tokenizer: Tokenizer, seed: int, fingerprint: str
) -> PreparedData | None:
    """The encoded data of a folder; None if there is none, or it is of other data, cut short or damaged."""
    if not folder.exists():
        return None
    try:
        summary = json.loads((folder / "summary.json").read_bytes())
        if summary["fingerprint"] != fingerprint:
            return None
        verify_folder(folder, ("train.arrow", "validation.jsonl", "summary.json"))
        weights = np.repeat([corpus.weight for corpus in data.train], summary["kept"])
        train = EncodedCorpus(folder / "train.arrow", weights, _sampling(data, tokenizer, seed))
        with (folder / "validation.jsonl").open(encoding="utf-8", newline="\n") as lines:
            validation = [Pair(*json.loads(line)) for line in lines]
    except (ModelError, OSError, ValueError, TypeError, KeyError) as error:
        log.warning("%s: damaged, so the corpus is encoded again (%s)", folder, error)
        return None
    sizes = f"{len(train):,} training pairs (dropped: {_listed(summary['dropped']) or 'none'})"
    log.info("data: %s, %s validation pairs", sizes, f"{len(validation):,}")
    return PreparedData(train, validation, fingerprint)


def _encode_all(data: DataConfig, tokenizer: Tokenizer, folder: Path, seed: int, fingerprint: str) -> None:
    """Write `train.arrow`, `validation.jsonl` and `summary.json` into an empty folder."""
    held_out: set[str] = set()
    if isinstance(data.validation, Holdout):
        validation = _draw_holdout(good_pairs(data.train, data.bad_lines), data.validation.holdout, seed)
        held_out = {pair.source for pair in validation}
    else:
        validation = list(good_pairs(data.validation, data.bad_lines))
    if not validation:
        raise DataError("data.validation holds no pairs; give a corpus that does, or {holdout: N}")
    with (folder / "validation.jsonl").open("w", encoding="utf-8", newline="\n") as lines:
        lines.writelines(json.dumps(pair, ensure_ascii=False) + "\n" for pair in validation)
    kept, dropped = [0] * len(data.train), Counter[str]()
    with pa.OSFile(str(folder / "train.arrow"), "wb") as sink, pa.ipc.new_stream(sink, _SCHEMA) as writer:
        for index, corpus in enumerate(data.train):
            pairs = read_pairs(corpus, data.bad_lines)
            while block := list(islice(pairs, BLOCK)):
                batch = _encode_block(block, tokenizer, data.max_length, held_out, dropped)
                writer.write_batch(batch)
                kept[index] += batch.num_rows
    if not sum(kept):
        reasons = _listed(dropped) or "none, the corpora are empty"
        raise DataError(f"no training pair is left; dropped: {reasons}")
    summary = {"fingerprint": fingerprint, "kept": kept, "dropped": dropped}
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")


def _listed(dropped: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in dropped.items())


def _draw_holdout(pairs: Iterable[Pair], count: int, seed: int) -> list[Pair]:
    """`count` pairs of different sources, each source as likely as any other, in corpus order.

    They are those whose hash of seed and source is smallest. Where the corpus grows, none that was trained on
    comes to be held out; where it shrinks, as many as the held-out ones that are gone.
    """
    drawn: dict[bytes, tuple[int, Pair]] = {}  # by hash
    for position, pair in enumerate(pairs):
        if pair.source.strip() and pair.target.strip():
            digest = hashlib.blake2b(f"{seed} {pair.source}".encode(), digest_size=16).digest()
            drawn.setdefault(digest, (position, pair))
        if len(drawn) > 2 * count + BLOCK:  # so that memory is bounded
            drawn = dict(heapq.nsmallest(count, drawn.items()))
    return [pair for _, pair in sorted(dict(heapq.nsmallest(count, drawn.items())).values())]


def _encode_block(
    block: list[Pair | None], tokenizer: Tokenizer, max_length: int, held_out: set[str], dropped: Counter[str]
) -> pa.RecordBatch:
    """The pairs of a block that are fit to train on, as ids; the others are counted in `dropped`."""
    dropped.update("bad" for pair in block if pair is None)
    pairs = [pair for pair in block if pair is not None]
    sources = tokenizer.encode_source([pair.source for pair in pairs])
    targets = tokenizer.encode_target([pair.target for pair in pairs])
    kept = []
    for pair, source, target in zip(pairs, sources, targets, strict=True):
        if not (pair.source.strip() and pair.target.strip() and source and target):
            dropped["empty"] += 1  # also where normalisation removes every character
        elif pair.source in held_out:
            dropped["held out"] += 1  # with its duplicates, or validation would score what training saw
        elif max(len(source), len(target)) + 1 > max_length:
            dropped["too long"] += 1
        else:
            kept.append(([*source, tokenizer.special.eos], [*target, tokenizer.special.eos]))
    return _as_batch(kept)


def _as_batch(rows: list[tuple[list[int], list[int]]]) -> pa.RecordBatch:
    sides = [pa.array([ids[side] for ids in rows], _IDS) for side in (0, 1)]
    return pa.record_batch([*sides, *(side.value_lengths() for side in sides)], _SCHEMA)


def _sampling(data: DataConfig, tokenizer: Tokenizer, seed: int) -> ResegmentBlock | None:
    """What segments a block anew, by (seed, epoch, block) alone; None where segmentation is not sampled.

    A pair one side of which gets too long stays as it was: every epoch has the same rows.
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
