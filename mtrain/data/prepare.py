"""Prepares the data of a run: encodes the training pairs once, or reuses what earlier runs have encoded."""

import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from mtrain.config.data import DataConfig
from mtrain.config.languages import Direction
from mtrain.data import Pair
from mtrain.data.epochs.schedule import ONE_WINDOW, WindowLayout
from mtrain.data.epochs.windows import WindowedCorpus
from mtrain.data.preparing.encode_folder import FolderEncoder, format_counts
from mtrain.data.preparing.inputs import (
    describe_data,
    differ_only_in_paths,
    has_same_settings,
    hashes_of_missing,
    require_same_inputs,
)
from mtrain.data.reading.digests import RawFiles, read_digests
from mtrain.data.rewriting.classifier_pairs import ExampleMaker
from mtrain.data.rewriting.reencode import Reencoder
from mtrain.data.rewriting.rewrite import Rewrite
from mtrain.data.scanning.scanner import CorpusScanner
from mtrain.data.store.damaged import read_suspects, remove_suspects
from mtrain.data.store.folder import Contents, directions_of_validation, open_contents, remove_obsolete
from mtrain.data.store.summary import Inputs, Summary, find_summary, inputs_of, read_summary
from mtrain.errors import ModelError, StorageError
from mtrain.tokenizer.tokenizer import Tokenizer

log = logging.getLogger(__name__)

# Part of the fingerprint. It never changes, so that the same pairs have the same fingerprint in old runs.
_FINGERPRINT_FORMAT = 2


class PreparedData(NamedTuple):
    """What training reads: encoded training pairs, validation pairs as text, and a hash of their inputs."""

    train: WindowedCorpus
    validation: list[Pair]
    directions: list[Direction]  # of the validation pairs
    fingerprint: str


def make_scanner(
    data: DataConfig,
    folder: Path,
    run_dir: Path,
    seed: int,
    check: bool = False,
    workers: int | None = None,
    for_tokenizer: bool = True,
) -> CorpusScanner:
    """A scanner of the corpora of a run, which does not read what the data folder contains already. The
    held-out pairs are drawn by `seed` or, if `data.folder` was begun with another seed, by that seed.
    The other arguments are those of `CorpusScanner`. Raises what `find_summary` raises."""
    summary, _ = find_summary(folder, data.folder is not None)
    if data.folder is not None and (inputs := inputs_of(summary)):
        seed = inputs.seed
    missing, folders = hashes_of_missing(data, summary), (folder, run_dir / "data")
    files = RawFiles(data, folders, missing)
    return CorpusScanner(files, seed, run_dir, check, True, workers, for_tokenizer)


def prepare_data(
    data: DataConfig,
    tokenizer: Tokenizer,
    folder: Path,
    seed: int,
    expected: str | None = None,
    scanner: CorpusScanner | None = None,
    workers: int | None = None,
    run_dir: Path | None = None,
) -> PreparedData:
    """Encode the corpora into `folder`, or reuse its contents if none of their inputs has changed. An
    interrupted encoding is resumed, and only what is missing or damaged is encoded again. The result does
    not depend on the number of `workers`, the processes that encode; None is one for each core if the corpus
    is large. `run_dir` is the run folder; by default, `folder` is `RUN/data`.

    With `data.folder`, other inputs are an error, because other runs may use the folder. The seed with which
    the folder was begun is used.

    `expected` is the fingerprint of the data that a checkpoint was trained on. Raises ModelError if the data
    differs from it, or if the summary of a shared folder is damaged; DataError if a corpus is missing,
    malformed or misaligned, if it changes while it is encoded, or if no training pair is left; UsageError if
    a shared folder was prepared with other settings; StorageError if the folder cannot be written.
    """
    run_dir, shared = run_dir or folder.parent, data.folder is not None
    scanner = scanner or make_scanner(data, folder, run_dir, seed)
    summary, unusable = find_summary(folder, shared)
    if unusable:
        log.warning("%s; encoding the corpus again", unusable)
    inputs, folder_inputs = _describe_inputs(data, tokenizer, scanner), inputs_of(summary)
    if shared and folder_inputs:
        require_same_inputs(folder, folder_inputs, inputs)
        inputs = folder_inputs
    elif folder_inputs and differ_only_in_paths(folder_inputs, inputs):
        inputs = folder_inputs
    if expected not in (None, inputs.fingerprint):
        raise ModelError(
            f"{folder}: the corpus or the tokenizer changed since the checkpoints of this run were written; "
            "restore it, resume with `mtrain fit --allow-data-change`, or start another run with --run-dir"
        )
    encoder = FolderEncoder(data, tokenizer, folder, scanner, inputs, workers)
    if folder_inputs != inputs or not summary.get("complete"):
        summary = encoder.encode(summary)
    buckets, suspects = _buckets_to_verify(summary, data.window_pairs), read_suspects(run_dir)
    contents = open_contents(folder, summary, buckets, suspects)
    if contents.problem:
        contents = encoder.repair(contents.problem, buckets, suspects)
    if suspects:
        remove_suspects(run_dir)
    if not shared:  # a shared folder has only been used for the same corpora
        remove_obsolete(folder, len(contents.shards))
    if scanner.files.digests.items() - read_digests(folder).items():
        scanner.files.record_digests(run_dir / "data")
    train = _make_corpus(contents, buckets, data, tokenizer, seed, run_dir)
    size = f"{len(train):,} training pairs (dropped: {format_counts(summary['dropped']) or 'none'})"
    log.info("data: %s, %s validation pairs", size, f"{len(contents.validation):,}")
    directions = directions_of_validation(data, summary, contents.validation)
    return PreparedData(train, contents.validation, directions, inputs.fingerprint)


