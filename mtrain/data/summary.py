"""The summary of a data folder: `summary.json`.

It records the inputs that the folder was made from and, once the folder is complete, the size and a hash of
each shard.
"""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from mtrain.data.shards import LAYOUT
from mtrain.errors import ModelError
from mtrain.storage.atomic import write_atomically
from mtrain.storage.manifest import sha256, sha256_of_json

SUMMARY, VALIDATION = "summary.json", "validation.jsonl"
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
    """The summary of a data folder; empty if it has none. Raises ModelError if the summary or the validation
    pairs are damaged. Only the layout of a summary that `is_current` rejects is known."""
    if not (folder / SUMMARY).exists():  # it is removed if no pair is left
        return {}
    try:
        summary: Summary = json.loads((folder / SUMMARY).read_bytes())
        if not is_current(summary):
            return {"layout": summary.get("layout")}
        if sha256(folder / VALIDATION) != summary["validation_sha256"]:
            raise ValueError(f"{VALIDATION} does not match its SHA-256")
        content = {key: value for key, value in summary.items() if key != "sha256"}
        if summary["sha256"] != sha256_of_json(content):
            raise ValueError(f"{SUMMARY} does not match its SHA-256")
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
    write_atomically(folder / SUMMARY, json.dumps(summary, indent=1) + "\n")
    return summary


def remove_summary(folder: Path) -> None:
    """Remove the summary, so that the folder counts as empty."""
    (folder / SUMMARY).unlink()
