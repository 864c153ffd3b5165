"""Folders and files are replaced whole or not at all."""

import errno
import os
import stat
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from mtrain.errors import StorageError, UsageError
from mtrain.storage.atomic import recover, replacing, require_new_folder, write_atomically, write_folder
from mtrain.storage.generated import marked
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


def test_a_folder_may_be_writable_without_being_readable(tmp_path, monkeypatch):
    """Root can read every folder, so the refusal is simulated."""
    opened, access = os.open, os.access

    def refuse(path, *arguments, **keywords):
        if path == tmp_path:
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(path, *arguments, **keywords)

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path and access(path, mode))
    write_atomically(tmp_path / "file", "text")
    assert (tmp_path / "file").read_text() == "text"


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_the_umask_decides_who_can_read_what_is_written(tmp_path, umask):
    """Files made by safetensors would be readable only by their owner."""
    tensors = {"a": np.zeros(3)}
    before = os.umask(umask)
    try:
        write_folder(tmp_path / "folder", lambda folder: save_file(tensors, folder / "model.safetensors"))
        with replacing(tmp_path / "file") as temporary:
            save_file(tensors, temporary)
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
    file = 0o666 & ~umask
    files = {"file": file, "model.safetensors": file, "manifest.json": file}
    assert modes == {"folder": 0o777 & ~umask, **files}


def test_a_replaced_file_keeps_its_permissions(tmp_path):
    file = tmp_path / "file"
    file.write_text("old")
    file.chmod(0o640)
    write_atomically(file, "new")
    assert file.read_text() == "new" and stat.S_IMODE(file.stat().st_mode) == 0o640


