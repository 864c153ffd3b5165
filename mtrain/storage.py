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

from safetensors import SafetensorError

from mtrain.errors import ModelError, StorageError

MANIFEST = "manifest.json"


def write_atomically(file: Path, text: str) -> None:
    """Replace a small file; a reader sees the old text or the new one."""
    temporary = file.with_name(f".{file.name}.tmp")
    temporary.write_text(text, encoding="utf-8", newline="\n")
    _sync(temporary)
    temporary.replace(file)
    _sync(file.parent)


def write_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` write files into a temporary folder, then put it in the place of `folder`.

    Whatever fails, what was there before is still there. Raises StorageError if the disk is full or not
    writable, and what `fill` raises.
    """
    temporary = folder.with_name(f".{folder.name}.tmp")
    old = folder.with_name(f".{folder.name}.old")
    try:
        if old.exists() and not folder.exists():
            old.rename(folder)  # a crash came between the two renames below
        for leftover in (temporary, old):
            shutil.rmtree(leftover, ignore_errors=True)
        temporary.mkdir(parents=True)
        fill(temporary)
        paths = sorted(temporary.rglob("*"))
        manifest = {
            path.relative_to(temporary).as_posix(): {"size": path.stat().st_size, "sha256": sha256(path)}
            for path in paths
            if path.is_file()
        }
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")
        for path in [*paths, temporary / MANIFEST, temporary]:
            _sync(path)
        if folder.exists():
            folder.rename(old)
        temporary.rename(folder)
        _sync(folder.parent)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if old.exists() and not folder.exists():
            old.rename(folder)
        if isinstance(error, (OSError, SafetensorError)):
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise StorageError(f"{folder}: cannot write: {reason}") from error
        raise


def verify_folder(folder: Path, required: Sequence[str]) -> None:
    """Compare every file with the manifest, which must list those `required`.

    Raises ModelError naming the first that differs.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        entries = {name: (entry["size"], entry["sha256"]) for name, entry in manifest.items()}
    except FileNotFoundError:
        raise ModelError(f"{folder}: no {MANIFEST}; not a complete checkpoint or model folder") from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise ModelError(f"{folder / MANIFEST}: damaged") from None
    if absent := set(required) - entries.keys():
        raise ModelError(f"{folder / MANIFEST}: does not list {', '.join(sorted(absent))}")
    for name, (size, digest) in entries.items():
        file = folder / name
        if file.resolve() != folder.resolve() / name:
            raise ModelError(f"{folder / MANIFEST}: {name} is a link or lies outside the folder")
        if not file.is_file():
            raise ModelError(f"{file}: missing")
        if file.stat().st_size != size or sha256(file) != digest:
            raise ModelError(f"{file}: damaged (its contents do not match {MANIFEST})")


def sha256(file: Path) -> str:
    """Hexadecimal SHA-256 of a file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
