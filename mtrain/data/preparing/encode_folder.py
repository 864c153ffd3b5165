"""Encodes the corpora of a run into a data folder, and repairs what is missing or damaged there.

The folder is locked while it is written. A complete data folder is only read, and needs no lock.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from mtrain.config.sections.corpora import Holdout, name_of
from mtrain.config.sections.data import DataConfig
from mtrain.data import Pair
from mtrain.data.pairs.rejections import REJECTIONS, Rejections, no_pair_left, read_rejections
from mtrain.data.preparing.check_report import record_findings
from mtrain.data.preparing.encode_shards import Encoder, ShardWriter
from mtrain.data.preparing.inputs import has_same_pairs
from mtrain.data.reading.blocks import read_pairs
from mtrain.data.reading.digests import SOURCES, content_hash, train_and_validation
from mtrain.data.reading.files import files_of
from mtrain.data.scanning.scanner import CorpusScanner
from mtrain.data.store.folder import (
    CHECK,
    SHARD_NAME,
    SUMMARY,
    TOKENIZER,
    VALIDATION,
    Contents,
    DataFolder,
    Inputs,
    Summary,
    read_validation,
    write_tokenizer,
    write_validation,
)
from mtrain.data.store.shards import BUCKET, LAYOUT, MAX_BUCKETS, SHARD, Shard, ShardInfo, shard_file
from mtrain.errors import DataError, ModelError, StorageError, UsageError
from mtrain.processes.cores import count_cores
from mtrain.storage.atomic import recover
from mtrain.storage.locks import owner_file, wait_for_lock
from mtrain.tokenizer.tokenizer import Tokenizer

log = logging.getLogger(__name__)

LOCK = ".lock"  # the file that is locked while the folder is written
_FILES = (SUMMARY, VALIDATION, SOURCES, CHECK, REJECTIONS)  # and shards, and the folder of the tokenizer
_LEFTOVERS = [f".{name}.*tmp" for name in (*_FILES, "shard-*.safetensors")]


class FolderEncoder(NamedTuple):
    """Encodes from the given inputs into a data folder, which is locked meanwhile."""

    data: DataConfig
    tokenizer: Tokenizer
    folder: DataFolder
    scanner: CorpusScanner
    inputs: Inputs

    def encode(self) -> None:
        """Encode everything, and complete the summary of the folder. An encoding from the same inputs is
        resumed."""
        folder = self.folder
        resumes = folder.inputs == self.inputs
        message = "resuming the encoding of the corpus into" if resumes else "encoding the corpus into"
        log.info("data: %s %s", message, folder.path)
        with locked_data_folder(folder):
            if not resumes:
                for corpus in self.data.train:
                    files_of(corpus)  # if one is missing, the folder must stay usable
                self._start()
            self._restore_validation()
            infos = self._write_shards({})
            described = _describe_shards(folder.path, len(self.data.train), infos)
            if not sum(described["kept"]):
                (folder.path / SUMMARY).unlink()  # so that the folder counts as empty
                raise no_pair_left(described["dropped"])
            folder.write_summary({**folder.summary, **described})

    def repair(self, problem: str, buckets: Sequence[int]) -> Contents:
        """Encode the missing and damaged shards of a complete folder again, and restore the validation pairs,
        unless another process has done so meanwhile. Returns the contents of the folder. `problem` is the
        first thing that was missing or damaged; `buckets` is as in `open_contents`.

        Raises DataError if the text that was encoded is not there, or if what is encoded from it differs
        from what was there before. A damaged file is replaced when the new one is complete.
        """
        folder = self.folder
        with locked_data_folder(folder, problem):
            folder.reload()  # another process may have repaired it, while this one waited for the lock
            if folder.damaged:
                raise ModelError(folder.damaged)
            if folder.inputs != self.inputs or not folder.is_complete:
                raise DataError(f"{folder.path}: has been prepared again from other inputs; run again")
            self._restore_validation()
            contents = folder.open_contents(buckets)
            if not contents.damaged_shards:
                return contents
            self._require_same_text(next(iter(contents.damaged_shards.values())))
            for reason in contents.damaged_shards.values():
                log.warning("%s; encoding this shard again", reason)
            entries = folder.summary["shards"]
            self._write_shards({index: entries[index]["index_sha256"] for index in contents.damaged_shards})
            contents = folder.open_contents(buckets)
        if contents.problem:
            raise StorageError(f"{contents.problem}, although it has just been written; check the disk")
        return contents

    def _start(self) -> None:
        """Write the tokenizer, the validation pairs, and the summary of an encoding that is not complete."""
        folder, previous = self.folder, self.folder.summary
        # For example, with another tokenizer. A folder of an earlier version lacks the sizes.
        if has_same_pairs(folder.inputs, self.inputs) and "validation_sizes" in previous:
            keys = ("pairs", "validation_sha256", "validation_sizes", "rejections")
            kept = {key: previous[key] for key in keys if key in previous}
        else:
            kept = self._write_pairs()
        write_tokenizer(folder.path, self.tokenizer)
        self.scanner.files.record_digests(folder.path)
        summary = {"fingerprint": self.inputs.fingerprint, "layout": LAYOUT, "inputs": self.inputs._asdict()}
        summary |= {"pairs": kept["pairs"], "buckets": min(max(1, -(-kept["pairs"] // BUCKET)), MAX_BUCKETS)}
        folder.write_summary({**summary, **kept})
        # Recorded now, because a resumed encoding does not check the text again.
        if self.scanner.check and (findings := self.scanner.result.findings):
            record_findings(folder, findings, self.data.bad_lines)

    def _write_pairs(self) -> dict[str, Any]:
        """Write the validation pairs, and which pairs the filters leave out. Returns what the summary says
        about them."""
        scan = self.scanner.result
        validation = self._draw_validation()
        described: dict[str, Any] = {
            "pairs": scan.pairs,
            "validation_sha256": write_validation(self.folder.path, [*chain.from_iterable(validation)]),
            "validation_sizes": [len(pairs) for pairs in validation],
        }
        if scan.rejections is not None:
            scan.rejections.write(self.folder.path)
            described["rejections"] = scan.rejections.describe()
        return described

    def _draw_validation(self) -> list[list[Pair]]:
        """The validation pairs of each validation corpus or, for a holdout, of each training corpus."""
        data = self.data
        if isinstance(data.validation, Holdout):
            validation = self.scanner.result.held_out
        else:
            read = [list(read_pairs(corpus, data.bad_lines)) for corpus in data.validation]
            if skipped := sum(pairs.count(None) for pairs in read):
                log.warning("data.validation: %d unreadable pair(s) were skipped", skipped)
            validation = [[pair for pair in pairs if pair is not None] for pairs in read]
            self.scanner.files.require_unchanged(data.validation)
        if not any(validation):
            raise DataError("data.validation has no pairs; give another corpus, or {holdout: N}")
        return validation

    def _restore_validation(self) -> None:
        """Draw the validation pairs again if their file is missing or damaged. Raises DataError if they
        differ from the pairs that were drawn before."""
        folder = self.folder
        try:
            read_validation(folder.path, folder.summary)
            return
        except ModelError as error:
            problem = str(error)
        self._require_same_text(problem, for_training=isinstance(self.data.validation, Holdout))
        log.warning("%s; drawing the validation pairs again", problem)
        digest = folder.summary["validation_sha256"]
        drawn = [*chain.from_iterable(self._draw_validation())]
        if write_validation(folder.path, drawn, digest) != digest:
            raise DataError(f"{problem}; drawing the validation pairs again gives others; restore the file")

    def _require_same_text(self, problem: str, for_training: bool = True) -> None:
        """Raise DataError unless the text from which the training or validation pairs were encoded is there,
        to solve a problem of the data folder."""
        corpora, contents = train_and_validation(self.data), self.inputs.contents
        part = slice(len(self.data.train)) if for_training else slice(len(self.data.train), None)
        for corpus, content in zip(corpora[part], contents[part], strict=True):
            try:
                same = content_hash(corpus, self.scanner.files.digests) == content
            except DataError as error:
                raise DataError(f"{problem}; to repair it, restore the corpus ({error})") from None
            if not same:
                reason = f"{name_of(corpus)} has other contents than were encoded"
                raise DataError(f"{problem}; to repair it, restore the corpus ({reason})")

    def _open_rejections(self) -> Rejections | None:
        """The pairs that the filters leave out; None without filters. The corpora are filtered again if their
        file is missing or damaged. Raises DataError if the filters reject other pairs than before."""
        if (expected := self.folder.summary.get("rejections")) is None:
            return None
        try:
            return read_rejections(self.folder.path, **expected)
        except ModelError as error:
            problem = str(error)
        log.warning("%s; filtering the corpora again", problem)
        self._require_same_text(problem)
        rejections = self.scanner.result.rejections
        if rejections is None or rejections.describe() != expected:
            raise DataError(f"{problem}; filtering again rejects other pairs; restore the file")
        rejections.write(self.folder.path)
        return rejections

    def _write_shards(self, replaced: dict[int, str]) -> list[ShardInfo]:
        """Write the shards that are missing or `replaced`; see `ShardWriter`."""
        held_out: frozenset[str] = frozenset()
        if isinstance(self.data.validation, Holdout):
            validation = read_validation(self.folder.path, self.folder.summary)
            held_out = frozenset(pair.source for pair in validation)
            if self.data.has_several_directions:
                held_out |= {pair.target for pair in validation}
        make_encoder = partial(Encoder, self.data, self.tokenizer, held_out)
        rejections, scanner = self._open_rejections(), self.scanner
        writer = ShardWriter(scanner.files, scanner.seed, make_encoder, self.folder, replaced, rejections)
        is_large = self.folder.summary["pairs"] >= SHARD  # starting a process takes a second
        return writer.write(scanner.workers or (count_cores() if is_large else 1))


def _describe_shards(folder: Path, corpora: int, infos: Sequence[ShardInfo]) -> Summary:
    """What the summary of a complete data folder says about its shards."""
    kept, dropped = [0] * corpora, Counter[str]()
    for info in infos:
        kept[info.corpus] += info.kept
        dropped.update(info.dropped)
    files = [shard_file(folder, index) for index in range(len(infos))]
    shards = [{"size": file.stat().st_size, "index_sha256": Shard(file).index_sha256} for file in files]
    return {"complete": True, "kept": kept, "dropped": dropped, "shards": shards}


@contextmanager
def locked_unless_complete(folder: DataFolder) -> Iterator[None]:
    """Lock a data folder as `locked_data_folder` does, unless it is complete already, or once another
    process has completed it: then it need not be writable."""
    with ExitStack() as stack:
        if reason := folder.why_incomplete():
            if (folder.path / SUMMARY).exists():  # otherwise it is a new folder
                log.info("data: %s", reason)
            stack.enter_context(locked_data_folder(folder, reason))
            folder.reload()  # another process may have completed it, while this one waited for the lock
            if folder.why_incomplete() is None:
                stack.close()
        yield


@contextmanager
def locked_data_folder(folder: DataFolder, reason: str | None = None) -> Iterator[None]:
    """Create a data folder, lock it against other processes, and clean up after a crash. While another
    process holds the lock, wait. A thread may lock a folder again.

    Raises UsageError if a shared folder contains files that mtrain did not write and would overwrite;
    StorageError, which gives the `reason` for writing, if the folder cannot be written.
    """
    path = folder.path
    with ExitStack() as stack:
        try:
            _require_no_foreign_files(folder)
            path.mkdir(parents=True, exist_ok=True)
            stack.enter_context(wait_for_lock(path / LOCK))
            leftovers = [file for pattern in _LEFTOVERS for file in path.glob(pattern)]
            for file in leftovers:
                file.unlink(missing_ok=True)
            recover(path / TOKENIZER)
        except OSError as error:
            cannot = f"{path}: cannot write: {error.strerror}"
            raise StorageError(f"{cannot} ({reason})" if reason else cannot) from error
        yield


def _require_no_foreign_files(folder: DataFolder) -> None:
    """Raise UsageError if a shared folder contains files that mtrain did not write and would overwrite."""
    path = folder.path
    if not folder.shared or not path.exists() or owner_file(path / LOCK).exists():
        return
    folder.reload()  # the files may have been copied there since the folder was opened
    if folder.summary:
        return
    names = sorted(file.name for file in path.iterdir())
    if foreign := [name for name in names if name in (*_FILES, TOKENIZER) or SHARD_NAME.fullmatch(name)]:
        problem = f"is not a data folder, and would be overwritten ({foreign[0]})"
        raise UsageError(f"{path}: {problem}; give another data.folder")
