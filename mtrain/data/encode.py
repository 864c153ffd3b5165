"""Pairs to token ids, once: a memory-mapped Arrow file with a fingerprint of all that it was made from."""

import hashlib
import json
import logging
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mtrain.data import Pair
from mtrain.data.corpus import content_hash, files_of, read_pairs
from mtrain.errors import DataError, ModelError
from mtrain.schema import Corpus, DataConfig, Holdout
from mtrain.storage import verify_folder, write_atomically, write_folder
from mtrain.tokenizer import Tokenizer

log = logging.getLogger(__name__)

FORMAT = 1  # of the files below; a change re-encodes
BLOCK = 10_000  # pairs that are segmented, and written, at a time
_IDS = pa.list_(pa.int32())
_SCHEMA = pa.schema(
    [("source", _IDS), ("target", _IDS), ("source_length", pa.int32()), ("target_length", pa.int32())]
)


class EncodedCorpus:
    """Token ids of the training pairs, memory-mapped. Each side of a row ends in EOS; lengths count it.

    `weights` has one number for each row: how often it occurs in an epoch.
    """

    def __init__(self, path: Path, weights: npt.NDArray[np.float64]):
        import datasets

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


class PreparedData(NamedTuple):
    """What training reads: encoded training pairs, validation pairs as text, and what both came from."""

    train: EncodedCorpus
    validation: list[Pair]
    fingerprint: str


def check_corpora(data: DataConfig) -> None:
    """Look for every file that the config names, before any work. Raises DataError naming what is missing."""
    for corpus in chain(_training_side(data), data.test.values()):
        files_of(corpus)


def read_training_text(data: DataConfig) -> Iterator[Pair]:
    """The training pairs as text, each once; bad ones are left out or raise, as `data.bad_lines` says."""
    pairs = chain.from_iterable(read_pairs(corpus, data.bad_lines) for corpus in data.train)
    return (pair for pair in pairs if pair is not None)


def prepare_data(
    data: DataConfig, tokenizer: Tokenizer, folder: Path, seed: int, expected: str | None = None
) -> PreparedData:
    """Encode the corpora into `folder`, or reuse what lies there if nothing that it was made from changed.

    `expected` is the fingerprint of the data that a checkpoint was trained on; other data is a ModelError.
    Raises DataError if a corpus is missing, malformed or misaligned, or if no pair is left to train on.
    """
    settings = {
        "format": FORMAT,
        "data": data.model_dump(
            mode="json",
            include={"train", "validation", "max_length", "bad_lines"},
            exclude={"train": {"__all__": {"weight"}}},
        ),
        "seed": seed,
        "tokenizer": tokenizer.fingerprint(),
    }
    stamps = _digest([settings, file_stamps(_training_side(data))])
    summary = _read_json(folder / "summary.json")
    fingerprint = summary.get("fingerprint")
    if fingerprint is None or _read_json(folder / "stamps.json").get("stamps") != stamps:
        # A touched or copied file has new stamps and the same contents: only contents decide.
        fingerprint = _digest([settings, [content_hash(corpus) for corpus in _training_side(data)]])
    if expected not in (None, fingerprint):
        raise ModelError(
            f"{folder}: the corpus or the tokenizer changed under the checkpoints of this run; "
            "restore them, or start another run with --run-dir"
        )
    prepared = _load(folder, data) if summary.get("fingerprint") == fingerprint else None
    if prepared is None:
        write_folder(folder, lambda temporary: _encode_all(data, tokenizer, temporary, seed, fingerprint))
        prepared = _load(folder, data)
        assert prepared is not None
    if _read_json(folder / "stamps.json").get("stamps") != stamps:
        write_atomically(folder / "stamps.json", json.dumps({"stamps": stamps}) + "\n")
    summary = _read_json(folder / "summary.json")
    drops = ", ".join(f"{count:,} {reason}" for reason, count in summary["dropped"].items()) or "none"
    training, validation = f"{len(prepared.train):,}", f"{len(prepared.validation):,}"
    log.info("data: %s training pairs (dropped: %s), %s validation pairs", training, drops, validation)
    return prepared


def _training_side(data: DataConfig) -> list[Corpus]:
    return data.train + ([] if isinstance(data.validation, Holdout) else data.validation)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def file_stamps(corpora: list[Corpus]) -> list[tuple[str, int, int]]:
    """Name, size and time of change of every file: equal stamps mean equal contents, at no cost."""
    stats = [(str(file), file.stat()) for corpus in corpora for file in files_of(corpus)]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_bytes())
        return value if isinstance(value, dict) else {}
    except (OSError, ValueError):
        return {}


