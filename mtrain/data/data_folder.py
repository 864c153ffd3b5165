"""The data folder: shards of encoded pairs, the validation pairs, and the tokenizer that encoded them.

`summary.json` records the inputs that all of it was made from and, once the folder is complete, the size and
a hash of each shard. A complete folder is only read, so several runs can share it, on a read-only file system
too, and without the raw files.
"""

import json
import logging
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from mtrain.config.corpora import Corpus, HubCorpus
from mtrain.config.data import DataConfig
from mtrain.data import Pair
from mtrain.data.corpus_files import files_of
from mtrain.data.scan import train_and_validation
from mtrain.data.shards import LAYOUT, Shard, shard_file
from mtrain.data.sources import SOURCES
from mtrain.errors import DataError, ModelError, StorageError, UsageError
from mtrain.storage.atomic import recover, write_atomically, write_folder
from mtrain.storage.locks import wait_for_lock
from mtrain.storage.manifest import MANIFEST, sha256, sha256_of_json
from mtrain.tokenizer.tokenizer import Tokenizer

log = logging.getLogger(__name__)

CURE = "restore it, or give another data.folder"
_SUMMARY, _VALIDATION, _TOKENIZER = "summary.json", "validation.jsonl", "tokenizer"
LOCK = ".lock"  # the file that is locked while the folder is written
_SHARD_NAME = re.compile(r"shard-([0-9]{5,9})\.safetensors")
_OBSOLETE = ("train.arrow", MANIFEST)  # of layout 2
_LEFTOVERS = [f".{name}.tmp" for name in (_SUMMARY, _VALIDATION, SOURCES, "shard-*.safetensors")]
_PATHS = ("source", "target", "tsv", "jsonl", "parquet", "hub")  # keys of a corpus
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


# ---------------------------------------------------------------------------------------------------- summary


def read_summary(folder: Path) -> Summary:
    """The summary of a data folder; empty if it has none. Raises ModelError if the summary or the validation
    pairs are damaged. Only the layout of a summary that `is_current` rejects is known."""
    if not (folder / _SUMMARY).exists():  # it is removed if no pair is left
        return {}
    try:
        summary: Summary = json.loads((folder / _SUMMARY).read_bytes())
        if not is_current(summary):
            return {"layout": summary.get("layout")}
        if sha256(folder / _VALIDATION) != summary["validation_sha256"]:
            raise ValueError(f"{_VALIDATION} does not match its SHA-256")
        content = {key: value for key, value in summary.items() if key != "sha256"}
        if summary["sha256"] != sha256_of_json(content):
            raise ValueError(f"{_SUMMARY} does not match its SHA-256")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ModelError(f"{folder}: damaged ({error})") from None
    return summary


def is_current(summary: Summary) -> bool:
    """Whether this version of mtrain can use what a summary describes."""
    return summary.get("layout") == LAYOUT and "inputs" in summary


def inputs_of(summary: Summary) -> Inputs | None:
    """The inputs of a data folder; None if they are not known."""
    return Inputs(**summary["inputs"]) if is_current(summary) else None


def read_inputs(folder: Path) -> Inputs | None:
    """The inputs of a data folder; None if it has none, or is damaged."""
    with suppress(ModelError):
        return inputs_of(read_summary(folder))
    return None


def write_summary(folder: Path, summary: Summary) -> Summary:
    """Write a summary, and return it with its hash. Raises StorageError."""
    summary = {key: value for key, value in summary.items() if key != "sha256"}
    summary["sha256"] = sha256_of_json(summary)
    write_atomically(folder / _SUMMARY, json.dumps(summary, indent=1) + "\n")
    return summary


def remove_summary(folder: Path) -> None:
    """Remove the summary, so that the folder counts as empty."""
    (folder / _SUMMARY).unlink()


def is_begun(folder: Path) -> bool:
    """Whether encoding into a data folder was begun, so that the data has been checked."""
    return (folder / _SUMMARY).exists()


