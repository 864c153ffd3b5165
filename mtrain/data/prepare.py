"""Prepares the data of a run: encodes the training pairs once, or reuses what earlier runs have encoded."""

import logging
import random
from typing import NamedTuple

from mtrain.config.languages import Direction
from mtrain.config.sections.data import DataConfig
from mtrain.data import Pair
from mtrain.data.epochs.schedule import ONE_WINDOW, WindowLayout
from mtrain.data.epochs.windows import WindowedCorpus
from mtrain.data.pairs.rejections import format_counts
from mtrain.data.preparing.encode_folder import FolderEncoder
from mtrain.data.preparing.inputs import (
    describe_settings,
    differ_only_in_paths,
    find_difference,
    hashes_of_missing,
    require_same_inputs,
)
from mtrain.data.reading.digests import RawFiles, read_digests
from mtrain.data.rewriting.classifier_pairs import ExampleMaker
from mtrain.data.rewriting.reencode import Reencoder
from mtrain.data.rewriting.rewrite import Rewrite
from mtrain.data.scanning.scanner import CorpusScanner
from mtrain.data.store.damaged import forget_damage, is_damage_reported
from mtrain.data.store.folder import Contents, DataFolder, Inputs, directions_of_validation, remove_obsolete
from mtrain.errors import ModelError, StorageError
from mtrain.tokenizer.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_SAME_FILES = "all processes must use the same file system for it"


class PreparedData(NamedTuple):
    """What training reads: encoded training pairs, validation pairs as text, and a hash of their inputs."""

    train: WindowedCorpus
    validation: list[Pair]
    directions: list[Direction]  # of the validation pairs
    fingerprint: str

    def with_sampled_validation(self, pairs: int | None, seed: int) -> "PreparedData":
        """The data with at most so many validation pairs, drawn by a seed."""
        if pairs is None or pairs >= len(self.validation):
            return self
        rows = sorted(random.Random(seed).sample(range(len(self.validation)), pairs))
        log.info("validation: %d of %d pairs, drawn by the seed", pairs, len(self.validation))
        chosen = [self.validation[row] for row in rows]
        return self._replace(validation=chosen, directions=[self.directions[row] for row in rows])


def make_scanner(data: DataConfig, folder: DataFolder, seed: int) -> CorpusScanner:
    """A scanner of the corpora of a run, which does not read what the data folder contains already. The
    held-out pairs are drawn by `seed` or, if a shared folder was begun with another seed, by that seed."""
    if folder.shared and folder.inputs:
        seed = folder.inputs.seed
    files = RawFiles(data, (folder.path, folder.run_dir / "data"), hashes_of_missing(data, folder))
    return CorpusScanner(files, seed, folder.run_dir)


