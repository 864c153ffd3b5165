"""Files and folders written so that a crash leaves the old or the new, never half of either.

A folder is written under a temporary name beside its place, every file flushed to disk, the manifest (size
and SHA-256 of each file) last, then renamed. Reading it again verifies the manifest.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from mtrain.errors import ModelError, StorageError, UsageError

MANIFEST = "manifest.json"


def write_text(file: Path, text: str) -> None:
    """Write UTF-8 with the line ends that `text` has."""
    file.write_text(text, encoding="utf-8", newline="\n")


def write_atomically(file: Path, text: str) -> None:
    """Replace a small file; a reader sees the old text or the new one. Raises StorageError."""
    temporary = file.with_name(f".{file.name}.tmp")
    try:
        write_text(temporary, text)
        _sync(temporary)
        temporary.replace(file)
        _sync(file.parent)
    except OSError as error:
        raise StorageError(f"{file}: cannot write: {error.strerror}") from error


def require_new_folder(folder: Path) -> None:
    """Raise UsageError if there is something in the place of a folder that is to be made."""
    if folder.is_symlink() or (folder.exists() and not (folder.is_dir() and not any(folder.iterdir()))):
        raise UsageError(f"{folder}: is there already, and is not overwritten; give another")


def write_folder(folder: Path, fill: Callable[[Path], Any]) -> None:
    """Let `fill` write files into a temporary folder, then put it in the place of `folder`.

    Whatever fails, what was there before is still there. Raises StorageError if the disk is full or not
    writable, and what `fill` raises.
    """
    temporary, old = (folder.with_name(f".{folder.name}.{end}") for end in ("tmp", "old"))

    def tidy() -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        if old.exists() and not folder.exists():
            old.rename(folder)  # a crash or a failure came between the two renames below
        shutil.rmtree(old, ignore_errors=True)

    try:
        tidy()
        temporary.mkdir(parents=True)
        fill(temporary)
        paths = sorted(temporary.rglob("*"))
        manifest = {file.relative_to(temporary).as_posix(): _entry(file) for file in paths if file.is_file()}
        write_text(temporary / MANIFEST, json.dumps(manifest, indent=1, sort_keys=True) + "\n")
        for path in [*paths, temporary / MANIFEST, temporary]:
            _sync(path)
        if folder.exists():
            folder.rename(old)
        temporary.rename(folder)
        _sync(folder.parent)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise StorageError(f"{folder}: cannot write: {reason}") from error
    finally:
        tidy()


def verify_folder(folder: Path, required: Sequence[str]) -> None:
    """Compare every file with the manifest, which must list those `required`.

    Raises ModelError naming the first that differs.
    """
    try:
        entries = dict(json.loads((folder / MANIFEST).read_bytes()))
    except FileNotFoundError:
        raise ModelError(f"{folder}: no {MANIFEST}; not a complete checkpoint or model folder") from None
    except (OSError, ValueError, TypeError, RecursionError):
        raise ModelError(f"{folder / MANIFEST}: damaged") from None
    if absent := set(required) - entries.keys():
        raise ModelError(f"{folder / MANIFEST}: does not list {', '.join(sorted(absent))}")
    for name, entry in entries.items():
        file = folder / name
        if file.resolve() != folder.resolve() / name:
            raise ModelError(f"{folder / MANIFEST}: {name} is a link or lies outside the folder")
        if not file.is_file():
            raise ModelError(f"{file}: missing")
        if _entry(file) != entry:
            raise ModelError(f"{file}: damaged (its contents do not match {MANIFEST})")


def sha256(file: Path) -> str:
    """Hexadecimal SHA-256 of a file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _entry(file: Path) -> dict[str, int | str]:
    return {"size": file.stat().st_size, "sha256": sha256(file)}


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
