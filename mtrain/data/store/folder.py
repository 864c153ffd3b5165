"""The data folder: shards of encoded pairs, the validation pairs, and the tokenizer that encoded them.

A complete folder is only read, so several runs can share it, on a read-only file system too, and without the
raw files. Its `summary.json` records the inputs that it was made from and, once it is complete, the size and
a hash of each shard.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, Self

from mtrain.config.languages import Direction
from mtrain.config.sections.corpora import Holdout
from mtrain.config.sections.data import DataConfig
from mtrain.data import Pair
from mtrain.data.store.shards import LAYOUT, Shard, shard_file
from mtrain.errors import ModelError, UsageError
from mtrain.regular_files import read_file
from mtrain.storage.atomic import copy_files, write_atomically, write_folder
from mtrain.storage.manifest import MANIFEST, reading, sha256_of_json
from mtrain.tokenizer.tokenizer import Tokenizer

SUMMARY = "summary.json"
VALIDATION = "validation.jsonl"
TOKENIZER = "tokenizer"
CHECK = "check.json"  # the findings of the data check, for `mtrain report`
SHARD_NAME = re.compile(r"shard-([0-9]{5,9})\.safetensors")
CURE = "restore it, or give another data.folder"
_OF_RUNS = ("checkpoints", "metrics.jsonl", "data/summary.json")  # in run folders, not in data folders
_OBSOLETE = ("train.arrow", MANIFEST)  # of layout 2

Summary = dict[str, Any]


class Inputs(NamedTuple):
    """What a data folder is made from."""

    settings: dict[str, Any]
    contents: list[str]  # the content hash of each training corpus, then of each validation corpus

    @property
    def fingerprint(self) -> str:
        """SHA-256 of settings and contents. Modification times and corpus weights do not change it."""
        return sha256_of_json([self.settings, self.contents])

    @property
    def seed(self) -> int:
        """The seed of the held-out pairs and of the buckets."""
        return int(self.settings["seed"])


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


class DataFolder:
    """The data folder of a run.

    A process opens it once and passes it on. It reads the summary again only around the lock of the folder,
    because another process may have completed, repaired or copied the folder meanwhile.

    `summary` is what `read_summary` returns, and empty if it is damaged. `unusable` is the reason why a
    summary cannot be used.
    """

    def __init__(self, path: Path, run_dir: Path, shared: bool = False):
        """`run_dir` is the run folder, for what is not written to a data folder that is `shared`, which other
        runs may use. Raises the errors of `reload`."""
        self.path, self.run_dir, self.shared = path, run_dir, shared
        self.reload()

    @classmethod
    def of_run(cls, data: DataConfig, run_dir: Path) -> Self:
        """Open the data folder of a run, which need not exist yet. Raises UsageError if `data.folder` is a
        run folder, and the errors of `reload`."""
        if data.folder is None:
            return cls(run_dir / "data", run_dir)
        folder = Path(data.folder)
        if (folder / "config.yaml").exists() and any((folder / name).exists() for name in _OF_RUNS):
            own = folder / "data"
            cure = f"its data folder is {own}" if (own / SUMMARY).exists() else "give another data.folder"
            raise UsageError(f"{folder}: is a run folder, not a data folder; {cure}")
        return cls(folder, run_dir, shared=True)

    def reload(self) -> None:
        """Read the summary.

        In a shared folder, a summary that cannot be used is an error, because other runs may use the folder.
        Raises ModelError if it is damaged; UsageError if another version of mtrain has written it;
        StorageError if it cannot be read.
        """
        self.summary: Summary = {}
        self.unusable: str | None = None
        try:
            self.summary = read_summary(self.path)
        except ModelError as error:
            if self.shared:
                raise ModelError(f"{error}; {CURE}") from None
            self.unusable = str(error)
        if self.summary and self.inputs is None:
            if self.shared:
                cure = "give another data.folder"
                raise UsageError(f"{self.path}: was prepared by another version of mtrain; {cure}")
            self.unusable = f"{self.path}: was written by another version of mtrain"

    @property
    def inputs(self) -> Inputs | None:
        """What the folder was begun from; None if that is not known."""
        return inputs_of(self.summary)

    @property
    def damaged(self) -> str | None:
        """What is wrong with a damaged summary. None if it is intact, or written by another version."""
        return None if self.summary else self.unusable

    @property
    def is_complete(self) -> bool:
        """Whether all pairs have been encoded. Files may have been lost or damaged since."""
        return bool(self.summary.get("complete"))

    def write_summary(self, summary: Summary) -> None:
        """Replace the summary, with its hash. Raises StorageError."""
        summary = {key: value for key, value in summary.items() if key != "sha256"}
        summary["sha256"] = sha256_of_json(summary)
        write_atomically(self.path / SUMMARY, json.dumps(summary, indent=1) + "\n")
        self.summary, self.unusable = summary, None

    def why_incomplete(self) -> str | None:
        """What the folder lacks of what its summary describes; None if it is complete. Only the sizes of the
        shards are compared. Raises StorageError if a file cannot be read."""
        if self.damaged:
            return self.damaged
        if not self.is_complete:
            return f"{self.path}: is not {'complete' if self.summary else 'prepared'} yet"
        try:
            for index, entry in enumerate(self.summary["shards"]):
                _require_size(self.path, index, entry)
        except ModelError as error:
            return str(error)
        validation = self.path / VALIDATION
        return None if validation.exists() else f"{validation}: missing"

    def open_contents(self, buckets: Sequence[int]) -> Contents:
        """Open the shards and read the validation pairs of a complete folder. The rows of some `buckets` are
        verified. Raises StorageError if a file cannot be read."""
        shards, damaged = [], {}
        for index, entry in enumerate(self.summary["shards"]):
            try:
                _require_size(self.path, index, entry)
                shards.append(Shard(shard_file(self.path, index)).verify(entry["index_sha256"], buckets))
            except ModelError as error:
                damaged[index] = str(error)
        try:
            return Contents(shards, read_validation(self.path, self.summary), damaged)
        except ModelError as error:
            return Contents(shards, [], damaged, str(error))


def locate_data_folder(run_dir: Path, folder: str | None) -> Path:
    """The data folder of a run, whose config may name a `folder`. The path may lead there from a folder that
    contains the run, where the run was started, or else from the working directory."""
    if folder is None:
        return run_dir / "data"
    parents = (*run_dir.absolute().parents, *run_dir.resolve().parents)
    places = (*(parent / folder for parent in parents), Path(folder))
    return next((place for place in places if (place / SUMMARY).is_file()), Path(folder))


def shared_tokenizer(data: DataConfig) -> Path | None:
    """The tokenizer folder in `data.folder`, if that is given and contains one."""
    if data.folder is None or not (folder := Path(data.folder) / TOKENIZER).is_dir():
        return None
    return folder


def write_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """Copy a tokenizer, with its settings, into a data folder. Raises StorageError."""
    source = tokenizer.files[0].parent
    write_folder(folder / TOKENIZER, lambda temporary: copy_files(source, temporary, {MANIFEST}))


def read_summary(folder: Path) -> Summary:
    """The summary of a data folder; empty if it has none. If another version of mtrain has written it, it has
    only its layout. Raises ModelError if it is damaged; StorageError if it cannot be read."""
    file = folder / SUMMARY
    if not file.exists():  # it is removed if no pair is left
        return {}
    try:
        with reading(file):
            summary: Summary = json.loads(read_file(file))
        content = {key: value for key, value in summary.items() if key != "sha256"}
        is_usable = _is_current(summary)
        if (is_usable or "sha256" in summary) and summary["sha256"] != sha256_of_json(content):
            raise ValueError("it does not match its SHA-256")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ModelError(f"{file}: damaged ({error})") from None
    if is_usable:
        return summary
    return {"layout": summary.get("layout")} if "fingerprint" in summary else {}  # another program's


def inputs_of(summary: Summary) -> Inputs | None:
    """The inputs of a data folder; None if they are not known."""
    return Inputs(**summary["inputs"]) if _is_current(summary) else None


def _is_current(summary: Summary) -> bool:
    """Whether this version of mtrain can use what a summary describes."""
    return summary.get("layout") == LAYOUT and "inputs" in summary


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
    with reading(file):
        content = read_file(file)
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


def _require_size(folder: Path, index: int, entry: dict[str, Any]) -> None:
    """Raise ModelError if a shard is missing or has another size than its entry in the summary says."""
    file = shard_file(folder, index)
    with reading(file):
        size = file.stat().st_size
    if size != entry["size"]:
        raise ModelError(f"{file}: damaged (its size is {size}, not {entry['size']})")


def remove_obsolete(folder: Path, shards: int) -> None:
    """Remove what earlier data left in the folder: shards after the last one, and files of layout 2."""
    indices = (int(found[1]) for file in folder.iterdir() if (found := SHARD_NAME.fullmatch(file.name)))
    after_last = (shard_file(folder, index) for index in indices if index >= shards)
    for file in (*after_last, *(folder / name for name in _OBSOLETE)):
        with suppress(OSError):  # does no harm
            file.unlink(missing_ok=True)
