"""The manifest detects every kind of damage to a folder."""

import errno
import hashlib

import pytest

from mtrain.errors import ModelError
from mtrain.regular_files import MAX_JSON_BYTES
from mtrain.storage.manifest import read_json, verify_folder, write_manifest


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    (folder / "a").write_text("old")
    (folder / "sub/b").write_text("other")
    write_manifest(folder)
    return folder


def test_an_unchanged_folder_is_valid(folder):
    verify_folder(folder, ["a", "sub/b"])
    (folder / "unlisted").touch()
    verify_folder(folder, ["a"])


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "a").write_text("oll"),
        lambda folder: (folder / "a").write_text("older"),
        lambda folder: (folder / "a").unlink(),
        lambda folder: (folder / "manifest.json").unlink(),
        lambda folder: (folder / "manifest.json").write_text("{}"),
        lambda folder: (folder / "manifest.json").write_text("[" * 100_000),
        lambda folder: (folder / "manifest.json").write_text('{"a": {"size": 3}}'),
        lambda folder: (folder / "manifest.json").write_text('{"../a": {"size": 3, "sha256": ""}, "a": {}}'),
        lambda folder: [(folder / "a").rename(folder / "b"), (folder / "a").symlink_to("b")],
    ],
)
def test_damage_is_detected(folder, damage):
    damage(folder)
    with pytest.raises(ModelError):
        verify_folder(folder, ["a"])


def test_a_file_that_cannot_be_read_is_damaged(folder, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(hashlib, "file_digest", fail)
    with pytest.raises(ModelError, match="cannot be read: Input/output error"):
        verify_folder(folder, ["a"])


def test_a_required_file_must_be_listed(folder):
    with pytest.raises(ModelError, match=r"manifest\.json: does not list c, d"):
        verify_folder(folder, ["d", "a", "c"])


def test_json_files_of_unexpected_kinds_are_rejected(tmp_path):
    with pytest.raises(ValueError, match="regular file"):
        read_json(tmp_path)
    for contents in (" " * (MAX_JSON_BYTES + 1), "[" * 100_000, "{"):
        (tmp_path / "file").write_text(contents)
        with pytest.raises(ValueError, match=r"bytes|recursion|Expecting|nested"):
            read_json(tmp_path / "file")