def is_complete(folder: Path) -> bool:
    """Whether a data folder has everything that its summary describes. Shards are not read."""
    with suppress(ModelError, OSError):
        summary = read_summary(folder)
        sizes = [entry["size"] for entry in summary.get("shards", ())]
        found = [shard_file(folder, index).stat().st_size for index in range(len(sizes))]
        return bool(summary.get("complete")) and found == sizes
    return False


# --------------------------------------------------------------------------------------------------- contents


def write_validation(folder: Path, pairs: list[Pair]) -> str:
    """Write the validation pairs, and return the SHA-256 of their file. Raises StorageError."""
    lines = (json.dumps(pair, ensure_ascii=False) + "\n" for pair in pairs)
    write_atomically(folder / _VALIDATION, "".join(lines))
    return sha256(folder / _VALIDATION)


def read_validation(folder: Path) -> list[Pair]:
    """The validation pairs."""
    with (folder / _VALIDATION).open(encoding="utf-8", newline="\n") as lines:
        return [Pair(*json.loads(line)) for line in lines]


def write_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """Copy a tokenizer, with its settings, into a data folder. Raises StorageError."""
    source, ignored = tokenizer.files[0].parent, shutil.ignore_patterns(MANIFEST)
    write_folder(
        folder / _TOKENIZER,
        lambda temporary: shutil.copytree(source, temporary, ignore=ignored, dirs_exist_ok=True),
    )


def shared_tokenizer(data: DataConfig) -> Path | None:
    """The tokenizer folder in `data.folder`, if that is given and contains one."""
    if data.folder is None or not (folder := Path(data.folder) / _TOKENIZER).is_dir():
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
    indices = (int(found[1]) for file in folder.iterdir() if (found := _SHARD_NAME.fullmatch(file.name)))
    after_last = (shard_file(folder, index) for index in indices if index >= shards)
    for file in (*after_last, *(folder / name for name in _OBSOLETE)):
        with suppress(OSError):  # does no harm
            file.unlink(missing_ok=True)


# ---------------------------------------------------------------------------------------------------- sharing


def find_data_folder(data: DataConfig, run_dir: Path) -> Path:
    """The data folder of a run."""
    return run_dir / "data" if data.folder is None else Path(data.folder)


def hashes_of_missing(data: DataConfig, folder: Path) -> list[str | None]:
    """For each training corpus, then each validation corpus: its content hash if its files are missing, but
    its pairs are in the complete data folder `folder`; else None. Datasets on the Hugging Face Hub count as
    missing if the folder is shared."""
    corpora = train_and_validation(data)
    with suppress(ModelError):
        summary = read_summary(folder)
        inputs = inputs_of(summary)
        recorded = inputs and _corpora_of(inputs.settings["data"])
        if summary.get("complete") and inputs and recorded == _corpora_of(_settings_of(data)):
            return [
                content if _is_missing(corpus, data.folder is not None) else None
                for corpus, content in zip(corpora, inputs.contents, strict=True)
            ]
    return [None] * len(corpora)


def check_corpora(data: DataConfig, folder: Path | None = None) -> None:
    """Raise DataError if a file that the config names does not exist. If the pairs of all missing files of
    the training and validation corpora are in the data folder `folder`, that is logged instead."""
    corpora = train_and_validation(data)
    known = [None] * len(corpora) if folder is None else hashes_of_missing(data, folder)
    for corpus, content in zip(corpora, known, strict=True):
        if content is None:
            files_of(corpus)
    if any(known):
        log.info("data: using the pairs in %s without the raw files", folder)
    for name, test in data.test.items():
        try:
            files_of(test)
        except DataError as error:
            if not any(known):
                raise
            log.warning("%s; `mtrain evaluate` needs it for data.test.%s", error, name)


