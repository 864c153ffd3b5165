"""Shards: the encoded pairs of consecutive parts of a corpus, one file each.

A shard is a safetensors file, which can be memory-mapped. It contains what is left of `SHARD` raw pairs:

    source, target                  ids of all rows, each ending in EOS; uint16 if they fit, else int32
    source_length, target_length    uint32, for each row
    number                          uint32, for each row: number of its pair, from the first one of the shard
    buckets (buckets + 1, 3)        int64: the rows, source ids and target ids before each bucket
    sha256 (buckets, 32)            of the rows of each bucket

Rows are grouped by bucket, which is a hash of (seed, corpus, pair), and ordered by number within a bucket.
The rows of a bucket in all shards are a random sample of the corpus.

`EncodedCorpus` has the rows of some buckets of all shards, as training reads them. Writing, verifying and
fetching rows are in one file, although it is long, because all three depend on this layout.
"""

import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Self, cast

import numpy as np
from safetensors.numpy import save_file

from mtrain.config.sections.corpora import Corpus
from mtrain.data.reading.files import place_of
from mtrain.data.text.hashes import hash_numbers
from mtrain.errors import DataError, ModelError, StorageError
from mtrain.storage.atomic import replacing
from mtrain.storage.manifest import sha256_of_json
from mtrain.tokenizer.rows import Floats, Ids, Indices, Rows, Sides, ranges

LAYOUT = 4  # version of the files of the data folder; if it changes, runs encode again
SHARD = 250_000  # raw pairs
BUCKET = 250_000  # raw pairs of the whole corpus, on average
MAX_BUCKETS = 1024  # otherwise, the indices of all shards would grow with the square of the corpus
_KEY = "shard"  # of the metadata; a single key, because the order of several is random
_DTYPES = {"U16": np.uint16, "I32": np.int32, "U32": np.uint32, "I64": np.int64, "U8": np.uint8}
_ROWS = ("source", "target", "source_length", "target_length", "number")
_TENSORS = {*_ROWS, "buckets", "sha256"}
_MAX_HEADER = 2**20  # bytes; a header is far smaller
LocateRows = Callable[[Sequence[int]], list[str]]
Weights = tuple[Floats, Sequence[int] | Indices]  # of so many consecutive rows


@dataclass(frozen=True)
class ShardInfo:
    """What a shard was made from, and what was dropped."""

    layout: int  # `LAYOUT`
    capacity: int  # raw pairs of each shard but the last one of a corpus
    buckets: int
    fingerprint: str  # of the inputs of the whole corpus
    corpus: int  # index in `data.train`
    first: int  # number of the first raw pair in its corpus, from 1
    pairs: int  # raw pairs
    kept: int
    dropped: dict[str, int]  # number of pairs by reason
    ends: tuple[int, ...]  # `RawPosition.offsets` after the raw pairs


def buckets_of(numbers: Ids, seed: int, corpus: int, count: int) -> Indices:
    """The bucket of each pair of a corpus, in [0, count): a hash of seed, corpus and number."""
    high = hash_numbers(numbers, f"{seed} {corpus}") >> np.uint64(32)
    return ((high * np.uint64(count)) >> np.uint64(32)).astype(np.int64)


def shard_file(folder: Path, index: int) -> Path:
    """The file of shard `index`, from 0."""
    return folder / f"shard-{index:05}.safetensors"


