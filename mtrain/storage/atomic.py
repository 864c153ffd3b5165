"""Atomic replacement of files and folders: after a crash, either the old or the new version is in place.

A folder is written under a temporary name next to its destination. Each file is flushed to disk, the manifest
is written last, then the folder is renamed. What somebody else has put into a replaced folder is kept. If
the destination is a symbolic link, its target is replaced and the link is kept.
"""

import errno
import logging
import os
import shutil
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from secrets import token_hex
from tempfile import TemporaryDirectory
from typing import Any

from safetensors import SafetensorError

from mtrain.errors import StorageError, UsageError, cannot_write
from mtrain.storage.generated import is_unedited
from mtrain.storage.locks import only_writer
from mtrain.storage.manifest import CARD, MANIFEST, UNLISTED, read_json, write_manifest

log = logging.getLogger(__name__)

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}  # errors of writing, also of temporary files elsewhere
_NO_FOLDER_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EBADF}  # file systems that cannot fsync a directory


def write_text(file: Path, text: str) -> None:
    """Write UTF-8 text without translating line endings."""
    file.write_text(text, encoding="utf-8", newline="\n")


def write_atomically(file: Path, text: str) -> None:
    """Replace the contents of a small text file atomically. Raises StorageError."""
    with replacing(file) as temporary:
        write_text(temporary, text)


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Yield the name of a temporary file. What the block writes to it replaces `file` atomically, and gets
    the permissions of `file` if that exists; if the block fails, `file` is kept. Raises StorageError if
    writing fails, and propagates the other errors of the block."""
    place = _follow_link(file)
    temporary = place.with_name(f".{place.name}.{token_hex(4)}.tmp")
    try:
        temporary.touch(exist_ok=False)
        mode = (place if place.exists() else temporary).stat().st_mode
        yield temporary
        set_mode(temporary, mode)
        replace_durably(temporary, place)
    except BaseException as error:
        with suppress(OSError):  # it would occupy a disk that may be full
            temporary.unlink()
        # A broken pipe is not an error of `file`: the block writes to another output as well.
        if not isinstance(error, OSError | SafetensorError) or isinstance(error, BrokenPipeError):
            raise
        raise cannot_write(file, error) from error


def _follow_link(path: Path) -> Path:
    """The target of a symbolic link. Other paths are returned unchanged."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def replace_durably(temporary: Path, file: Path) -> None:
    """Flush a complete temporary file to disk and rename it to `file`."""
    _sync(temporary)
    temporary.replace(file)
    _sync(file.parent)


def require_new_folder(folder: Path) -> None:
    """Raise UsageError if an output folder is the working directory, a mount point or not empty, and
    StorageError if it cannot be created, which is tried with another name."""
    if folder.resolve() == Path.cwd():
        raise UsageError(f"{folder}: is the working directory; give another folder")
    if os.path.ismount(folder):  # which cannot be replaced
        raise UsageError(f"{folder}: is a mount point; give a folder in it")
    if folder.is_symlink() or (folder.exists() and not (folder.is_dir() and not any(folder.iterdir()))):
        raise UsageError(f"{folder}: already exists and is not overwritten; give another folder")
    parent = next(parent for parent in folder.absolute().parents if os.path.lexists(parent))
    try:
        with TemporaryDirectory(prefix=".", dir=parent):
            pass
    except OSError as error:
        raise cannot_write(folder, error) from error


def write_folder(folder: Path, fill: Callable[[Path], Any]) -> None:
    """Call `fill` to write files into a temporary folder, then move it to `folder`. No other process may
    write `folder` at the same time.

    Files and folders at the top of `folder` that its manifest does not list are moved to the new contents;
    a README.md only if somebody has edited it. If anything fails, the previous contents of `folder` are kept.
    Raises StorageError if the disk is full or not writable, or if `fill` cannot read a file, and propagates
    the other exceptions of `fill`.
    """
    folder = _follow_link(folder)
    temporary, old = _siblings(folder)
    try:
        recover(folder)
        temporary.mkdir(parents=True)
        fill(temporary)
        write_manifest(temporary)
        mode = temporary.stat().st_mode & 0o666  # what the umask gives to new files
        for path in [*temporary.rglob("*"), temporary]:
            if path.is_file():
                set_mode(path, mode)
            _sync(path)
        if os.path.lexists(old):  # something in it cannot be moved or removed
            left = old.rename(free_name(old))
            message = "%s: some files of an earlier version could not be moved; they are in %s"
            log.warning(message, folder, left)
        if folder.exists():
            folder.rename(old)
        temporary.rename(folder)
        _sync(folder.parent)
    except OSError as error:
        name = error.filename if error.errno not in _FULL else None
        if isinstance(name, str) and not _belongs_to(Path(name), folder):
            raise StorageError(f"{name}: cannot read: {error.strerror}") from error
        raise cannot_write(folder, error) from error
    except SafetensorError as error:
        raise cannot_write(folder, error) from error
    finally:
        with suppress(OSError):  # of a file system that is not available; the next start cleans up
            recover(folder)


