"""Generated text files are distinguished from edited ones, whatever the edit."""

import os

import pytest

from mtrain.regular_files import MAX_JSON_BYTES
from mtrain.storage.generated import is_unedited, marked

TEXT = "# Größe\n\n- one\n- two\n"


@pytest.fixture
def file(tmp_path):
    file = tmp_path / "README.md"
    file.write_bytes(marked(TEXT).encode())
    return file


def test_a_generated_file_begins_with_its_text_and_is_recognized(file):
    assert is_unedited(file) and file.read_text(encoding="utf-8").startswith(TEXT)
    file.write_bytes(marked("").encode())
    assert is_unedited(file)


@pytest.mark.parametrize(
    "edit",
    [
        lambda text: text.replace(b"one", b"One"),
        lambda text: text.replace(b"\n", b"\r\n"),
        lambda text: text + b"\n",
        lambda text: text[:-1],
        lambda text: b"\xef\xbb\xbf" + text,
        lambda text: text.replace(b"Generated", b"Made"),
        lambda text: text.replace(b"Gr\xc3\xb6", b"Gr\xf6"),
        lambda text: text[: text.index(b"<!--")],
        lambda text: text + text,
        lambda text: text[::-1],
        lambda text: b"",
    ],
)
def test_an_edited_file_is_recognized(file, edit):
    file.write_bytes(edit(file.read_bytes()))
    assert not is_unedited(file)


def test_what_is_not_a_small_regular_file_counts_as_edited(file, tmp_path):
    (tmp_path / "link").symlink_to(file)
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_text(marked("x" * MAX_JSON_BYTES))
    for name in ("link", "dangling", "folder", "pipe", "large", "missing"):
        assert not is_unedited(tmp_path / name)