def prepare_data(
    data: DataConfig,
    tokenizer: Tokenizer,
    folder: DataFolder,
    scanner: CorpusScanner,
    seed: int,
    trained_on: str | None = None,
) -> PreparedData:
    """Encode the corpora into `folder`, or reuse its contents if none of their inputs has changed. An
    interrupted encoding is resumed, and only what is missing or damaged is encoded again. The result does
    not depend on the number of processes that encode: the `workers` of the scanner or, if they are None and
    the corpus is large, one for each core.

    In a shared folder, other inputs are an error, because other runs may use the folder. The seed with which
    the folder was begun is used.

    `trained_on` is the fingerprint of the data that a checkpoint was trained on. Raises ModelError if the
    data differs from it; DataError if a corpus is missing, malformed or misaligned, if it changes while it is
    encoded, or if no training pair is left; UsageError if a shared folder was prepared with other settings;
    StorageError if the folder cannot be written.
    """
    if folder.unusable:
        log.warning("%s; encoding the corpus again", folder.unusable)
    inputs = Inputs(describe_settings(data, tokenizer, scanner.seed), scanner.files.content_hashes)
    if folder.inputs is not None:
        if folder.shared:
            require_same_inputs(folder.path, folder.inputs, inputs)
        if folder.shared or differ_only_in_paths(folder.inputs, inputs):
            inputs = folder.inputs
    if trained_on not in (None, inputs.fingerprint):
        problem = "the corpus or the tokenizer changed since the checkpoints of this run were written"
        cure = "restore it, resume with `mtrain fit --allow-data-change`, or start another run with --run-dir"
        raise ModelError(f"{folder.path}: {problem}; {cure}")
    encoder = FolderEncoder(data, tokenizer, folder, scanner, inputs)
    if folder.inputs != inputs or not folder.is_complete:
        encoder.encode()
    buckets = _buckets_to_verify(folder, data.window_pairs)
    contents = folder.open_contents(buckets)
    if contents.problem:
        contents = encoder.repair(contents.problem, buckets)
    forget_damage(folder.run_dir)
    if not folder.shared:  # a shared folder has only been used for the same corpora
        remove_obsolete(folder.path, len(contents.shards))
    if scanner.files.digests.items() - read_digests(folder.path).items():
        scanner.files.record_digests(folder.run_dir / "data")
    prepared = _as_prepared_data(contents, buckets, data, tokenizer, folder, seed)
    dropped = format_counts(folder.summary["dropped"]) or "none"
    counts = f"{len(prepared.train):,} training pairs (dropped: {dropped})"
    log.info("data: %s, %s validation pairs", counts, f"{len(prepared.validation):,}")
    return prepared


def open_data(
    data: DataConfig, tokenizer: Tokenizer, folder: DataFolder, seed: int, verify: bool = True
) -> PreparedData:
    """The contents of a complete data folder that was prepared with these settings. Nothing is written, and
    the raw files are not read. Without `verify`, the rows of the shards are not compared with their hashes.

    Raises StorageError if the folder is incomplete or cannot be read; ModelError if it is damaged, or was
    prepared with other settings.
    """
    if folder.damaged:
        raise ModelError(folder.damaged)
    if folder.inputs is None or not folder.is_complete:
        raise StorageError(f"{folder.path}: is incomplete; {_SAME_FILES}")
    settings = describe_settings(data, tokenizer, seed)
    if difference := find_difference(folder.inputs.settings, settings):
        raise ModelError(f"{folder.path}: was prepared with {difference}; {_SAME_FILES}")
    buckets = _buckets_to_verify(folder, data.window_pairs) if verify else range(0)
    contents = folder.open_contents(buckets)
    if contents.problem:
        raise ModelError(f"{contents.problem}; {_SAME_FILES}")
    verified = buckets if verify else range(folder.summary["buckets"])
    return _as_prepared_data(contents, verified, data, tokenizer, folder, seed)


def _as_prepared_data(
    contents: Contents, verified: range, data: DataConfig, tokenizer: Tokenizer, folder: DataFolder, seed: int
) -> PreparedData:
    """The contents of a complete folder, of which the rows of some buckets have been `verified`."""
    rewrites: list[Rewrite] = []
    if data.changes_pairs:
        rewrites.append(Reencoder(data, tokenizer, seed))
    if data.corruptions is not None:
        rewrites.append(ExampleMaker(data, tokenizer, seed))
    train = WindowedCorpus(contents.shards, data, seed, folder.run_dir, verified, rewrites)
    directions = directions_of_validation(data, folder.summary, contents.validation)
    return PreparedData(train, contents.validation, directions, folder.summary["fingerprint"])


def _buckets_to_verify(folder: DataFolder, window_pairs: int) -> range:
    """The buckets whose rows are verified at startup: all if they are one window, or if training has found
    damage. Otherwise, each is verified before its use."""
    summary = folder.summary
    layout = WindowLayout.of(sum(summary["kept"]), summary["buckets"], window_pairs)
    needs_all = layout == ONE_WINDOW or is_damage_reported(folder.run_dir)
    return range(summary["buckets"] if needs_all else 0)
