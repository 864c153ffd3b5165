"""Prepares the data of a run: encodes the training pairs once, or reuses what earlier runs have encoded."""

import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from mtrain.config.corpora import Holdout
from mtrain.config.data import DataConfig
from mtrain.data import Pair
from mtrain.data.corpus import good_pairs
from mtrain.data.corpus_files import files_of
from mtrain.data.data_folder import (
    open_shards,
    read_validation,
    remove_obsolete,
    write_tokenizer,
    write_validation,
)
from mtrain.data.encoder import Encoder
from mtrain.data.folder_lock import locked_data_folder
from mtrain.data.resegment import Resegmenter
from mtrain.data.same_inputs import has_same_settings, hashes_of_missing, require_same_inputs
from mtrain.data.scan import CorpusScanner
from mtrain.data.shard_writer import ShardWriter
from mtrain.data.shards import BUCKET, LAYOUT, SHARD, Shard, ShardInfo, shard_file
from mtrain.data.sources import read_digests, write_digests
from mtrain.data.summary import (
    Inputs,
    Summary,
    inputs_of,
    is_current,
    read_inputs,
    read_summary,
    remove_summary,
    write_summary,
)
from mtrain.data.windows import ONE_WINDOW, WindowedCorpus, WindowLayout
from mtrain.errors import DataError, ModelError, StorageError, UsageError
from mtrain.processes import count_cores
from mtrain.tokenizer.tokenizer import Tokenizer

log = logging.getLogger(__name__)

# Part of the fingerprint. It never changes, so that the same pairs have the same fingerprint in old runs.
_FINGERPRINT_FORMAT = 2


class PreparedData(NamedTuple):
    """What training reads: encoded training pairs, validation pairs as text, and a hash of their inputs."""

    train: WindowedCorpus
    validation: list[Pair]
    fingerprint: str


def make_scanner(
    data: DataConfig,
    folder: Path,
    run_dir: Path,
    seed: int,
    check: bool = False,
    workers: int | None = None,
    quiet: bool = True,
) -> CorpusScanner:
    """A scanner of the corpora of a run, which does not read what the data folder knows of them. The held-out
    pairs are drawn by `seed` or, if `data.folder` was begun with another seed, by that one. `check` and
    `workers` and `quiet` are as in `CorpusScanner`."""
    recorded = read_inputs(folder) if data.folder is not None else None
    if recorded is not None:
        seed = recorded.seed
    missing, folders = hashes_of_missing(data, folder), (folder, run_dir / "data")
    given: dict[str, Any] = {"data_folders": folders, "missing": missing}
    return CorpusScanner(data, seed, run_dir, check, **given, workers=workers, quiet=quiet)


def prepare_data(
    data: DataConfig,
    tokenizer: Tokenizer,
    folder: Path,
    seed: int,
    expected: str | None = None,
    scanner: CorpusScanner | None = None,
    workers: int | None = None,
    quiet: bool = False,
    run_dir: Path | None = None,
) -> PreparedData:
    """Encode the corpora into `folder`, or reuse its contents if none of their inputs has changed. An
    interrupted encoding is resumed, and only shards that are missing or damaged are encoded again. The result
    does not depend on the number of `workers`, the processes that encode; None is one for each core if the
    corpus is large. `run_dir` is the run folder, by default that of `RUN/data`.

    With `data.folder`, other inputs are an error, because other runs may use the folder; its seed is used.

    `expected` is the fingerprint of the data that a checkpoint was trained on. Raises ModelError if the data
    differs from it; DataError if a corpus is missing, malformed or misaligned, if it changes
    while it is encoded, or if no training pair is left; UsageError if a shared folder was prepared with other
    settings; StorageError if the folder cannot be written.
    """
    run_dir, shared = run_dir or folder.parent, data.folder is not None
    scanner = scanner or make_scanner(data, folder, run_dir, seed)
    found = _read_usable_summary(folder, shared)
    inputs, recorded = _describe_inputs(data, tokenizer, scanner), inputs_of(found)
    if shared and recorded:
        require_same_inputs(folder, recorded, inputs)
        inputs = recorded
    if expected not in (None, inputs.fingerprint):
        raise ModelError(
            f"{folder}: the corpus or the tokenizer changed since the checkpoints of this run were written; "
            "restore it, resume with `mtrain fit --allow-data-change`, or start another run with --run-dir"
        )
    preparation = _Preparation(data, tokenizer, folder, scanner, inputs, workers, quiet)
    summary = found if recorded == inputs else {}
    if not summary.get("complete"):
        summary = preparation.encode(summary, found)
    buckets = _buckets_to_verify(summary, data.window_pairs)
    shards, damaged = open_shards(folder, summary, buckets)
    if damaged:
        summary = preparation.encode_again(damaged, summary)
        shards, damaged = open_shards(folder, summary, buckets)
    if damaged:
        raise StorageError(f"{folder}: shards differ from what was written; check the disk")
    if not shared:  # a shared folder has only been used for the same corpora
        remove_obsolete(folder, len(shards))
    if scanner.digests.items() - read_digests(folder).items():
        write_digests(run_dir / "data", scanner.digests, scanner.started)
    validation = read_validation(folder)
    resegment = None if data.subword_sampling is None else Resegmenter(data, tokenizer, seed, run_dir)
    train = WindowedCorpus(shards, data.train, data.window_pairs, seed, buckets, resegment)
    size = f"{len(train):,} training pairs (dropped: {_format_counts(summary['dropped']) or 'none'})"
    log.info("data: %s, %s validation pairs", size, f"{len(validation):,}")
    return PreparedData(train, validation, inputs.fingerprint)