def _belongs_to(path: Path, folder: Path) -> bool:
    """Whether a path is of an output `folder`: in it or in its temporary names, or one of their parents."""
    path, folder = path.absolute(), folder.absolute()
    places = (folder, *_siblings(folder))
    return any(path.is_relative_to(place) or place.is_relative_to(path) for place in places)


def write_new_folder(folder: Path, fill: Callable[[Path], Any]) -> None:
    """As `write_folder`, for an output folder that does not exist or is empty. If two processes write it, one
    of them fails. Raises UsageError as `require_new_folder` does, and if another process is writing it."""
    with suppress(OSError):  # taking the lock fails, too
        folder.parent.mkdir(parents=True, exist_ok=True)
    with only_writer(folder, "folder", "another folder"):
        require_new_folder(folder)  # another process may have written it since the first check
        write_folder(folder, fill)


def copy_files(source: Path, folder: Path, ignored: Container[str] = ()) -> None:
    """Copy the files of a folder into another one, except for `ignored` names. Raises OSError."""
    # `shutil.copytree` would raise a list of errors, without an error code.
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file() and file.name not in ignored:
            shutil.copyfile(file, folder / file.name)


def recover(folder: Path) -> None:
    """Clean up after an interrupted `write_folder`: restore the old contents, or remove temporary files and
    the old contents, except for what `write_folder` keeps."""
    folder = _follow_link(folder)
    temporary, old = _siblings(folder)
    shutil.rmtree(temporary, ignore_errors=True)
    if old.exists() and not folder.exists():  # interrupted between the two renames
        with suppress(OSError):
            old.rename(folder)
    if folder.exists() and old.exists():
        with suppress(OSError):  # nothing is removed
            _keep_card(old / CARD, folder / CARD)
            _keep_others(old, folder)
            _sync(folder)
            shutil.rmtree(old, ignore_errors=True)


def _keep_card(old: Path, new: Path) -> None:
    """Move an edited card to its place in the new contents. It is moved, not copied, because it may be a link
    or unreadable."""
    if is_unedited(old) or not os.path.lexists(old):
        return
    if is_unedited(new):
        new.unlink()
    elif os.path.lexists(new):  # edited before an interrupted `write_folder` resumed
        new = free_name(new.with_name(f"{new.name}.old"))
    old.rename(new)


def _keep_others(old: Path, new: Path) -> None:
    """Move what the manifest of the old contents does not list to the new contents, unless these have it."""
    listed: set[str] = set()  # if the manifest is damaged, everything that the new contents lack is kept
    with suppress(OSError, ValueError, TypeError, AttributeError):
        listed = {name.partition("/")[0] for name in dict(read_json(old / MANIFEST))}
    for path in sorted(old.iterdir()):
        is_temporary = path.name.startswith(".") and path.name.endswith(".tmp")
        if path.name in listed | UNLISTED or is_temporary or os.path.lexists(new / path.name):
            continue
        path.rename(new / path.name)


def free_name(path: Path) -> Path:
    """The path itself if nothing is there, otherwise with a number."""
    names = (path.with_name(f"{path.name}-{number}") for number in count(2))
    return path if not os.path.lexists(path) else next(name for name in names if not os.path.lexists(name))


def _siblings(folder: Path) -> tuple[Path, Path]:
    """The temporary names of the new contents of a folder and, during the swap, of the old contents."""
    return folder.with_name(f".{folder.name}.tmp"), folder.with_name(f".{folder.name}.old")


def set_mode(file: Path, mode: int) -> None:
    """Give a file the permissions `mode`, because safetensors makes files that only their owner can read."""
    if file.stat().st_mode & 0o777 != mode & 0o777:  # not all file systems can change them
        file.chmod(mode)


def _sync(path: Path) -> None:
    """Flush a file or, where the platform supports it, a directory to disk."""
    is_folder = path.is_dir()
    # Windows cannot open directories, nor can anybody without the permission to list them.
    if is_folder and (os.name == "nt" or not os.access(path, os.R_OK)):
        return
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not (is_folder and error.errno in _NO_FOLDER_SYNC):
            raise
    finally:
        os.close(descriptor)
