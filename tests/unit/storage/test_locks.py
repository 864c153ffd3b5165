"""Locks exclude other holders, and a file system without locks causes a warning only."""

import errno
import fcntl
import os
import subprocess
import sys

import pytest

from mtrain.storage.locks import only_writer, try_lock


def test_a_lock_has_one_holder(tmp_path):
    file = tmp_path / "lock"
    lock = try_lock(file)
    assert lock is not None and try_lock(file) is None
    lock.release()
    again = try_lock(file)
    assert again is not None
    again.release()


def test_another_process_is_excluded_until_the_holder_dies(tmp_path):
    code = f"""if True:
        from pathlib import Path
        from mtrain.storage.locks import only_writer, try_lock
        lock = try_lock(Path({str(tmp_path / "lock")!r}))
        print("held", flush=True)
        input()
    """
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
    assert try_lock(tmp_path / "lock") is None
    holder.kill()
    holder.wait()
    lock = try_lock(tmp_path / "lock")
    assert lock is not None
    lock.release()


def test_a_lock_file_that_its_holder_removes_is_not_locked_by_who_has_opened_it_before(tmp_path, monkeypatch):
    """Otherwise, a third process could lock another file of that name at the same time."""
    flock, file, third = fcntl.flock, tmp_path / ".out.lock", []

    def late_flock(descriptor, operation):
        if not third:  # between opening and locking the file, its holder ends and a third process begins
            third.append(None)
            holder.__exit__(None, None, None)
            third.append(try_lock(file))
        flock(descriptor, operation)

    holder = only_writer(tmp_path / "out", "file", "another output")
    holder.__enter__()
    monkeypatch.setattr(fcntl, "flock", late_flock)
    assert try_lock(file) is None
    assert third[1] is not None
    third[1].release()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS])
def test_a_file_system_without_locks_causes_a_warning(tmp_path, monkeypatch, caplog, number):
    def no_locks(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    lock = try_lock(tmp_path / "lock")
    assert lock is not None and "cannot be locked; make sure that only one process" in caplog.text
    lock.release()