def open_prepared(data: DataConfig, tokenizer: Tokenizer, folder: Path, seed: int) -> PreparedData | None:
    """The contents of a data folder, if it is complete and was made with these settings. Nothing is written,
    and neither the raw files nor the rows of the shards are read."""
    with suppress(ModelError, OSError):
        summary = read_summary(folder)
        inputs = inputs_of(summary)
        if not summary.get("complete") or inputs is None:
            return None
        if has_same_settings(inputs.settings, _describe_settings(data, tokenizer, seed)):
            shards, damaged = open_shards(folder, summary, ())
            if not damaged:
                train = WindowedCorpus(shards, data.train, data.window_pairs, seed, range(summary["buckets"]))
                return PreparedData(train, read_validation(folder), inputs.fingerprint)
    return None


def _describe_inputs(data: DataConfig, tokenizer: Tokenizer, scanner: CorpusScanner) -> Inputs:
    return Inputs(_describe_settings(data, tokenizer, scanner.seed), scanner.content_hashes)


def _describe_settings(data: DataConfig, tokenizer: Tokenizer, seed: int) -> dict[str, Any]:
    keys = {"train", "validation", "max_length", "bad_lines", "subword_sampling"}
    return {
        "format": _FINGERPRINT_FORMAT,
        "data": data.model_dump(mode="json", include=keys, exclude={"train": {"__all__": {"weight"}}}),
        "seed": seed,
        "tokenizer": tokenizer.fingerprint(),
    }


def _read_usable_summary(folder: Path, shared: bool) -> Summary:
    """The summary of a data folder. Empty if it has none that can be used, which is logged. Raises UsageError
    if another version has written a shared folder."""
    try:
        summary = read_summary(folder)
    except ModelError as error:
        log.warning("%s; encoding the corpus again", error)
        return {}
    if not summary or is_current(summary):
        return summary
    if shared:
        raise UsageError(f"{folder}: was prepared by another version of mtrain; give another data.folder")
    log.info("%s: was written by another version of mtrain; encoding the corpus again", folder)
    return {}