def require_same_inputs(folder: Path, recorded: Inputs, inputs: Inputs) -> None:
    """Raise an error that names the first difference between the inputs of a shared data folder and those of
    a run. The seed, subword sampling and the paths of the corpora may differ."""
    old, new = recorded.settings["data"], inputs.settings["data"]
    for key in ("max_length", "bad_lines"):
        if old[key] != new[key]:
            raise UsageError(f"{folder}: was prepared with data.{key} {old[key]}, not {new[key]}; {CURE}")
    for key in ("train", "validation"):
        if _without_paths(old[key]) != _without_paths(new[key]):
            raise UsageError(f"{folder}: was prepared with another data.{key}; {CURE}")
    if recorded.settings["tokenizer"] != inputs.settings["tokenizer"]:
        raise UsageError(f"{folder}: was prepared with another tokenizer; {CURE}")
    for corpus, before, now in zip(_corpora_of(new), recorded.contents, inputs.contents, strict=True):
        if before != now:
            names = " and ".join(str(corpus[key]) for key in _PATHS if key in corpus) or "the toy corpus"
            raise DataError(f"{folder}: was prepared from other contents of {names}; {CURE}")


def has_same_settings(recorded: dict[str, Any], settings: dict[str, Any]) -> bool:
    """Whether the settings of `Inputs` agree, except for what may differ: see `require_same_inputs`."""
    old, new = recorded["data"], settings["data"]
    corpora = all(_without_paths(old[key]) == _without_paths(new[key]) for key in ("train", "validation"))
    lengths = all(old[key] == new[key] for key in ("max_length", "bad_lines"))
    return corpora and lengths and bool(recorded["tokenizer"] == settings["tokenizer"])


def _settings_of(data: DataConfig) -> dict[str, Any]:
    return data.model_dump(mode="json", exclude={"train": {"__all__": {"weight"}}})


def _corpora_of(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The settings of the training corpora, then of the validation corpora."""
    validation = settings["validation"]
    return [*settings["train"], *(validation if isinstance(validation, list) else ())]


def _without_paths(corpora: Any) -> Any:
    if not isinstance(corpora, list):  # a holdout
        return corpora
    return [{key: key in _PATHS or value for key, value in corpus.items()} for corpus in corpora]


def _is_missing(corpus: Corpus, shared: bool) -> bool:
    try:
        return not files_of(corpus) and isinstance(corpus, HubCorpus) and shared
    except DataError:
        return True


# ------------------------------------------------------------------------------------------------------ locks


@contextmanager
def locked_data_folder(folder: Path, shared: bool) -> Iterator[None]:
    """Create a data folder, lock it against other processes, and clean up after a crash. While another
    process holds the lock, wait. A thread may lock a folder again.

    Raises UsageError if a `shared` folder contains files that mtrain did not write and would overwrite;
    StorageError if the folder cannot be written.
    """
    with ExitStack() as stack:
        try:
            _require_own(folder, shared)
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(wait_for_lock(folder / LOCK))
            for file in [found for pattern in _LEFTOVERS for found in folder.glob(pattern)]:
                file.unlink(missing_ok=True)
            recover(folder / _TOKENIZER)
        except OSError as error:
            raise StorageError(f"{folder}: cannot write: {error.strerror}") from error
        yield


@contextmanager
def locked_unless_complete(folder: Path, shared: bool) -> Iterator[None]:
    """Lock a data folder as `locked_data_folder` does, unless it is complete already, or once another
    process has completed it: then it need not be writable."""
    with ExitStack() as stack:
        if not is_complete(folder):
            stack.enter_context(locked_data_folder(folder, shared))
            if is_complete(folder):
                stack.close()
        yield


def _require_own(folder: Path, shared: bool) -> None:
    """Raise UsageError if a shared folder contains files that mtrain did not write and would overwrite."""
    if not shared or not folder.exists() or (folder / LOCK).exists():
        return
    with suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        if json.loads((folder / _SUMMARY).read_bytes())["fingerprint"]:
            return
    names = {_SUMMARY, _VALIDATION, _TOKENIZER, SOURCES}
    found = (file.name for file in folder.iterdir())
    if foreign := sorted(name for name in found if name in names or _SHARD_NAME.fullmatch(name)):
        raise UsageError(
            f"{folder}: is not a data folder, and would be overwritten ({foreign[0]}); "
            "give another data.folder"
        )
