"""The summary of a data folder: `summary.json`.

It records the inputs that the folder was made from and, once the folder is complete, the size and a hash of
each shard.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from mtrain.data.store.shards import LAYOUT
from mtrain.errors import ModelError, StorageError, UsageError
from mtrain.regular_files import read_file
from mtrain.storage.atomic import write_atomically
from mtrain.storage.manifest import sha256_of_json

SUMMARY = "summary.json"
CURE = "restore it, or give another data.folder"
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


def read_summary(folder: Path) -> Summary:
    """The summary of a data folder; empty if it has none. If another version of mtrain has written it, it has
    only its layout. Raises ModelError if it is damaged; StorageError if it cannot be read."""
    file = folder / SUMMARY
    if not file.exists():  # it is removed if no pair is left
        return {}
    try:
        summary: Summary = json.loads(read_file(file))
        content = {key: value for key, value in summary.items() if key != "sha256"}
        is_usable = is_current(summary)
        if (is_usable or "sha256" in summary) and summary["sha256"] != sha256_of_json(content):
            raise ValueError("it does not match its SHA-256")
    except OSError as error:
        raise StorageError(f"{file}: cannot read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ModelError(f"{file}: damaged ({error})") from None
    if is_usable:
        return summary
    return {"layout": summary.get("layout")} if "fingerprint" in summary else {}  # another program's


def find_summary(folder: Path, shared: bool) -> tuple[Summary, str | None]:
    """The summary of a data folder; empty if it has none that can be used. Also the reason why a summary
    cannot be used. In a shared folder, that is an error, because other runs may use the folder.

    Raises ModelError if the summary of a shared folder is damaged; UsageError if another version of mtrain
    has written it.
    """
    try:
        summary = read_summary(folder)
    except ModelError as error:
        if shared:
            raise ModelError(f"{error}; {CURE}") from None
        return {}, str(error)
    if not summary or is_current(summary):
        return summary, None
    if shared:
        raise UsageError(f"{folder}: was prepared by another version of mtrain; give another data.folder")
    return {}, f"{folder}: was written by another version of mtrain"


def is_current(summary: Summary) -> bool:
    """Whether this version of mtrain can use what a summary describes."""
    return summary.get("layout") == LAYOUT and "inputs" in summary


def inputs_of(summary: Summary) -> Inputs | None:
    """The inputs of a data folder; None if they are not known."""
    return Inputs(**summary["inputs"]) if is_current(summary) else None


def write_summary(folder: Path, summary: Summary) -> Summary:
    """Write a summary, and return it with its hash. Raises StorageError."""
    summary = {key: value for key, value in summary.items() if key != "sha256"}
    summary["sha256"] = sha256_of_json(summary)
    write_atomically(folder / SUMMARY, json.dumps(summary, indent=1) + "\n")
    return summary


def remove_summary(folder: Path) -> None:
    """Remove the summary, so that the folder counts as empty."""
    (folder / SUMMARY).unlink()
