"""Folders and files are replaced whole or not at all."""

import errno
import os
import stat

import pytest

from mtrain.errors import StorageError, UsageError
from mtrain.storage.atomic import require_new_folder, write_atomically, write_folder
from mtrain.storage.manifest import verify_folder


def fill(text):
    return lambda folder: (folder / "a").write_text(text)


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path):
    folder = tmp_path / "folder"
    write_folder(folder, fill("old"))

    def fail(new):
        (new / "a").write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(StorageError, match="No space left on device"):
        write_folder(folder, fail)
    verify_folder(folder, ["a"])
    assert (folder / "a").read_text() == "old" and [path.name for path in tmp_path.iterdir()] == ["folder"]
    write_folder(folder, fill("new"))
    assert (folder / "a").read_text() == "new"


def test_a_crash_between_the_two_renames_loses_nothing(tmp_path):
    folder = tmp_path / "folder"
    write_folder(folder, fill("old"))
    folder.rename(tmp_path / ".folder.old")
    with pytest.raises(KeyError):
        write_folder(folder, lambda _: {}["a bug"])
    assert (folder / "a").read_text() == "old"


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_file_systems_that_cannot_fsync_a_directory_are_supported(tmp_path, monkeypatch, number):
    real = os.fsync

    def fsync(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    write_folder(tmp_path / "folder", fill("new"))
    write_atomically(tmp_path / "file", "text")
    assert (tmp_path / "folder/a").read_text() == "new" and (tmp_path / "file").read_text() == "text"


@pytest.mark.parametrize("is_folder", [True, False])
def test_other_errors_of_fsync_are_storage_errors(tmp_path, monkeypatch, is_folder):
    def fsync(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode) == is_folder:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(StorageError, match="folder: cannot write: Input/output error"):
        write_folder(tmp_path / "folder", fill("new"))
    with pytest.raises(StorageError, match="file: cannot write: Input/output error"):
        write_atomically(tmp_path / "file", "text")


def test_only_a_new_or_empty_folder_is_accepted_as_output(tmp_path, monkeypatch):
    require_new_folder(tmp_path / "new")
    (tmp_path / "empty").mkdir()
    require_new_folder(tmp_path / "empty")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    (tmp_path / "link").symlink_to("empty")
    for name in ("used", "used/file", "link"):
        with pytest.raises(UsageError, match="already exists and is not overwritten"):
            require_new_folder(tmp_path / name)
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(UsageError, match="is the working directory"):
        require_new_folder(tmp_path / "empty")
