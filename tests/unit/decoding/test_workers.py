"""Threads and worker processes: they change no translation, and nothing remains of a closed translator."""

import gc
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from mtrain import Translator
from mtrain.errors import UsageError
from tests.support.training import PAIRS
from tests.support.translation import words_of

LINES = words_of(120)
SOURCES, TARGETS = ([pair[side] for pair in PAIRS] for side in (0, 1))
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, forks, or needs glibc")


def children() -> set[int]:
    """Child processes of this process, zombies included."""
    found = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    return {int(pid) for pid in found.split()}


@contextmanager
def with_process(run_dir: Path) -> Iterator[Translator]:
    """A translator with a running worker process. To start one takes seconds: it imports PyTorch."""
    with Translator.load(run_dir, "cpu", ["decoding.batch_tokens=1024"], workers=2) as translator:
        assert translator.workers.start() == 1
        yield translator


def test_threads_may_share_a_translator(translator: Translator) -> None:
    lines = words_of(40, seed=2)
    expected = translator.translate(lines)
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: translator.translate(lines), range(8)):
            assert found == expected


def test_a_worker_process_changes_nothing_and_is_not_missed_when_it_is_killed(run_dir: Path, caplog) -> None:
    with with_process(run_dir) as helped:
        alone = helped.with_settings(workers=1)
        assert helped.translate(LINES, alignments=True) == alone.translate(LINES, alignments=True)
        assert helped.workers.sent > 0
        [two, one] = [each.with_settings(beam_size=2) for each in (helped, alone)]
        assert two.workers is helped.workers  # its process decodes with other settings, too
        expected = one.translate(LINES, n_best=2)
        assert two.translate(LINES, n_best=2) == expected
        [pid] = helped.workers.pids()
        os.kill(pid, signal.SIGKILL)  # as the system does to get memory
        assert two.translate(LINES, n_best=2) == expected
        assert "a worker process failed (exit code -9); decoding continues without" in caplog.text
        assert two.translate(LINES, n_best=2) == expected and helped.workers.start() == 0


def test_an_error_in_a_worker_process_is_raised_here(run_dir: Path) -> None:
    with with_process(run_dir) as translator:
        broken = translator.with_settings(no_repeat_ngram=1, min_length_offset=400, max_length_offset=400)
        for _ in range(2):  # the process survives it
            sent = translator.workers.sent
            with pytest.raises(UsageError, match="exclude every translation"):
                broken.translate(LINES)
            assert translator.workers.sent > sent
        assert translator.workers.start() == 1


def test_worker_processes_that_cannot_start_are_not_missed(
    translator: Translator, monkeypatch, caplog
) -> None:
    monkeypatch.setattr(sys, "executable", "/does/not/exist")
    alone = translator.with_settings(workers=2, batch_tokens=1024)
    assert alone.workers.start() == 0
    assert alone.translate(LINES) == translator.with_settings(workers=1).translate(LINES)
    assert "a worker process failed (" in caplog.text and "No such file" in caplog.text


def test_files_of_the_working_directory_do_not_break_worker_processes(
    run_dir: Path, tmp_path: Path, monkeypatch
) -> None:
    (tmp_path / "json.py").write_text("raise RuntimeError")
    monkeypatch.chdir(tmp_path)
    with Translator.load(run_dir, "cpu", ["decoding.batch_tokens=256"], workers=2) as translator:
        assert translator.workers.start() == 1
        translator.translate(LINES)
        assert translator.workers.sent > 0 and len(translator.workers.pids()) == 1


def test_worker_processes_start_once_there_is_enough_work(run_dir: Path) -> None:
    with Translator.load(run_dir, "cpu", ["decoding.batch_tokens=256"], workers=2) as translator:
        translator.translate(SOURCES)
        assert translator.workers.pids() == []
        translator.workers.start_after = 0.0
        translator.translate(LINES)
        assert len(translator.workers.pids()) == 1
    with Translator.load(run_dir, "cpu", workers=1) as translator:
        translator.workers.start_after = 0.0
        translator.translate(LINES)
        assert translator.workers.start() == 0


def test_many_short_lines_make_small_batches(translator: Translator) -> None:
    """Each row has logits over the whole vocabulary, however short its source is."""
    sizes = [len(rows) for rows in translator.workers.batches(translator.decoding, [1] * 3000)]
    assert sum(sizes) == 3000 and max(sizes) <= translator.decoding.batch_tokens // 5 // 16


# ------------------------------------------------------------------------------------------------- closing


