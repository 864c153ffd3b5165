"""The manifest of a folder: size and SHA-256 of each of its files, except for files about the folder."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mtrain.errors import ModelError, StorageError
from mtrain.regular_files import MAX_JSON_BYTES, UNLIMITED, open_file, read_file, require_plausible

MANIFEST = "manifest.json"
CARD, INFO = "README.md", "info.json"  # what a model folder says about the model
UNLISTED = {MANIFEST, CARD, INFO}  # at the top of a folder: these may change without making it invalid


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """A context manager for reading a file of a data folder: raises ModelError if it is missing, StorageError
    if it cannot be read for another reason."""
    try:
        yield
    except FileNotFoundError:
        raise ModelError(f"{file}: missing") from None
    except OSError as error:
        raise StorageError(f"{file}: cannot read: {error.strerror}") from error


def sha256(file: Path, most: int | None = None) -> str:
    """The SHA-256 of a file, in hexadecimal. Raises OSError if it cannot be read, or is not a regular file of
    at most `most` bytes, by default the maximum for its suffix."""
    with open_file(file, most) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sha256_of_json(value: object) -> str:
    """The SHA-256 of a value as JSON with sorted keys, in hexadecimal."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def read_json(file: Path, most: int | None = MAX_JSON_BYTES) -> Any:
    """Parse a JSON file of at most `most` bytes, see `require_plausible`. Raises ValueError if that fails."""
    try:
        return json.loads(read_file(file, most))
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from None


def write_manifest(folder: Path) -> None:
    """Write the manifest of a folder."""
    files = {file.relative_to(folder).as_posix(): file for file in folder.rglob("*") if file.is_file()}
    entries = {name: _entry(file) for name, file in files.items() if name not in UNLISTED}
    (folder / MANIFEST).write_bytes(_serialize(entries))


def verify_folder(folder: Path, required: Sequence[str]) -> list[Path]:
    """Compare a folder with its manifest, which must list the `required` files. Returns all listed files.

    Raises ModelError naming the first difference.
    """
    entries = _read_manifest(folder)
    if absent := set(required) - entries.keys():
        raise ModelError(f"{folder / MANIFEST}: does not list {', '.join(sorted(absent))}")
    for name, entry in entries.items():
        file = folder / name
        try:
            is_inside = file.resolve() == folder.resolve() / name and not Path(name).is_absolute()
            # From Python 3.13 on, a symlink loop resolves to itself.
            is_file_of_folder = is_inside and not file.is_symlink()
        except (OSError, RuntimeError, ValueError):  # a symlink loop or an invalid name
            is_file_of_folder = False
        if not is_file_of_folder:
            raise ModelError(f"{folder / MANIFEST}: {name} is a link or is outside the folder")
        if not file.exists():
            raise ModelError(f"{file}: missing")
        try:
            size = require_plausible(file).st_size
            is_same = isinstance(entry, dict) and entry.get("size") == size  # before all of it is read
            is_same = is_same and entry == {"size": size, "sha256": sha256(file)}
        except OSError as error:
            raise ModelError(f"{file}: cannot be read: {error.strerror}") from None
        if not is_same:
            raise ModelError(f"{file}: damaged (its contents do not match {MANIFEST})")
    return [folder / name for name in entries]


def _read_manifest(folder: Path) -> dict[str, Any]:
    if not (folder / MANIFEST).exists():
        raise ModelError(f"{folder}: no {MANIFEST}; not a complete checkpoint or model folder")
    try:
        contents = read_file(folder / MANIFEST, MAX_JSON_BYTES)
        entries = dict(json.loads(contents))
        if _serialize(entries) != contents:
            raise ValueError("damaged, although it still parses to the same entries")
    except OSError as error:
        raise ModelError(f"{folder / MANIFEST}: cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, RecursionError):
        raise ModelError(f"{folder / MANIFEST}: damaged") from None
    return entries


def _serialize(entries: dict[str, Any]) -> bytes:
    return (json.dumps(entries, indent=1, sort_keys=True) + "\n").encode()


def _entry(file: Path) -> dict[str, int | str]:
    return {"size": file.stat().st_size, "sha256": sha256(file, UNLIMITED)}