def write_shard(
    file: Path, sides: Sides, numbers: Ids, buckets: Indices, info: ShardInfo, index_sha256: str | None = None
) -> None:
    """Write a shard atomically. Each row has its number (from the first pair of the shard) in `numbers`, and
    its bucket in `buckets`.

    Raises DataError if the index of the shard does not have the SHA-256 `index_sha256`, if that is given;
    StorageError if the shard cannot be written. In both cases, an existing file is kept.
    """
    count = info.buckets
    order = np.argsort(buckets, kind="stable")
    sides = sides[0].take(order), sides[1].take(order)
    edges = np.searchsorted(buckets[order], np.arange(count + 1))
    index = np.stack([edges, *(side.starts[edges] for side in sides)], axis=1)
    lengths = [side.lengths.astype(np.uint32) for side in sides]
    columns = sides[0].ids, sides[1].ids, *lengths, numbers[order].astype(np.uint32)
    tensors: dict[str, Any] = {**dict(zip(_ROWS, columns, strict=True)), "buckets": index}
    digests = [_digest(tensors, index, bucket) for bucket in range(count)]
    tensors["sha256"] = np.frombuffer(b"".join(digests), np.uint8).reshape(count, 32)
    metadata = {**asdict(info), "sha256": sha256_of_json(asdict(info))}
    with replacing(file) as temporary:
        save_file(tensors, temporary, {_KEY: json.dumps(metadata)})
        if index_sha256 is not None and Shard(temporary).index_sha256 != index_sha256:
            cure = "restore the shard, or use the versions of mtrain and its libraries that encoded it"
            raise DataError(f"{file}: encoding this shard again gives other contents than it had; {cure}")


def _digest(tensors: dict[str, Any], index: Indices, bucket: int) -> bytes:
    """The SHA-256 of the rows of a bucket."""
    digest = hashlib.sha256()
    for name in _ROWS:
        start, stop = index[bucket : bucket + 2, {"source": 1, "target": 2}.get(name, 0)]
        digest.update(tensors[name][start:stop])
    return digest.digest()


class StoredRows(NamedTuple):
    """Rows in a file of ids, in any order: where the ids of the sources and of the targets are."""

    positions: Ids  # of the rows in the file
    ids: Sequence[Ids]  # of the sources and of the targets, of these rows and others
    starts: Sequence[Ids]  # of each row in the `ids` of its side
    lengths: Sequence[Ids]  # of each row, on each side

    def take(self, rows: Indices) -> "StoredRows":
        """The rows at some indices, without copying ids."""
        starts, lengths = ([side[rows] for side in both] for both in (self.starts, self.lengths))
        return StoredRows(self.positions[rows], self.ids, starts, lengths)