@linux
@pytest.mark.parametrize("how", ["leave", "drop"])
def test_nothing_remains_of_a_closed_or_dropped_translator(run_dir: Path, how: str) -> None:
    before = children()
    translator = Translator.load(run_dir, "cpu", workers=2)
    assert translator.workers.start() == 1 and len(children() - before) == 1
    models = [weakref.ref(model) for model in translator.models]
    weights = weakref.ref(translator.models[0].source_embedding.weight)
    if how == "leave":
        with translator:
            translator.translate(SOURCES)
    else:
        del translator
    gc.collect()
    assert [model() for model in models] == [None] and weights() is None
    assert children() == before


def test_a_closed_translator_says_so(run_dir: Path) -> None:
    with Translator.load(run_dir, "cpu") as translator:
        pass
    for use in (lambda: translator.translate(["It rains."]), lambda: translator.with_settings(beam_size=1)):
        with pytest.raises(ValueError, match="this Translator is closed"):
            use()
    translator.close()  # again


def test_what_shares_the_models_can_go_on_after_one_is_closed(run_dir: Path) -> None:
    with Translator.load(run_dir, "cpu") as translator:
        greedy, rounded = translator.with_settings(beam_size=1), translator.with_settings(precision="bf16")
    for other in (greedy, rounded, greedy.with_settings(precision="bf16")):
        assert [found.text for found in other.translate(SOURCES)] == TARGETS


# ------------------------------------------------------------------------------------------------ in a server


@linux
def test_translators_are_loaded_and_dropped_50_times(run_dir: Path) -> None:
    def once(number: int) -> list[str]:
        translator = Translator.load(run_dir, "cpu", workers=2)
        if number == 30:
            translator.workers.start()
        return [found.text for found in translator.translate(SOURCES)]

    before, sizes = children(), []
    for number in range(50):
        assert once(number) == TARGETS
        gc.collect()
        sizes.append(resident())
    assert children() == before
    assert sizes[-1] - sizes[9] < 32 * 2**20
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(once, range(12))) == [TARGETS] * 12


def resident() -> int:
    """Resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


SERVER = """
import os, sys
import torch
from mtrain import Translator
torch.set_num_threads(2)
lines = sys.argv[2:] * 10
translator = Translator.load(sys.argv[1], "cpu", ["decoding.batch_tokens=256"], workers=2)
translator.workers.start()
texts = [found.text for found in translator.translate(lines)]
child = os.fork()
if child == 0:  # as a server does that loads before it forks
    same = [found.text for found in translator.translate(lines)] == texts
    same &= [found.text for found in translator.translate(lines[:1])] == texts[:1]
    translator.close()
    sys.exit(0 if same else 1)
_, status = os.waitpid(child, 0)
print("child", status)
sent = translator.workers.sent
while translator.workers.sent == sent:  # the child's end was not the end of the parent's processes
    assert [found.text for found in translator.translate(lines)] == texts
print("parent", len(translator.workers.pids()))
"""


@linux
def test_a_fork_translates_alike_and_leaves_its_parent_alone(run_dir: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SERVER, str(run_dir), *SOURCES], capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "child 0\nparent 1\n", done.stderr
    assert "failed" not in done.stderr


@linux
def test_worker_processes_end_with_a_parent_that_is_killed(run_dir: Path) -> None:
    script = (
        "import sys, time; from mtrain import Translator; "
        "translator = Translator.load(sys.argv[1], 'cpu', workers=2); translator.workers.start(); "
        "print(*translator.workers.pids(), flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(run_dir)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        [pid] = map(int, parent.stdout.readline().split())
        parent.kill()
    end = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()


SETTINGS = """
import ctypes, os, sys, threading
import torch
from mtrain import Translator

class Allocated(ctypes.Structure):  # struct mallinfo2
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

def settings():
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype, libc.malloc.restype = Allocated, ctypes.c_void_p
    before = libc.mallinfo2().hblks
    libc.malloc(ctypes.c_size_t(64 << 20))  # the default is to map so large a block
    threads = []
    new = threading.Thread(target=lambda: threads.append(torch.get_num_threads()))
    new.start()
    new.join()
    return libc.mallinfo2().hblks - before, threads[0], torch.get_num_threads(), dict(os.environ)

torch.set_num_threads(2)
before = settings()
translator = Translator.load(sys.argv[1], "cpu", ["decoding.batch_tokens=256"], workers=2)
translator.translate(sys.argv[2:] * 8)
translator.workers.start()
translator.translate(sys.argv[2:] * 8)
assert before[0] == 1, before
assert settings() == before, (settings()[:3], before[:3])
"""


@linux
def test_loading_and_translating_change_no_setting_of_the_process(run_dir: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SETTINGS, str(run_dir), *SOURCES], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
