"""Files and folders written so that a crash leaves the old or the new, never half of either.

A folder is written under a temporary name beside its place, every file flushed to disk, the manifest (size
and SHA-256 of each file) last, then renamed. Reading it again verifies the manifest.
"""

import fcntl
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from safetensors import SafetensorError

from mtrain.errors import ModelError, StorageError, UsageError

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
LARGEST_JSON = 4 * 2**20  # bytes, of what a folder says of itself


def write_text(file: Path, text: str) -> None:
    """Write UTF-8 with the line ends that `text` has."""
    file.write_text(text, encoding="utf-8", newline="\n")


def read_json(file: Path) -> Any:
    """What a small JSON file says. Raises OSError or ValueError if it is no such file."""
    if not file.is_file() or file.stat().st_size > LARGEST_JSON:  # a pipe would hang
        raise ValueError("not a small file")
    try:
        return json.loads(file.read_bytes())
    except RecursionError:
        raise ValueError("nested too deeply") from None


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


def lock(stream: IO[Any]) -> bool:
    """Lock an open file until it is closed, however that comes; False if another process has it. File systems
    without locks get a warning."""
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        log.warning("%s: cannot be locked; see to it that only one process writes there", stream.name)
    return True


def require_new_folder(folder: Path) -> None:
    """Raise UsageError if there is something in the place of a folder that is to be made, or it is the
    working folder, which cannot be put in its place."""
    if folder.resolve() == Path.cwd():
        raise UsageError(f"{folder}: is the working folder; give another")
    if folder.is_symlink() or (folder.exists() and not (folder.is_dir() and not any(folder.iterdir()))):
        raise UsageError(f"{folder}: is there already, and is not overwritten; give another")


def write_folder(folder: Path, fill: Callable[[Path], Any]) -> None:
    """Let `fill` write files into a temporary folder, then put it in the place of `folder`.

    Whatever fails, what was there before is still there. Raises StorageError if the disk is full or not
    writable, and what `fill` raises.
    """
    temporary, old = _beside(folder)
    try:
        recover(folder)
        temporary.mkdir(parents=True)
        fill(temporary)
        write_manifest(temporary)
        for path in [*temporary.rglob("*"), temporary]:
            _sync(path)
        if folder.exists():
            folder.rename(old)
        temporary.rename(folder)
        _sync(folder.parent)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise StorageError(f"{folder}: cannot write: {reason}") from error
    finally:
        recover(folder)


def recover(folder: Path) -> None:
    """Remove what a crash or a failure left of `write_folder`, or put what was there before back."""
    temporary, old = _beside(folder)
    shutil.rmtree(temporary, ignore_errors=True)
    if old.exists() and not folder.exists():  # it came between the two renames
        with suppress(OSError):
            old.rename(folder)
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)


def _beside(folder: Path) -> tuple[Path, Path]:
    """Where a folder's new contents are written, and its old ones lie while the new take their place."""
    return folder.with_name(f".{folder.name}.tmp"), folder.with_name(f".{folder.name}.old")


def write_manifest(folder: Path) -> None:
    """List the size and the SHA-256 of every file in a folder."""
    files = [file for file in folder.rglob("*") if file.is_file() and file != folder / MANIFEST]
    write_text(
        folder / MANIFEST, _text({file.relative_to(folder).as_posix(): _entry(file) for file in files})
    )


def _text(entries: dict[str, Any]) -> str:
    return json.dumps(entries, indent=1, sort_keys=True) + "\n"


def verify_folder(folder: Path, required: Sequence[str]) -> None:
    """Compare every file with the manifest, which must list those `required`.

    Raises ModelError naming the first that differs.
    """
    if not (folder / MANIFEST).exists():
        raise ModelError(f"{folder}: no {MANIFEST}; not a complete checkpoint or model folder")
    try:
        entries = dict(read_json(folder / MANIFEST))
        if _text(entries).encode() != (folder / MANIFEST).read_bytes():
            raise ValueError("a byte is another, even if it says the same")
    except (OSError, ValueError, TypeError):
        raise ModelError(f"{folder / MANIFEST}: damaged") from None
    if absent := set(required) - entries.keys():
        raise ModelError(f"{folder / MANIFEST}: does not list {', '.join(sorted(absent))}")
    for name, entry in entries.items():
        file = folder / name
        try:
            inside = file.resolve() == folder.resolve() / name and not Path(name).is_absolute()
        except (OSError, RuntimeError, ValueError):  # a link to itself, a name that cannot be
            inside = False
        if not inside:
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
