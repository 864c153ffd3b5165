"""The data folder: shards of encoded pairs, the validation pairs, and the tokenizer that encoded them.

A complete folder is only read, so several runs can share it, on a read-only file system too, and without the
raw files.
"""

import json
import logging
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from mtrain.config.data import DataConfig
from mtrain.data import Pair
from mtrain.data.shards import Shard, shard_file
from mtrain.data.summary import VALIDATION, Summary
from mtrain.errors import ModelError
from mtrain.storage.atomic import write_atomically, write_folder
from mtrain.storage.manifest import MANIFEST, sha256
from mtrain.tokenizer.tokenizer import Tokenizer

log = logging.getLogger(__name__)

TOKENIZER = "tokenizer"
SHARD_NAME = re.compile(r"shard-([0-9]{5,9})\.safetensors")
_OBSOLETE = ("train.arrow", MANIFEST)  # of layout 2


def find_data_folder(data: DataConfig, run_dir: Path) -> Path:
    """The data folder of a run."""
    return run_dir / "data" if data.folder is None else Path(data.folder)


def write_validation(folder: Path, pairs: list[Pair]) -> str:
    """Write the validation pairs, and return the SHA-256 of their file. Raises StorageError."""
    lines = (json.dumps(pair, ensure_ascii=False) + "\n" for pair in pairs)
    write_atomically(folder / VALIDATION, "".join(lines))
    return sha256(folder / VALIDATION)


def read_validation(folder: Path) -> list[Pair]:
    """The validation pairs."""
    with (folder / VALIDATION).open(encoding="utf-8", newline="\n") as lines:
        return [Pair(*json.loads(line)) for line in lines]


def write_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """Copy a tokenizer, with its settings, into a data folder. Raises StorageError."""
    source, ignored = tokenizer.files[0].parent, shutil.ignore_patterns(MANIFEST)
    write_folder(
        folder / TOKENIZER,
        lambda temporary: shutil.copytree(source, temporary, ignore=ignored, dirs_exist_ok=True),
    )


def shared_tokenizer(data: DataConfig) -> Path | None:
    """The tokenizer folder in `data.folder`, if that is given and contains one."""
    if data.folder is None or not (folder := Path(data.folder) / TOKENIZER).is_dir():
        return None
    return folder


def open_shards(folder: Path, summary: Summary, buckets: Sequence[int]) -> tuple[list[Shard], list[int]]:
    """The shards of a data folder, and the indices of those that are missing or damaged. The rows of some
    buckets are verified."""
    shards, damaged = [], []
    for index, entry in enumerate(summary["shards"]):
        file = shard_file(folder, index)
        try:
            if file.exists() and file.stat().st_size != entry["size"]:
                raise ModelError(f"{file}: damaged (its size is {file.stat().st_size}, not {entry['size']})")
            shards.append(Shard(file).verify(entry["index_sha256"], buckets))
        except ModelError as error:
            log.warning("%s; encoding this shard again", error)
            damaged.append(index)
    return shards, damaged


def remove_obsolete(folder: Path, shards: int) -> None:
    """Remove what earlier data left in the folder: shards after the last one, and files of layout 2."""
    indices = (int(found[1]) for file in folder.iterdir() if (found := SHARD_NAME.fullmatch(file.name)))
    after_last = (shard_file(folder, index) for index in indices if index >= shards)
    for file in (*after_last, *(folder / name for name in _OBSOLETE)):
        with suppress(OSError):  # does no harm
            file.unlink(missing_ok=True)