class _Preparation(NamedTuple):
    """Encoding from the given inputs into a data folder, which is locked meanwhile."""

    data: DataConfig
    tokenizer: Tokenizer
    folder: Path
    scanner: CorpusScanner
    inputs: Inputs
    workers: int | None
    quiet: bool

    def encode(self, summary: Summary, found: Summary) -> Summary:
        """Encode, and return the summary of the complete folder. `summary` is that of an encoding from the
        same inputs that is resumed, if any; `found` is that of the folder."""
        message = "resuming the encoding of the corpus into" if summary else "encoding the corpus into"
        log.info("data: %s %s", message, self.folder)
        with locked_data_folder(self.folder, self.data.folder is not None):
            return self._encode_missing(summary or self._start(found))

    def encode_again(self, damaged: Sequence[int], summary: Summary) -> Summary:
        """Encode damaged shards again, and return the summary of the complete folder."""
        for corpus in self.data.train:
            try:
                files_of(corpus)
            except DataError as error:
                raise DataError(f"{error}; it is needed to repair {self.folder}") from None
        with locked_data_folder(self.folder, self.data.folder is not None):
            for index in damaged:
                shard_file(self.folder, index).unlink(missing_ok=True)
            return self._encode_missing(summary)

    def _start(self, found: Summary) -> Summary:
        """Write the tokenizer, the validation pairs, and the summary of an encoding that is not complete,
        which is returned."""
        folder, inputs = self.folder, self.inputs
        reusable = _has_same_pairs(found, inputs)  # for example, with another tokenizer
        pairs = found["pairs"] if reusable else self.scanner.result.pairs
        write_tokenizer(folder, self.tokenizer)
        digest = found["validation_sha256"] if reusable else write_validation(folder, self._validation())
        write_digests(folder, self.scanner.digests, self.scanner.started)
        summary = {"fingerprint": inputs.fingerprint, "layout": LAYOUT, "inputs": inputs._asdict()}
        summary |= {"pairs": pairs, "buckets": max(1, -(-pairs // BUCKET)), "validation_sha256": digest}
        return write_summary(folder, summary)

    def _validation(self) -> list[Pair]:
        data = self.data
        if isinstance(data.validation, Holdout):
            validation = self.scanner.result.held_out
        else:
            validation = list(good_pairs(data.validation, data.bad_lines))
            self.scanner.require_unchanged(data.validation)
        if not validation:
            raise DataError("data.validation has no pairs; give another corpus, or {holdout: N}")
        return validation

    def _encode_missing(self, summary: Summary) -> Summary:
        """Write the shards that are missing, and the summary of the complete folder, which is returned."""
        held_out: frozenset[str] = frozenset()
        if isinstance(self.data.validation, Holdout):
            held_out = frozenset(pair.source for pair in read_validation(self.folder))
        encoder = Encoder(self.data, self.tokenizer, held_out)
        writer = ShardWriter(self.scanner, encoder, self.folder, self.inputs.fingerprint, summary["buckets"])
        pairs = summary["pairs"]
        count = self.workers or (count_cores() if pairs >= SHARD else 1)  # starting a process takes a second
        infos = writer.write(pairs, count, self.quiet)
        summary = {**summary, **_describe_shards(self.folder, len(self.data.train), infos)}
        if not sum(summary["kept"]):
            remove_summary(self.folder)
            reasons = _format_counts(summary["dropped"]) or "none, the corpora are empty"
            raise DataError(f"no training pair is left; dropped: {reasons}")
        return write_summary(self.folder, summary)


def _has_same_pairs(summary: Summary, inputs: Inputs) -> bool:
    """Whether the readable pairs and the validation pairs are the same as those that a summary describes."""
    found = inputs_of(summary)
    if found is None or (found.contents, found.seed) != (inputs.contents, inputs.seed):
        return False
    keys = ("train", "validation", "bad_lines")
    return all(found.settings["data"][key] == inputs.settings["data"][key] for key in keys)


def _describe_shards(folder: Path, corpora: int, infos: Sequence[ShardInfo]) -> Summary:
    """What the summary of a complete data folder says about its shards."""
    kept, dropped = [0] * corpora, Counter[str]()
    for info in infos:
        kept[info.corpus] += info.kept
        dropped.update(info.dropped)
    files = [shard_file(folder, index) for index in range(len(infos))]
    shards = [{"size": file.stat().st_size, "index_sha256": Shard(file).index_sha256} for file in files]
    return {"complete": True, "kept": kept, "dropped": dropped, "shards": shards}


def _buckets_to_verify(summary: Summary, window_pairs: int) -> Sequence[int]:
    """The buckets whose rows are verified at startup: all if they are one window. Otherwise, each is verified
    before it is used first."""
    layout = WindowLayout.of(sum(summary["kept"]), summary["buckets"], window_pairs)
    return range(summary["buckets"] if layout == ONE_WINDOW else 0)


def _format_counts(dropped: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in dropped.items())
