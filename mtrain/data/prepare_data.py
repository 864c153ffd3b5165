"""Prepares the data of a run: encodes the training pairs once, or reuses what earlier runs have encoded.

The data folder contains shards of encoded pairs, the validation pairs, and a summary, which is written last
and records the inputs that all of it was made from, and the size and a hash of each shard.
"""

import json
import logging
import os
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError

from mtrain.config.corpora import Holdout
from mtrain.config.data import DataConfig
from mtrain.data import Pair
from mtrain.data.corpus import good_pairs
from mtrain.data.corpus_files import files_of
from mtrain.data.encoded import EncodedCorpus, make_block_resegmenter
from mtrain.data.encoder import Encoder
from mtrain.data.scan import CorpusScanner, train_and_validation
from mtrain.data.shard_writer import ShardWriter
from mtrain.data.shards import BUCKET, LAYOUT, SHARD, Shard, ShardInfo, shard_file
from mtrain.data.sources import write_digests
from mtrain.errors import DataError, ModelError, StorageError
from mtrain.storage.atomic import write_atomically
from mtrain.storage.manifest import sha256, sha256_of_json
from mtrain.tokenizer.tokenizer import Tokenizer

log = logging.getLogger(__name__)

# Part of the fingerprint. It never changes, so that the same pairs have the same fingerprint in old runs.
_FINGERPRINT_FORMAT = 2
_SUMMARY, _VALIDATION = "summary.json", "validation.jsonl"
_SHARD_NAME = re.compile(r"shard-([0-9]{5,9})\.safetensors")
_OBSOLETE = ("train.arrow", "manifest.json")  # of layout 2


class PreparedData(NamedTuple):
    """What training reads: encoded training pairs, validation pairs as text, and a hash of their inputs."""

    train: EncodedCorpus
    validation: list[Pair]
    fingerprint: str


def check_corpora(data: DataConfig) -> None:
    """Raise DataError if a file that the config names does not exist."""
    for corpus in chain(train_and_validation(data), data.test.values()):
        files_of(corpus)


def is_begun(folder: Path) -> bool:
    """Whether encoding into a data folder was begun, so that the data has been checked."""
    return (folder / _SUMMARY).exists()


def prepare_data(
    data: DataConfig,
    tokenizer: Tokenizer,
    folder: Path,
    seed: int,
    expected: str | None = None,
    scanner: CorpusScanner | None = None,
    workers: int | None = None,
    quiet: bool = False,
) -> PreparedData:
    """Encode the corpora into `folder`, or reuse its contents if none of their inputs has changed. An
    interrupted encoding is resumed, and only shards that are missing or damaged are encoded again. The result
    does not depend on the number of `workers`, the processes that encode; None is one for each core if the
    corpus is large.

    `expected` is the fingerprint of the data that a checkpoint was trained on. Raises ModelError if the data
    differs from it; DataError if a corpus is missing, malformed or misaligned, if it changes
    while it is encoded, or if no training pair is left; StorageError if the folder cannot be written.
    """
    scanner = scanner or CorpusScanner(data, seed, folder.parent, data_folder=folder)
    fingerprint = _fingerprint(data, tokenizer, scanner)
    if expected not in (None, fingerprint):
        raise ModelError(
            f"{folder}: the corpus or the tokenizer changed since the checkpoints of this run were written; "
            "restore it, resume with --allow-data-change, or start another run with --run-dir"
        )
    summary = _read_summary(folder, fingerprint)

    def encode(summary: dict[str, Any]) -> dict[str, Any]:
        if not summary:
            summary = _start_encoding(data, folder, scanner, fingerprint)
        encoder = _make_encoder(data, tokenizer, folder)
        writer = ShardWriter(scanner, encoder, folder, fingerprint, summary["buckets"])
        pairs = summary["pairs"]
        count = workers or (_cores() if pairs >= SHARD else 1)  # starting a process takes a second
        return _finish_encoding(data, folder, summary, writer.write(pairs, count, quiet))

    try:
        if not summary.get("complete"):
            log.info("data: encoding the corpus into %s", folder)
            summary = encode(summary)
        shards, damaged = _open_shards(folder, summary)
        if damaged:
            for index in damaged:
                shard_file(folder, index).unlink(missing_ok=True)
            summary = encode(summary)
            shards, damaged = _open_shards(folder, summary)
        if damaged:
            raise StorageError(f"{folder}: shards differ from what was written; check the disk")
        _remove_obsolete(folder, len(shards))
        write_digests(folder, scanner.digests, scanner.started)
    except (OSError, SafetensorError) as error:
        raise StorageError(f"{folder}: cannot write: {getattr(error, 'strerror', None) or error}") from error
    validation = _read_validation(folder)
    resegment = make_block_resegmenter(data, tokenizer, seed)
    train = EncodedCorpus.open(shards, data.train, range(summary["buckets"]), folder.parent, resegment)
    size = f"{len(train):,} training pairs (dropped: {_format_counts(summary['dropped']) or 'none'})"
    log.info("data: %s, %s validation pairs", size, f"{len(validation):,}")
    return PreparedData(train, validation, fingerprint)


def _fingerprint(data: DataConfig, tokenizer: Tokenizer, scanner: CorpusScanner) -> str:
    """SHA-256 of settings and contents. Modification times and corpus weights do not change it."""
    keys = {"train", "validation", "max_length", "bad_lines", "subword_sampling"}
    settings = {
        "format": _FINGERPRINT_FORMAT,
        "data": data.model_dump(mode="json", include=keys, exclude={"train": {"__all__": {"weight"}}}),
        "seed": scanner.seed,
        "tokenizer": tokenizer.fingerprint(),
    }
    return sha256_of_json([settings, scanner.content_hashes])