def _load(folder: Path, data: DataConfig) -> PreparedData | None:
    """The encoded data of a folder; None if a file is missing, cut short or unreadable."""
    try:
        verify_folder(folder, ("train.arrow", "validation.jsonl", "summary.json"))
        summary = _read_json(folder / "summary.json")
        weights = np.repeat([corpus.weight for corpus in data.train], summary["kept"])
        train = EncodedCorpus(folder / "train.arrow", weights)
        with (folder / "validation.jsonl").open(encoding="utf-8", newline="\n") as lines:
            validation = [Pair(*json.loads(line)) for line in lines]
        return PreparedData(train, validation, summary["fingerprint"])
    except (ModelError, OSError, ValueError, TypeError, KeyError) as error:
        log.warning("%s: damaged, so the corpus is encoded again (%s)", folder, error)
        return None


def _encode_all(
    data: DataConfig, tokenizer: Tokenizer, folder: Path, seed: int, fingerprint: str | None
) -> None:
    """Write `train.arrow`, `validation.jsonl` and `summary.json` into an empty folder."""
    if isinstance(data.validation, Holdout):
        validation = _draw_holdout(read_training_text(data), data.validation.holdout, seed)
        held_out = {pair.source for pair in validation}
    else:
        read = chain.from_iterable(read_pairs(corpus, data.bad_lines) for corpus in data.validation)
        validation, held_out = [pair for pair in read if pair is not None], set()
    if not validation:
        raise DataError("data.validation holds no pairs; give a corpus that does, or {holdout: N}")
    with (folder / "validation.jsonl").open("w", encoding="utf-8", newline="\n") as lines:
        lines.writelines(json.dumps(pair, ensure_ascii=False) + "\n" for pair in validation)
    kept: list[int] = []
    dropped: Counter[str] = Counter()
    with pa.OSFile(str(folder / "train.arrow"), "wb") as sink, pa.ipc.new_stream(sink, _SCHEMA) as writer:
        for corpus in data.train:
            kept.append(0)
            for block in _blocks(read_pairs(corpus, data.bad_lines), BLOCK):
                batch = _encode_block(block, tokenizer, data.max_length, held_out, dropped)
                writer.write_batch(batch)
                kept[-1] += batch.num_rows
    if not sum(kept):
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in dropped.items())
        raise DataError(f"no training pair is left; dropped: {reasons or 'none, the corpora are empty'}")
    summary = {"fingerprint": fingerprint, "kept": kept, "dropped": dict(dropped)}
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")


def _draw_holdout(pairs: Iterable[Pair], count: int, seed: int) -> list[Pair]:
    """`count` pairs, each as likely as any other, in corpus order (Vitter's reservoir, Algorithm R, 1985)."""
    generator = random.Random(seed)
    drawn: list[tuple[int, Pair]] = []
    usable = (pair for pair in pairs if pair.source.strip() and pair.target.strip())
    for position, pair in enumerate(usable):
        if position < count:
            drawn.append((position, pair))
        elif (slot := generator.randrange(position + 1)) < count:
            drawn[slot] = (position, pair)
    return [pair for _, pair in sorted(drawn)]


def _blocks(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    iterator = iter(items)
    while block := list(islice(iterator, size)):
        yield block


def _encode_block(
    block: list[Pair | None], tokenizer: Tokenizer, max_length: int, held_out: set[str], dropped: Counter[str]
) -> pa.RecordBatch:
    pairs = []
    for pair in block:
        if pair is None:
            dropped["bad"] += 1
        elif not pair.source.strip() or not pair.target.strip():
            dropped["empty"] += 1
        elif pair.source in held_out:
            dropped["held out"] += 1  # with its duplicates, or validation would score what training saw
        else:
            pairs.append(pair)
    columns: tuple[list[list[int]], list[list[int]]] = ([], [])
    sources = tokenizer.encode_source([pair.source for pair in pairs])
    targets = tokenizer.encode_target([pair.target for pair in pairs])
    for source, target in zip(sources, targets, strict=True):
        if max(len(source), len(target)) + 1 > max_length:
            dropped["too long"] += 1
        elif not source or not target:
            dropped["empty"] += 1  # of nothing but characters that normalisation removes
        else:
            columns[0].append([*source, tokenizer.special.eos])
            columns[1].append([*target, tokenizer.special.eos])
    lengths = [pa.array([len(ids) for ids in column], pa.int32()) for column in columns]
    return pa.record_batch([pa.array(columns[0], _IDS), pa.array(columns[1], _IDS), *lengths], _SCHEMA)
