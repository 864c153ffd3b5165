"""The data folder: shards of encoded pairs, the validation pairs, and the tokenizer that encoded them.

A complete folder is only read, so several runs can share it, on a read-only file system too, and without the
raw files.
"""

import hashlib
import json
import re
from collections.abc import Container, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from mtrain.config.corpora import Holdout
from mtrain.config.data import DataConfig
from mtrain.config.languages import Direction
from mtrain.data import Pair
from mtrain.data.store.shards import Shard, shard_file
from mtrain.data.store.summary import Summary
from mtrain.errors import ModelError, StorageError, UsageError
from mtrain.regular_files import read_file
from mtrain.storage.atomic import copy_files, write_atomically, write_folder
from mtrain.storage.manifest import MANIFEST
from mtrain.tokenizer.tokenizer import Tokenizer

VALIDATION, TOKENIZER = "validation.jsonl", "tokenizer"
CHECK = "check.json"  # the findings of the data check, for `mtrain report`
SHARD_NAME = re.compile(r"shard-([0-9]{5,9})\.safetensors")
_OF_RUNS = ("checkpoints", "metrics.jsonl", "data/summary.json")  # in run folders, not in data folders
_OBSOLETE = ("train.arrow", MANIFEST)  # of layout 2


def find_data_folder(data: DataConfig, run_dir: Path) -> Path:
    """The data folder of a run. Raises UsageError if `data.folder` is a run folder."""
    if data.folder is None:
        return run_dir / "data"
    folder = Path(data.folder)
    if (folder / "config.yaml").exists() and any((folder / name).exists() for name in _OF_RUNS):
        own = folder / "data"
        cure = f"its data folder is {own}" if (own / "summary.json").exists() else "give another data.folder"
        raise UsageError(f"{folder}: is a run folder, not a data folder; {cure}")
    return folder


def write_validation(folder: Path, pairs: list[Pair], digest: str | None = None) -> str:
    """Write the validation pairs, and return the SHA-256 of their file. If `digest` is given and is another
    one, nothing is written. Raises StorageError."""
    text = "".join(json.dumps(pair, ensure_ascii=False) + "\n" for pair in pairs)
    new_digest = hashlib.sha256(text.encode()).hexdigest()
    if digest in (None, new_digest):
        write_atomically(folder / VALIDATION, text)
    return new_digest


def read_validation(folder: Path, summary: Summary) -> list[Pair]:
    """The validation pairs. Raises ModelError if their file is missing or damaged; StorageError if it cannot
    be read."""
    file = folder / VALIDATION
    try:
        content = read_file(file)
    except FileNotFoundError:
        raise ModelError(f"{file}: missing") from None
    except OSError as error:
        raise StorageError(f"{file}: cannot read: {error.strerror}") from error
    if hashlib.sha256(content).hexdigest() != summary["validation_sha256"]:
        raise ModelError(f"{file}: damaged (it does not match its SHA-256)")
    return [Pair(*json.loads(line)) for line in content.decode().split("\n")[:-1]]


def directions_of_validation(data: DataConfig, summary: Summary, pairs: Sequence[Pair]) -> list[Direction]:
    """The direction of each of the validation `pairs` of a data folder."""
    sizes = summary.get("validation_sizes")
    if sizes is None:  # an earlier version, whose pairs have one direction, has prepared the folder
        return [data.direction] * len(pairs)
    corpora = data.train if isinstance(data.validation, Holdout) else data.validation
    directions = [[data.direction_of(corpus)] * size for corpus, size in zip(corpora, sizes, strict=True)]
    return [*chain.from_iterable(directions)]


def write_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """Copy a tokenizer, with its settings, into a data folder. Raises StorageError."""
    source = tokenizer.files[0].parent
    write_folder(folder / TOKENIZER, lambda temporary: copy_files(source, temporary, {MANIFEST}))


def shared_tokenizer(data: DataConfig) -> Path | None:
    """The tokenizer folder in `data.folder`, if that is given and contains one."""
    if data.folder is None or not (folder := Path(data.folder) / TOKENIZER).is_dir():
        return None
    return folder


class Contents(NamedTuple):
    """What a complete data folder contains, as far as it is neither missing nor damaged."""

    shards: list[Shard]
    validation: list[Pair]
    damaged_shards: dict[int, str]  # by index: what is wrong
    damaged_validation: str | None = None  # what is wrong

    @property
    def problem(self) -> str | None:
        """The first thing that is missing or damaged."""
        return next(iter(self.damaged_shards.values()), self.damaged_validation)


def open_contents(
    folder: Path, summary: Summary, buckets: Sequence[int], suspects: Container[int] = ()
) -> Contents:
    """Open the shards and read the validation pairs of a complete data folder. The rows of some `buckets` are
    verified and, in the shards that are `suspects`, all rows. Raises StorageError if a file cannot be
    read."""
    shards, damaged = [], {}
    for index, entry in enumerate(summary["shards"]):
        verified = range(summary["buckets"]) if index in suspects else buckets
        try:
            require_size(folder, index, entry)
            shards.append(Shard(shard_file(folder, index)).verify(entry["index_sha256"], verified))
        except ModelError as error:
            damaged[index] = str(error)
    try:
        return Contents(shards, read_validation(folder, summary), damaged)
    except ModelError as error:
        return Contents(shards, [], damaged, str(error))


def require_size(folder: Path, index: int, entry: dict[str, Any]) -> None:
    """Raise ModelError if a shard is missing or has another size than its entry in the summary says."""
    file = shard_file(folder, index)
    try:
        size = file.stat().st_size
    except FileNotFoundError:
        raise ModelError(f"{file}: missing") from None
    except OSError as error:
        raise StorageError(f"{file}: cannot read: {error.strerror}") from error
    if size != entry["size"]:
        raise ModelError(f"{file}: damaged (its size is {size}, not {entry['size']})")


def remove_obsolete(folder: Path, shards: int) -> None:
    """Remove what earlier data left in the folder: shards after the last one, and files of layout 2."""
    indices = (int(found[1]) for file in folder.iterdir() if (found := SHARD_NAME.fullmatch(file.name)))
    after_last = (shard_file(folder, index) for index in indices if index >= shards)
    for file in (*after_last, *(folder / name for name in _OBSOLETE)):
        with suppress(OSError):  # does no harm
            file.unlink(missing_ok=True)