@pytest.mark.parametrize("target", ["other/file", "other/missing"])
def test_links_are_followed(tmp_path, target):
    """Here, a relative one to another link."""
    write_folder(tmp_path / "other", fill("old"))
    (tmp_path / "other/file").touch()
    (tmp_path / "middle").symlink_to(target)
    (tmp_path / "link").symlink_to("middle")
    (tmp_path / "folder").symlink_to("other")
    write_atomically(tmp_path / "link", "new")
    write_folder(tmp_path / "folder", fill("new"))
    assert (tmp_path / target).read_text() == "new" == (tmp_path / "other/a").read_text()
    links = {path.name for path in tmp_path.iterdir() if path.is_symlink()}
    assert links == {"middle", "link", "folder"} and len(list(tmp_path.iterdir())) == 4


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
    for name in ("used/file/new", "used/file/deep/new"):  # before the work whose result it is for
        with pytest.raises(StorageError, match=f"{name}: cannot write: Not a directory"):
            require_new_folder(tmp_path / name)
    require_new_folder(tmp_path / "deep/new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "link", "used"]
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(UsageError, match="is the working directory"):
        require_new_folder(tmp_path / "empty")


def test_a_mount_point_is_refused_as_output(tmp_path, monkeypatch):
    monkeypatch.setattr(os.path, "ismount", lambda path: path.name == "out")
    (tmp_path / "out").mkdir()
    with pytest.raises(UsageError, match="out: is a mount point; give a folder in it"):
        require_new_folder(tmp_path / "out")


def test_an_input_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(StorageError, match=r"missing\.spm: cannot read: No such file"):
        write_folder(tmp_path / "out", lambda folder: (tmp_path / "missing.spm").read_bytes())
    with pytest.raises(StorageError, match="out: cannot write: No such file"):
        write_folder(tmp_path / "out", lambda folder: (folder / "a/b").write_text(""))


def fill_with_card(text):
    def write(folder):
        (folder / "a").write_text(text)
        (folder / "README.md").write_text(marked(text))

    return write


def as_file(path):
    path.write_bytes(b"mine \xff\r\n")


def as_folder(path):
    path.mkdir()
    (path / "notes").write_text("mine")


@pytest.mark.parametrize(
    "place",
    [
        as_file,
        as_folder,
        lambda path: path.symlink_to("nowhere"),
        lambda path: os.mkfifo(path),
        lambda path: [as_file(path), path.chmod(0)],
    ],
)
def test_a_readme_that_somebody_wrote_is_kept_when_its_folder_is_replaced(tmp_path, place):
    folder = tmp_path / "folder"
    write_folder(folder, fill_with_card("old"))
    write_folder(folder, fill_with_card("new"))
    assert (folder / "README.md").read_text() == marked("new")
    (folder / "README.md").unlink()
    place(folder / "README.md")
    before = os.lstat(folder / "README.md")
    for text in ("newer", "newest"):
        write_folder(folder, fill_with_card(text))
        assert (folder / "a").read_text() == text and os.lstat(folder / "README.md").st_ino == before.st_ino
        verify_folder(folder, ["a"])
    assert os.lstat(folder / "README.md").st_mode == before.st_mode
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    write_folder(folder, fill("without"))  # what is written has no README.md
    assert os.lstat(folder / "README.md").st_ino == before.st_ino


def test_a_crash_before_an_edited_readme_is_moved_loses_nothing(tmp_path):
    folder, old = tmp_path / "folder", tmp_path / ".folder.old"
    for edited_again in range(3):  # how often
        write_folder(folder, fill_with_card("new"))
        old.mkdir()
        (old / "README.md").write_text("of the old contents")
        if edited_again:
            (folder / "README.md").write_text("of the new ones")
        recover(folder)
        texts = {path.name: path.read_text() for path in folder.glob("README*")}
        if edited_again:
            assert texts.pop("README.md") == "of the new ones"
            names = ["README.md.old", "README.md.old-2"][:edited_again]
            assert texts == dict.fromkeys(names, "of the old contents")
        else:
            assert texts == {"README.md": "of the old contents"}
            (folder / "README.md").unlink()
        assert not old.exists()


@pytest.mark.parametrize("replaced_again", [False, True])
def test_a_readme_that_cannot_be_moved_stays_where_it_is(tmp_path, monkeypatch, caplog, replaced_again):
    folder = tmp_path / "folder"
    write_folder(folder, fill_with_card("old"))
    (folder / "README.md").write_text("mine")
    rename = Path.rename

    def refuse(path, target):
        if path.name == "README.md":
            raise OSError(errno.EPERM, "Operation not permitted")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    write_folder(folder, fill_with_card("new"))
    assert (folder / "a").read_text() == "new"
    assert (tmp_path / ".folder.old/README.md").read_text() == "mine"
    if replaced_again:
        write_folder(folder, fill_with_card("newer"))
        assert (folder / "a").read_text() == "newer"
        assert (tmp_path / ".folder.old-2/README.md").read_text() == "mine"
        assert "could not be moved; they are in" in caplog.text
        return
    monkeypatch.undo()
    recover(folder)
    assert (folder / "README.md").read_text() == "mine"


def test_files_of_others_are_kept_when_a_folder_is_replaced(tmp_path):
    folder = tmp_path / "folder"

    def fill(*names):
        def write(new):
            for name in names:
                (new / name).parent.mkdir(exist_ok=True)
                (new / name).write_text(name)

        return write

    write_folder(folder, fill("a", "sub/b"))
    (folder / "images").mkdir()
    for name in ("LICENSE", "images/chart.svg", ".gitattributes", "c", ".README.md.tmp"):
        (folder / name).write_text("mine")
    write_folder(folder, fill("b", "c"))
    kept = {
        path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()
    }
    del kept["manifest.json"]
    mine = dict.fromkeys(["LICENSE", "images/chart.svg", ".gitattributes"], "mine")
    assert kept == {"b": "b", "c": "c", **mine}
    verify_folder(folder, ["b", "c"])
    (folder / "manifest.json").write_text("[1]")  # then it is not known whose the files are
    write_folder(folder, fill("d"))
    names = {"LICENSE", "images", ".gitattributes", "b", "c", "d", "manifest.json"}
    assert {path.name for path in folder.iterdir()} == names
    verify_folder(folder, ["d"])
