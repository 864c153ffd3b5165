"""Encodes the corpora of a run into a data folder, and repairs what is missing or damaged there."""

import logging
from collections import Counter
from collections.abc import Container, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from mtrain.config.corpora import Holdout
from mtrain.config.data import DataConfig
from mtrain.data import Pair
from mtrain.data.pairs.rejections import Rejections, read_rejections
from mtrain.data.preparing.encoder import Encoder
from mtrain.data.preparing.folder_lock import locked_data_folder
from mtrain.data.preparing.inputs import has_same_pairs, require_same_text
from mtrain.data.preparing.report import record_findings
from mtrain.data.preparing.writer import ShardWriter
from mtrain.data.reading.parse import read_pairs
from mtrain.data.scanning.scanner import CorpusScanner
from mtrain.data.store.folder import (
    Contents,
    open_contents,
    read_validation,
    write_tokenizer,
    write_validation,
)
from mtrain.data.store.shards import BUCKET, LAYOUT, MAX_BUCKETS, SHARD, Shard, ShardInfo, shard_file
from mtrain.data.store.summary import Inputs, Summary, inputs_of, read_summary, remove_summary, write_summary
from mtrain.errors import DataError, ModelError, StorageError
from mtrain.processes import count_cores
from mtrain.tokenizer.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class FolderEncoder(NamedTuple):
    """Encodes from the given inputs into a data folder, which is locked meanwhile."""

    data: DataConfig
    tokenizer: Tokenizer
    folder: Path
    scanner: CorpusScanner
    inputs: Inputs
    workers: int | None

    def encode(self, previous: Summary) -> Summary:
        """Encode, and return the summary of the complete folder. `previous` is the summary of the folder so
        far; an encoding from the same inputs is resumed."""
        resumes = inputs_of(previous) == self.inputs
        message = "resuming the encoding of the corpus into" if resumes else "encoding the corpus into"
        log.info("data: %s %s", message, self.folder)
        with locked_data_folder(self.folder, self.data.folder is not None):
            summary = previous if resumes else self._start(previous)
            self._restore_validation(summary)
            infos = self._write_shards(summary, {})
            summary = {**summary, **_describe_shards(self.folder, len(self.data.train), infos)}
            if not sum(summary["kept"]):
                remove_summary(self.folder)
                reasons = format_counts(summary["dropped"]) or "none, the corpora are empty"
                raise DataError(f"no training pair is left; dropped: {reasons}")
            return write_summary(self.folder, summary)

    def repair(self, problem: str, buckets: Sequence[int], suspects: Container[int]) -> Contents:
        """Encode the missing and damaged shards of a complete folder again, and restore the validation pairs,
        unless another process has done so meanwhile. Returns the contents of the folder. `problem` is the
        first thing that was missing or damaged; the other arguments are as in `open_contents`.

        Raises DataError if the text that was encoded is not there, or if what is encoded from it differs
        from what was there before. A damaged file is replaced when the new one is complete.
        """
        with locked_data_folder(self.folder, self.data.folder is not None, problem):
            summary = read_summary(self.folder)
            if inputs_of(summary) != self.inputs or not summary.get("complete"):
                raise DataError(f"{self.folder}: has been prepared again from other inputs; run again")
            self._restore_validation(summary)
            contents = open_contents(self.folder, summary, buckets, suspects)
            if not contents.damaged_shards:
                return contents
            self._encode_again(summary, contents.damaged_shards)
            contents = open_contents(self.folder, summary, buckets, suspects)
        if contents.problem:
            raise StorageError(f"{contents.problem}, although it has just been written; check the disk")
        return contents

    def _start(self, previous: Summary) -> Summary:
        """Write the tokenizer, the validation pairs, and the summary of an encoding that is not complete,
        which is returned."""
        folder, inputs = self.folder, self.inputs
        write_tokenizer(folder, self.tokenizer)
        # For example, with another tokenizer. A folder of an earlier version lacks the sizes.
        if has_same_pairs(previous, inputs) and "validation_sizes" in previous:
            kept = {key: previous[key] for key in ("pairs", "validation_sha256", "validation_sizes")}
            kept |= {"rejections": previous["rejections"]} if "rejections" in previous else {}
        else:
            scan, validation = self.scanner.result, self._draw_validation()
            kept = {
                "pairs": scan.pairs,
                "validation_sha256": write_validation(folder, [*chain.from_iterable(validation)]),
                "validation_sizes": list(map(len, validation)),
            }
            if scan.rejections is not None:
                scan.rejections.write(folder)
                kept["rejections"] = scan.rejections.describe()
        self.scanner.files.record_digests(folder)
        summary = {"fingerprint": inputs.fingerprint, "layout": LAYOUT, "inputs": inputs._asdict()}
        summary |= {"pairs": kept["pairs"], "buckets": min(max(1, -(-kept["pairs"] // BUCKET)), MAX_BUCKETS)}
        summary = write_summary(folder, {**summary, **kept})
        # Recorded now, because a resumed encoding does not check the text again.
        if self.scanner.checks and (findings := self.scanner.result.findings):
            record_findings(folder, findings, self.data.bad_lines)
        return summary

    def _draw_validation(self) -> list[list[Pair]]:
        """The validation pairs of each corpus that contains some: those of training for a holdout."""
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

    def _restore_validation(self, summary: Summary) -> None:
        """Draw the validation pairs again if their file is missing or damaged. Raises DataError if they
        differ from the pairs that were drawn before."""
        try:
            read_validation(self.folder, summary)
        except ModelError as error:
            problem = str(error)
        else:
            return
        data, contents = self.data, self.inputs.contents
        if isinstance(data.validation, Holdout):
            require_same_text(data.train, contents, self.scanner.files.digests, problem)
        else:
            contents = contents[len(data.train) :]
            require_same_text(data.validation, contents, self.scanner.files.digests, problem)
        log.warning("%s; drawing the validation pairs again", problem)
        digest = summary["validation_sha256"]
        drawn = [*chain.from_iterable(self._draw_validation())]
        if write_validation(self.folder, drawn, digest) != digest:
            raise DataError(f"{problem}; drawing the validation pairs again gives others; restore the file")

    def _open_rejections(self, summary: Summary) -> Rejections | None:
        """The pairs that the filters leave out; None without filters. The corpora are filtered again if their
        file is missing or damaged. Raises DataError if the filters reject other pairs than before."""
        if (expected := summary.get("rejections")) is None:
            return None
        try:
            return read_rejections(self.folder, **expected)
        except ModelError as error:
            problem = str(error)
        log.warning("%s; filtering the corpora again", problem)
        contents = self.inputs.contents[: len(self.data.train)]
        require_same_text(self.data.train, contents, self.scanner.files.digests, problem)
        rejections = self.scanner.result.rejections
        if rejections is None or rejections.describe() != expected:
            raise DataError(f"{problem}; filtering again rejects other pairs; restore the file")
        rejections.write(self.folder)
        return rejections

    def _encode_again(self, summary: Summary, damaged: dict[int, str]) -> None:
        """Replace damaged shards by shards with the same contents."""
        contents = self.inputs.contents[: len(self.data.train)]
        problem = next(iter(damaged.values()))
        require_same_text(self.data.train, contents, self.scanner.files.digests, problem)
        for reason in damaged.values():
            log.warning("%s; encoding this shard again", reason)
        entries = summary["shards"]
        self._write_shards(summary, {index: entries[index]["index_sha256"] for index in damaged})

    def _write_shards(self, summary: Summary, replaced: dict[int, str]) -> list[ShardInfo]:
        """Write the shards that are missing or `replaced`; see `ShardWriter`."""
        held_out: frozenset[str] = frozenset()
        if isinstance(self.data.validation, Holdout):
            validation = read_validation(self.folder, summary)
            held_out = frozenset(pair.source for pair in validation)
            if self.data.has_several_directions:
                held_out |= {pair.target for pair in validation}
        encoder = Encoder(self.data, self.tokenizer, held_out)
        inputs = self.inputs.fingerprint, summary["buckets"], replaced, self._open_rejections(summary)
        writer = ShardWriter(self.scanner, encoder, self.folder, *inputs)
        pairs = summary["pairs"]
        count = self.workers or (count_cores() if pairs >= SHARD else 1)  # starting a process takes a second
        return writer.write(pairs, count)


def _describe_shards(folder: Path, corpora: int, infos: Sequence[ShardInfo]) -> Summary:
    """What the summary of a complete data folder says about its shards."""
    kept, dropped = [0] * corpora, Counter[str]()
    for info in infos:
        kept[info.corpus] += info.kept
        dropped.update(info.dropped)
    files = [shard_file(folder, index) for index in range(len(infos))]
    shards = [{"size": file.stat().st_size, "index_sha256": Shard(file).index_sha256} for file in files]
    return {"complete": True, "kept": kept, "dropped": dropped, "shards": shards}


def format_counts(dropped: dict[str, int]) -> str:
    """The number of dropped pairs for each reason, as text."""
    return ", ".join(f"{count:,} {reason}" for reason, count in dropped.items())