class Shard:
    """A memory-mapped shard. It keeps no file open, because a corpus may have more shards than a process may
    have open files."""

    def __init__(self, file: Path):
        """Raises ModelError if the file is missing, or if it is visibly damaged; StorageError if it cannot be
        read for another reason, such as missing permissions or too many open files."""
        self.file = file
        try:
            self._header, self._tensors, info = _open(file)
            self._status = file.stat()
            digest = info.pop("sha256")
            self.info = ShardInfo(**{**info, "ends": tuple(info["ends"])})
            if sha256_of_json(asdict(self.info)) != digest:
                raise ValueError("its metadata does not match its SHA-256")
            if absent := _TENSORS - self._tensors.keys():
                raise ValueError(f"it has no {', '.join(sorted(absent))}")
            rows, tokens = len(self._tensors["number"]), [len(self._tensors[side]) for side in _ROWS[:2]]
            shape = len(self.buckets), self.buckets[-1].tolist()
            if shape != (self.info.buckets + 1, [rows, *tokens]):
                raise ValueError("its index does not match its rows")
        except FileNotFoundError:
            raise ModelError(f"{file}: missing") from None
        except OSError as error:
            if error.errno != errno.EIO:
                raise StorageError(f"{file}: cannot read: {error.strerror}") from error
            raise ModelError(f"{file}: damaged ({error.strerror})") from None
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise ModelError(f"{file}: damaged ({error})") from None

    @property
    def buckets(self) -> Indices:
        """The rows, source ids and target ids before each bucket (buckets + 1, 3)."""
        return cast(Indices, self._tensors["buckets"])

    def verify(self, index_sha256: str, buckets: Sequence[int]) -> Self:
        """Compare the index of the shard, and the rows of some buckets, with their hashes. Raises ModelError
        if one differs."""
        if self.index_sha256 != index_sha256:
            raise ModelError(f"{self.file}: damaged (its index has changed)")
        self.verify_rows(buckets)
        return self

    def verify_rows(self, buckets: Iterable[int]) -> None:
        """Compare the rows of some buckets with their hashes. Raises ModelError if one differs."""
        self._require_whole()
        for bucket in buckets:
            if _digest(self._tensors, self.buckets, bucket) != self._tensors["sha256"][bucket].tobytes():
                raise ModelError(f"{self.file}: damaged (its rows do not match their SHA-256)")

    def _require_whole(self) -> None:
        """Raise ModelError if the file is shorter than when it was opened. Reading what is missing from the
        memory map would end the process with SIGBUS."""
        with suppress(OSError):  # removed; what was opened is still there, as it is if the file was replaced
            status = self.file.stat()
            if os.path.samestat(status, self._status) and status.st_size < self._status.st_size:
                raise ModelError(f"{self.file}: damaged (it has been cut)")

    @cached_property
    def index_sha256(self) -> str:
        """The SHA-256 of what describes the rows: the header, the buckets, and their hashes."""
        hashes = (self._tensors[name].tobytes() for name in ("buckets", "sha256"))
        return hashlib.sha256(b"".join((self._header, *hashes))).hexdigest()

    def rows(self, buckets: Sequence[int]) -> StoredRows:
        """The rows of some buckets, in the order of their numbers."""
        chosen = np.asarray(buckets, np.int64)
        index = self.buckets[chosen]  # (chosen, 3)
        counts = self.buckets[chosen + 1, 0] - index[:, 0]
        positions = ranges(index[:, 0], counts)
        firsts = np.cumsum(counts) - counts  # of each bucket in `positions`
        order = np.argsort(self._tensors["number"][positions], kind="stable")
        ids = [self._tensors[name] for name in _ROWS[:2]]
        lengths: list[Ids] = [self._tensors[name][positions] for name in _ROWS[2:4]]
        starts = []
        for side, of_rows in enumerate(lengths, start=1):
            before = np.append(0, np.cumsum(of_rows, dtype=np.int64))
            starts.append(before[:-1] + np.repeat(index[:, side] - before[firsts], counts))
        return StoredRows(positions.astype(np.uint32), ids, starts, lengths).take(order)

    def numbers(self, rows: Ids) -> Indices:
        """The numbers of some rows' pairs in their corpus, from 1."""
        numbers: Indices = self._tensors["number"][rows].astype(np.int64) + self.info.first
        return numbers


def _open(file: Path) -> tuple[bytes, dict[str, Any], dict[str, Any]]:
    """The header of a safetensors file, its tensors, and the metadata of a shard."""
    import pyarrow as pa  # here, because worker processes that encode do not need it

    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        if size > _MAX_HEADER:
            raise ValueError("not a safetensors file")
        header = stream.read(size)
    entries = json.loads(header)
    info = json.loads(entries.pop("__metadata__")[_KEY])
    with pa.memory_map(str(file)) as mapped:
        data = np.frombuffer(mapped.read_buffer(), np.uint8)
    tensors: dict[str, Any] = {}
    for name, entry in entries.items():
        start, stop = (8 + size + offset for offset in entry["data_offsets"])
        if stop > len(data):
            raise ValueError("truncated")
        tensors[name] = data[start:stop].view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return header, tensors, info