def open_prepared(data: DataConfig, tokenizer: Tokenizer, folder: Path, seed: int) -> PreparedData | None:
    """The contents of a data folder, if it is complete and was made with these settings. Nothing is written,
    and neither the raw files nor the rows of the shards are read. Raises what `WindowedCorpus` raises."""
    with suppress(ModelError, StorageError):
        summary = read_summary(folder)
        inputs = inputs_of(summary)
        if not summary.get("complete") or inputs is None:
            return None
        if has_same_settings(inputs, _describe_settings(data, tokenizer, seed)):
            contents = open_contents(folder, summary, ())
            if not contents.problem:
                verified = range(summary["buckets"])
                train = WindowedCorpus(contents.shards, data, seed, folder.parent, verified)
                directions = directions_of_validation(data, summary, contents.validation)
                return PreparedData(train, contents.validation, directions, inputs.fingerprint)
    return None


def open_complete_data(
    data: DataConfig, tokenizer: Tokenizer, folder: Path, seed: int, run_dir: Path
) -> PreparedData:
    """The contents of a data folder that another process has just prepared with these settings. Nothing is
    written, and the raw files are not read.

    Raises ModelError or StorageError if this process does not find the same contents.
    """
    summary = read_summary(folder)
    inputs = inputs_of(summary)
    if inputs is None or not summary.get("complete"):
        raise StorageError(f"{folder}: is incomplete; all processes must use the same file system for it")
    buckets = _buckets_to_verify(summary, data.window_pairs)
    contents = open_contents(folder, summary, buckets)
    if contents.problem:
        raise ModelError(f"{contents.problem}; all processes must use the same file system for it")
    train = _make_corpus(contents, buckets, data, tokenizer, seed, run_dir)
    directions = directions_of_validation(data, summary, contents.validation)
    return PreparedData(train, contents.validation, directions, inputs.fingerprint)


def _make_corpus(
    contents: Contents,
    verified: Sequence[int],
    data: DataConfig,
    tokenizer: Tokenizer,
    seed: int,
    run_dir: Path,
) -> WindowedCorpus:
    rewrites: list[Rewrite] = []
    if data.changes_pairs:
        rewrites.append(Reencoder(data, tokenizer, seed))
    if data.corruptions is not None:
        rewrites.append(ExampleMaker(data, tokenizer, seed))
    return WindowedCorpus(contents.shards, data, seed, run_dir, verified, rewrites)


def _describe_inputs(data: DataConfig, tokenizer: Tokenizer, scanner: CorpusScanner) -> Inputs:
    return Inputs(_describe_settings(data, tokenizer, scanner.seed), scanner.files.content_hashes)


def _describe_settings(data: DataConfig, tokenizer: Tokenizer, seed: int) -> dict[str, Any]:
    keys = {"train", "validation", "max_length", "bad_lines", "subword_sampling", "filters"}
    return {
        "format": _FINGERPRINT_FORMAT,
        "data": describe_data(data, keys),
        "seed": seed,
        "tokenizer": tokenizer.fingerprint(),
    }


def _buckets_to_verify(summary: Summary, window_pairs: int) -> Sequence[int]:
    """The buckets whose rows are verified at startup: all if they are one window. Otherwise, each is verified
    before its use."""
    layout = WindowLayout.of(sum(summary["kept"]), summary["buckets"], window_pairs)
    return range(summary["buckets"] if layout == ONE_WINDOW else 0)