def _read_summary(folder: Path, fingerprint: str) -> dict[str, Any]:
    """The summary of a data folder. Empty if the folder has none, if its summary or its validation pairs are
    damaged, or if it was made from other inputs or by a version with another layout."""
    if not (folder / _SUMMARY).exists():  # it is removed if no pair is left
        return {}
    try:
        summary: dict[str, Any] = json.loads((folder / _SUMMARY).read_bytes())
        if summary["fingerprint"] != fingerprint:
            return {}
        if summary.get("layout") != LAYOUT:
            message = "%s: was written by another version of mtrain; encoding the corpus again"
            log.info(message, folder)
            return {}
        if sha256(folder / _VALIDATION) != summary["validation_sha256"]:
            raise ValueError(f"{_VALIDATION} does not match its SHA-256")
        content = {key: value for key, value in summary.items() if key != "sha256"}
        if summary["sha256"] != sha256_of_json(content):
            raise ValueError(f"{_SUMMARY} does not match its SHA-256")
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        log.warning("%s: damaged; encoding the corpus again (%s)", folder, error)
        return {}
    return summary


def _write_summary(folder: Path, summary: dict[str, Any]) -> dict[str, Any]:
    summary = {**summary, "sha256": sha256_of_json(summary)}
    write_atomically(folder / _SUMMARY, json.dumps(summary, indent=1) + "\n")
    return summary


def _read_validation(folder: Path) -> list[Pair]:
    with (folder / _VALIDATION).open(encoding="utf-8", newline="\n") as lines:
        return [Pair(*json.loads(line)) for line in lines]


def _cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _start_encoding(
    data: DataConfig, folder: Path, scanner: CorpusScanner, fingerprint: str
) -> dict[str, Any]:
    """Write the validation pairs, and the summary of an encoding that is not complete, which is returned."""
    folder.mkdir(parents=True, exist_ok=True)
    pairs = scanner.result.pairs
    _write_validation(data, folder, scanner)
    summary = {"fingerprint": fingerprint, "layout": LAYOUT, "pairs": pairs}
    summary |= {"buckets": max(1, -(-pairs // BUCKET)), "validation_sha256": sha256(folder / _VALIDATION)}
    write_digests(folder, scanner.digests, scanner.started)
    return _write_summary(folder, summary)


def _make_encoder(data: DataConfig, tokenizer: Tokenizer, folder: Path) -> Encoder:
    if not isinstance(data.validation, Holdout):
        return Encoder(data, tokenizer, frozenset())
    return Encoder(data, tokenizer, frozenset(pair.source for pair in _read_validation(folder)))


def _finish_encoding(
    data: DataConfig, folder: Path, summary: dict[str, Any], infos: Sequence[ShardInfo]
) -> dict[str, Any]:
    """Write the summary of a complete data folder, which is returned."""
    summary = _summarize(data, folder, summary, infos)
    if not sum(summary["kept"]):
        (folder / _SUMMARY).unlink()
        reasons = _format_counts(summary["dropped"]) or "none, the corpora are empty"
        raise DataError(f"no training pair is left; dropped: {reasons}")
    return _write_summary(folder, summary)


def _summarize(
    data: DataConfig, folder: Path, summary: dict[str, Any], infos: Sequence[ShardInfo]
) -> dict[str, Any]:
    """The summary of a complete data folder."""
    kept, dropped = [0] * len(data.train), Counter[str]()
    for info in infos:
        kept[info.corpus] += info.kept
        dropped.update(info.dropped)
    files = [shard_file(folder, index) for index in range(len(infos))]
    shards = [{"size": file.stat().st_size, "index_sha256": Shard(file).index_sha256} for file in files]
    started = {key: value for key, value in summary.items() if key != "sha256"}
    return {**started, "complete": True, "kept": kept, "dropped": dropped, "shards": shards}


def _write_validation(data: DataConfig, folder: Path, scanner: CorpusScanner) -> None:
    if isinstance(data.validation, Holdout):
        validation = scanner.result.held_out
    else:
        validation = list(good_pairs(data.validation, data.bad_lines))
        scanner.require_unchanged(data.validation)
    if not validation:
        raise DataError("data.validation has no pairs; give another corpus, or {holdout: N}")
    lines = (json.dumps(pair, ensure_ascii=False) + "\n" for pair in validation)
    write_atomically(folder / _VALIDATION, "".join(lines))


def _open_shards(folder: Path, summary: dict[str, Any]) -> tuple[list[Shard], list[int]]:
    """The shards of a data folder, and the indices of those that are missing or damaged."""
    shards, damaged = [], []
    for index, entry in enumerate(summary["shards"]):
        file = shard_file(folder, index)
        try:
            if file.exists() and file.stat().st_size != entry["size"]:
                raise ModelError(f"{file}: damaged (its size is {file.stat().st_size}, not {entry['size']})")
            shards.append(Shard(file).verify(entry["index_sha256"], range(summary["buckets"])))
        except ModelError as error:
            log.warning("%s; encoding this shard again", error)
            damaged.append(index)
    return shards, damaged


def _remove_obsolete(folder: Path, shards: int) -> None:
    """Remove what earlier data left in the folder: shards after the last one, and files of layout 2."""
    indices = (int(found[1]) for file in folder.iterdir() if (found := _SHARD_NAME.fullmatch(file.name)))
    after_last = (shard_file(folder, index) for index in indices if index >= shards)
    for file in (*after_last, *(folder / name for name in _OBSOLETE)):
        with suppress(OSError):  # does no harm, for example in a read-only folder
            file.unlink(missing_ok=True)


def _format_counts(dropped: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in dropped.items())