class EncodedCorpus:
    """Token ids of training pairs. Each side of a row ends in EOS; lengths include it.

    The ids are memory-mapped. In memory, a row takes 20 bytes.
    """

    def __init__(self, parts: Sequence[StoredRows], weights: Weights, locate: LocateRows):
        """The rows of some parts, one after another. `weights` are some weights, and the number of
        consecutive rows that have each of them. `locate` returns the locations of rows as `file:line`."""
        self._weights, self.locate = weights, locate
        self._edges = np.cumsum([0, *(len(part.positions) for part in parts)])  # first row of each part
        self._ids = [[part.ids[side] for part in parts] for side in (0, 1)]
        self._starts = [_compact(np.concatenate([part.starts[side] for part in parts])) for side in (0, 1)]
        lengths = (np.concatenate([part.lengths[side] for part in parts]) for side in (0, 1))
        self.source_lengths, self.target_lengths = (each.astype(np.int32, copy=False) for each in lengths)

    @classmethod
    def open(cls, shards: Sequence[Shard], corpora: Sequence[Corpus], buckets: Sequence[int]) -> Self:
        """The rows of some buckets of all shards, in the order of their pairs in the corpora."""
        parts = [shard.rows(buckets) for shard in shards]
        weights = np.array([corpora[shard.info.corpus].weight for shard in shards], np.float64)
        return cls.of_rows(shards, corpora, parts, (weights, [len(part.positions) for part in parts]))

    @classmethod
    def of_rows(
        cls, shards: Sequence[Shard], corpora: Sequence[Corpus], parts: Sequence[StoredRows], weights: Weights
    ) -> Self:
        """The given rows of each shard, in the order of the shards. There must be at least one shard."""
        positions = [part.positions for part in parts]
        edges = np.cumsum([0, *map(len, positions)])

        def place(row: int) -> str:
            part = int(np.searchsorted(edges, row, side="right")) - 1
            [number] = shards[part].numbers(positions[part][row - edges[part]][None]).tolist()
            return place_of(corpora[shards[part].info.corpus], number)

        return cls(parts, weights, lambda rows: list(map(place, rows)))

    def __len__(self) -> int:
        return len(self.source_lengths)

    @property
    def weights(self) -> Floats:
        """How often each row occurs in an epoch."""
        weights: Floats = np.repeat(*self._weights)
        return weights

    @property
    def expected_pairs(self) -> float:
        """How many pairs these rows contribute to an epoch, on average."""
        return float(np.dot(*self._weights))

    def weighted(self, weights: Floats) -> "EncodedCorpus":
        """The same rows with another weight for each part, if it has one weight for each part."""
        found = copy(self)
        found._weights = weights, self._weights[1]
        return found

    def fetch(self, rows: Sequence[int] | Indices) -> Sides:
        """Source and target ids (int32) of the given rows, in the given order."""
        wanted = np.asarray(rows, np.int64)
        owners = np.searchsorted(self._edges, wanted, side="right") - 1
        order = np.argsort(owners, kind="stable")  # groups the rows by the part that has their ids
        edges = [0, *(np.flatnonzero(np.diff(owners[order])) + 1).tolist(), len(order)]
        sides = []
        for side, lengths in enumerate((self.source_lengths[wanted], self.target_lengths[wanted])):
            starts = self._starts[side][wanted].astype(np.int64)
            found = ranges(starts[order], lengths[order])  # where the ids are
            ends = np.concatenate([[0], np.cumsum(lengths[order], dtype=np.int64)])[edges].tolist()
            grouped = np.empty(len(found), np.int32)
            for (first, _), (start, stop) in zip(pairwise(edges), pairwise(ends), strict=True):
                if stop > start:
                    grouped[start:stop] = self._ids[side][owners[order[first]]][found[start:stop]]
            ids = np.empty_like(grouped)
            ids[ranges((np.cumsum(lengths, dtype=np.int64) - lengths)[order], lengths[order])] = grouped
            sides.append(Rows(ids, lengths))
        return sides[0], sides[1]

    @property
    def id_type(self) -> np.dtype[np.integer]:
        """The integer type of all ids."""
        return np.result_type(*(ids.dtype for sides in self._ids for ids in sides))

    def with_rows(self, sides: Sides) -> "EncodedCorpus":
        """The same pairs with other source and target ids. Rows beyond `len(self)` are noise that is added to
        the corpus."""
        columns = ((side.ids, side.starts[:-1], side.lengths) for side in sides)
        ids, starts, lengths = zip(*columns, strict=True)
        count = len(lengths[0])

        def locate(rows: Sequence[int]) -> list[str]:
            return [self.locate([row])[0] if row < len(self) else "data.augment.noise" for row in rows]

        weights = np.append(self._weights[0], 1.0), np.append(self._weights[1], count - len(self))
        rows = StoredRows(np.arange(count, dtype=np.uint32), ids, starts, lengths)
        return EncodedCorpus([rows], weights, locate)


def _compact(indices: Ids) -> Ids:
    """The same numbers in four bytes each, if they fit."""
    return indices.astype(np.uint32) if indices.max(initial=0) < 2**32 else indices
