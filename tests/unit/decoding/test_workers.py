"""Threads and worker processes: translations do not change, and a closed translator frees everything."""

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from mtrain import Translator
from mtrain.config.sections.decoding import DecodingConfig
from mtrain.decoding import workers
from mtrain.decoding.decode import DecodingTask, Ensemble, decode_batch
from mtrain.decoding.shared_workers import SharedWorkers
from mtrain.decoding.split import Part
from mtrain.decoding.translation import Translation
from mtrain.decoding.worker_process import make_decoder
from mtrain.decoding.workers import Workers
from mtrain.distributed.ranks import JsonValue, Ranks
from mtrain.errors import UsageError
from tests.support.tokenizers import train as train_tokenizer
from tests.support.training import PAIRS
from tests.support.translation import words_of

LINES = words_of(40)
SHORT = {"max_length_ratio": 0.5, "max_length_offset": 6}  # most of the lines would never end
FEW_TOKENS = [f"decoding.{key}={value}" for key, value in SHORT.items()]
MANY_BATCHES = ["decoding.batch_tokens=128", "decoding.beam_size=1"]
SOURCES, TARGETS = ([pair[side] for pair in PAIRS] for side in (0, 1))
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, forks, or needs glibc")


def children() -> set[int]:
    """Child processes of this process, zombies included."""
    found = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    return {int(pid) for pid in found.split()}


@pytest.fixture(scope="module")
def started() -> Iterator[list[Translator]]:
    """The translators that `helped` has loaded."""
    translators: list[Translator] = []
    yield translators
    for translator in translators:
        translator.close()


@pytest.fixture
def helped(started: list[Translator], run_dir: Path, tmp_path: Path, monkeypatch) -> Translator:
    """A translator with a running worker process, which files of the working directory have not broken.

    Tests share it unless one killed the process: starting another takes seconds, because it imports PyTorch.
    """
    (tmp_path / "json.py").write_text("raise RuntimeError")
    monkeypatch.chdir(tmp_path)
    if not started or not started[-1].workers.pids():
        keys = ["decoding.batch_tokens=512", "decoding.beam_size=3", *FEW_TOKENS]
        started.append(Translator.load(run_dir, "cpu", keys, workers=2))
        assert started[-1].workers.start() == 1
    return started[-1]


@contextmanager
def worker_used(workers: Workers, decoding: threading.Lock = Workers.decoding) -> Iterator[None]:
    """Fail unless the worker process decodes a batch while another thread holds `decoding`. A translation
    that ended with an error may have left the process busy, so this first waits until it is idle."""
    with decoding:
        task, sent = DecodingTask(DecodingConfig(), [Part(0, [4, 3], [], (0, 0))], "de"), workers.sent
        while workers.sent == sent and workers.pids():
            workers.decode_one(task)
        yield
    assert workers.sent > sent + 1


def test_threads_can_share_a_translator(translator: Translator) -> None:
    lines, shared = words_of(40, seed=2), translator.with_settings(**SHORT)
    expected = shared.translate(lines)
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: shared.translate(lines), range(8)):
            assert found == expected


class ThreadRanks(Ranks):
    """One of two ranks in threads of one process, which send each other JSON."""

    size = 2

    def __init__(self, rank: int, meeting: threading.Barrier, sent: list[str]):
        super().__init__(torch.device("cpu"))
        self.rank, self.meeting, self.sent = rank, meeting, sent

    def broadcast(self, value: JsonValue, preparing: bool = False) -> JsonValue:
        return self.gather(value)[0]

    def gather(self, value: JsonValue) -> list[JsonValue]:
        self.sent[self.rank] = json.dumps(value)
        self.meeting.wait()
        found = [json.loads(text) for text in self.sent]
        self.meeting.wait()
        return found


class OneAtATime:
    """Workers that decode for one thread at a time: ranks are processes, and have workers of their own."""

    def __init__(self, workers: Workers):
        self.count, self.workers, self.lock = workers.count, workers, threading.Lock()

    def decode(self, *arguments: Any) -> list[list[Translation]]:
        with self.lock:
            return self.workers.decode(*arguments)


def test_ranks_that_share_parts_find_the_same_translations(translator: Translator) -> None:
    tokenizer, own = translator.tokenizer, translator.workers
    sources = [[*ids, tokenizer.special.eos] for ids in tokenizer.encode_source(words_of(5))]
    parts = [Part(i, ids, [7], (i, 0), ((0, 1),) * (len(ids) - 1)) for i, ids in enumerate(sources)]
    config = translator.with_settings(**SHORT).decoding
    task = DecodingTask(config, parts, "zh", n_best=2, alignments=True)
    meeting, sent = threading.Barrier(2, timeout=60), ["", ""]
    workers = OneAtATime(own)
    first, second = (SharedWorkers(workers, ThreadRanks(rank, meeting, sent)) for rank in range(2))
    found: list[list[Translation]] = []
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(second.lead, lambda: None)
        first.lead(lambda: found.extend(first.decode(task)))
        following.result()
    expected = own.decode(task)
    for lines in (found, expected):
        assert [len(each) for each in lines] == [2] * len(parts)
    for ours, same in zip(chain(*found), chain(*expected), strict=True):
        assert (ours.text, ours.tokens, ours.alignment) == (same.text, same.tokens, same.alignment)
        assert ours.score == pytest.approx(same.score, abs=1e-4)


def test_an_error_in_a_worker_process_is_raised_in_this_process(helped: Translator) -> None:
    most = list(range(100, helped.tokenizer.target_vocab_size))  # so that the others are soon used up
    broken = helped.with_settings(
        forbidden_ids=most, no_repeat_ngram=1, min_length_offset=400, max_length_offset=400
    )
    for _ in range(2):  # the worker process survives the error
        with worker_used(helped.workers), pytest.raises(UsageError, match="exclude every translation"):
            broken.translate(LINES)
    assert helped.workers.start() == 1


def test_translations_are_the_same_with_a_worker_process_and_after_it_is_killed(
    helped: Translator, caplog
) -> None:
    alone = helped.with_settings(workers=1)
    expected = alone.translate(LINES, alignments=True)
    with worker_used(helped.workers):
        assert helped.translate(LINES, alignments=True) == expected
    [two, one] = [each.with_settings(beam_size=2) for each in (helped, alone)]
    assert two.workers is helped.workers  # the same process decodes with other settings, too
    expected = one.translate(LINES, n_best=2)
    assert two.translate(LINES, n_best=2) == expected
    [pid] = helped.workers.pids()
    os.kill(pid, signal.SIGKILL)  # as the kernel does when it runs out of memory
    assert two.translate(LINES, n_best=2) == expected
    assert (
        "a worker process was killed by SIGKILL, perhaps because memory ran out; no worker process is "
        "started for 1 min"
    ) in caplog.text
    assert two.translate(LINES, n_best=2) == expected and helped.workers.start() == 0


def test_a_killed_worker_process_is_replaced_after_a_pause_which_becomes_longer(
    helped: Translator, monkeypatch, caplog
) -> None:
    monkeypatch.setattr(workers, "PAUSE", 0.5)
    paused = Workers(helped.workers.originals, "fp32", count=2, processes=True)
    task = DecodingTask(helped.decoding, [Part(0, [4, 5, 6], [], (0, 0))], "de")
    expected = paused.decode_one(task)
    for pause in ("0.50 s", "1.0 s"):
        while not paused.start():
            time.sleep(0.1)
        os.kill(paused.pids()[0], signal.SIGKILL)
        with paused.decoding:
            assert paused.decode_one(task) == expected
        assert f"no worker process is started for {pause}" in caplog.text
    while not paused.start():
        time.sleep(0.1)


def test_the_pause_after_a_failure_is_short_again_after_a_long_time(helped: Translator, monkeypatch, caplog):
    def refuse(_: int) -> NoReturn:
        raise OSError(11, "Resource temporarily unavailable")

    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(workers, "WorkerProcess", refuse)
    paused = Workers(helped.workers.originals, "fp32", count=2, processes=True)
    for later, pause in ((0, "1 min"), (60, "2 min"), (120, "4 min"), (240 + 9 * 3600, "1 min")):
        now[0] += later
        caplog.clear()
        assert paused.start() == 0
        assert f"no worker process is started for {pause}" in caplog.text


@pytest.mark.slow
def test_worker_processes_that_are_killed_together_count_as_one_failure(helped: Translator, caplog) -> None:
    three = helped.with_settings(workers=3)
    assert three.workers.start() == 2
    for pid in three.workers.pids():
        os.kill(pid, signal.SIGKILL)
    while three.workers.pids():
        three.translate(LINES)
    assert "is started for 1 min" in caplog.text and "is started for 2 min" not in caplog.text


def test_a_worker_process_decodes_while_another_model_is_decoded_here(
    helped: Translator, translator: Translator
) -> None:
    assert helped.workers.start() == 1
    expected = helped.translate(SOURCES)
    with worker_used(helped.workers, translator.workers.decoding):
        assert helped.translate(SOURCES) == expected


@pytest.mark.slow
def test_45_a_stopped_process_is_reported_and_waited_for_until_ctrl_c(
    helped: Translator, monkeypatch, caplog
) -> None:
    monkeypatch.setattr("mtrain.processes.pool.SILENCE", 0.5)
    expected = helped.translate(LINES)
    [pid] = helped.workers.pids()

    def after_warning(target: int, number: signal.Signals) -> None:
        while f"(process {pid}) has not answered or computed for" not in caplog.text:
            time.sleep(0.01)
        os.kill(target, number)

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with ThreadPoolExecutor(1) as other:
            os.kill(pid, signal.SIGSTOP)
            other.submit(after_warning, pid, signal.SIGCONT)
            assert helped.translate(LINES) == expected
            caplog.clear()
            os.kill(pid, signal.SIGSTOP)
            other.submit(after_warning, os.getpid(), signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                helped.translate(LINES)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert helped.workers.pids() == [] and helped.translate(LINES) == expected
    assert helped.workers.start() == 1 and "no worker process is started" not in caplog.text


def test_a_worker_process_does_not_decode_with_a_vocabulary_that_was_replaced(
    run_dir: Path, tmp_path: Path, caplog
) -> None:
    """As by a new model in the folder that a server has loaded."""
    folder = Path(shutil.copytree(run_dir / "model", tmp_path / "model"))
    with Translator.load(folder, "cpu", FEW_TOKENS, workers=2) as translator:
        expected = translator.translate(LINES)
        train_tokenizer(folder / "tokenizer", vocab_size=translator.tokenizer.target_vocab_size - 1)
        translator.workers.start()
        with ThreadPoolExecutor(2) as threads:
            assert [*threads.map(translator.translate, [LINES, LINES])] == [expected, expected]
    assert "could not be prepared" in caplog.text and "its files have changed since" in caplog.text
    assert "a worker process ended with exit code 1; no worker process is started" in caplog.text


def test_decoding_continues_without_worker_processes_that_cannot_start(
    translator: Translator, monkeypatch, caplog
) -> None:
    monkeypatch.setattr(sys, "executable", "/does/not/exist")
    alone = translator.with_settings(workers=2, batch_tokens=1024, **SHORT)
    assert alone.workers.start() == 0
    assert alone.translate(LINES) == alone.with_settings(workers=1).translate(LINES)
    assert "cannot start a worker process: " in caplog.text and "No such file" in caplog.text
    assert caplog.text.count("no worker process is started for 1 min") == 1


@linux
def test_worker_processes_start_once_there_is_enough_work_and_end_with_the_translator(run_dir: Path) -> None:
    before = children()
    with Translator.load(run_dir, "cpu", MANY_BATCHES, workers=2) as translator:
        translator.translate(SOURCES)
        assert translator.workers.pids() == []
        translator.workers.start_after = 0.0
        translator.translate(LINES)
        assert len(translator.workers.pids()) == 1
    assert children() == before
    with Translator.load(run_dir, "cpu", workers=1) as translator:
        translator.workers.start_after = 0.0
        translator.translate(LINES)
        assert translator.workers.start() == 0


def test_the_number_of_lines_in_a_batch_is_limited(translator: Translator) -> None:
    """Each line has logits over the whole vocabulary, however short it is."""
    sizes = [len(rows) for rows in translator.workers.batches(translator.decoding, [1] * 3000)]
    assert sum(sizes) == 3000 and max(sizes) <= 8192 // 5 // 16


# ---------------------------------------------------------------------------------------------------- closing


def on_cuda(translator: Translator, **settings: object) -> Workers:
    """Workers that take the device for a GPU. The models are on the CPU."""
    loaded = translator.with_settings(workers=1, **settings)
    ensemble = Ensemble([model.transformer for model in loaded.models], loaded.tokenizer, loaded.device)
    return Workers(ensemble._replace(device=torch.device("cuda")), "fp32", 1, False)


@pytest.mark.parametrize(
    ("given", "gigabytes", "tokens"),
    [("auto", 100, 131_072), ("auto", 0.2, 16_384), ("auto", 0, 8192), (8192, 100, 8192), (8000, 100, 8000)],
)
def test_batches_on_a_gpu_are_as_large_as_memory_allows(
    translator: Translator, monkeypatch, given: int | str, gigabytes: float, tokens: int
) -> None:
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (int(gigabytes * 1e9), 10**11))
    for name in ("memory_reserved", "memory_allocated"):
        monkeypatch.setattr(f"torch.cuda.{name}", lambda _: 0)
    greedy, beams = (translator.with_settings(batch_tokens=given, beam_size=size).decoding for size in (1, 4))
    workers, lengths = on_cuda(translator), [16] * tokens
    assert max(map(len, workers.batches(greedy, lengths))) == tokens // 16
    assert max(map(len, workers.batches(beams, lengths))) <= tokens // 64
    assert workers.lines_needed(greedy) >= 2 * tokens // 16
    assert max(map(len, translator.workers.batches(greedy, lengths))) <= 8192 // 16  # on a CPU


def test_a_batch_that_exhausts_the_memory_of_a_gpu_is_decoded_in_halves(
    translator: Translator, monkeypatch, caplog
) -> None:
    sizes: list[int] = []

    def decode_few(_: object, task: DecodingTask) -> list[list[Translation]]:
        sizes.append(len(task.parts))
        if len(task.parts) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return decode_batch(translator.workers.ensemble, task)

    settings = translator.with_settings(batch_tokens=10_000, **SHORT).decoding
    parts = [Part(row, [*[row + 4] * 9, 3], [], (row, 0)) for row in range(10)]
    workers, task = on_cuda(translator), DecodingTask(settings, parts, "de")
    expected = translator.workers.decode(task)
    monkeypatch.setattr("mtrain.decoding.workers.decode_batch", decode_few)
    assert workers.decode(task) == expected
    assert sizes == [10, 5, 2, 3, 2, 3]
    assert caplog.text.count("out of memory in a batch of") == 2
    assert workers.decode(task) == expected and max(sizes[6:]) < 5  # too large ones are not tried again


@linux
@pytest.mark.parametrize("how", ["close", pytest.param("drop", marks=pytest.mark.slow)])
def test_a_closed_or_dropped_translator_frees_its_memory_and_ends_its_processes(
    run_dir: Path, how: str
) -> None:
    before = children()
    translator = Translator.load(run_dir, "cpu", workers=2)
    if how == "drop":
        assert translator.workers.start() == 1 and len(children() - before) == 1
    models = [weakref.ref(model) for model in translator.models]
    weights = weakref.ref(translator.models[0].transformer.source_embedding.weight)
    if how == "close":
        with translator:
            translator.translate(SOURCES)
    else:
        del translator
    gc.collect()
    assert [model() for model in models] == [None] and weights() is None
    assert children() == before


def test_no_thread_prepares_a_process_after_the_end(run_dir: Path, monkeypatch) -> None:
    """At the exit of Python, it could abort the process."""
    real, started = make_decoder, threading.Event()

    def slow_decoder(*arguments):
        started.set()
        time.sleep(1)
        return real(*arguments)

    monkeypatch.setattr(workers, "make_decoder", slow_decoder)
    translator = Translator.load(run_dir, "cpu", ["decoding.batch_tokens=16"], workers=2)
    translator.workers.start_after = 0.0
    translator.translate(SOURCES * 2)
    assert started.wait(30)
    translator.close()
    gc.collect()
    assert "preparing" not in {thread.name for thread in threading.enumerate()}


def test_using_a_closed_translator_is_an_error(run_dir: Path) -> None:
    with Translator.load(run_dir, "cpu") as translator:
        pass
    uses = (
        lambda: translator.translate(["It rains."]),
        lambda: translator.with_settings(beam_size=1),
        lambda: translator.between("en", "de"),
    )
    for use in uses:
        with pytest.raises(ValueError, match="this Translator is closed"):
            use()
    translator.close()  # closing twice is allowed


def test_translators_that_share_models_still_work_after_one_is_closed(run_dir: Path) -> None:
    with Translator.load(run_dir, "cpu") as translator:
        greedy, rounded = translator.with_settings(beam_size=1), translator.with_settings(precision="bf16")
    for other in (greedy, rounded, greedy.with_settings(precision="bf16")):
        assert [found.text for found in other.translate(SOURCES)] == TARGETS


# ------------------------------------------------------------------------------------------------ in a server


@pytest.mark.slow
@linux
def test_memory_does_not_grow_when_translators_are_loaded_and_dropped(run_dir: Path) -> None:
    def load_and_translate(_: int) -> list[str]:
        translator = Translator.load(run_dir, "cpu", ["decoding.beam_size=1"], workers=2)
        return [found.text for found in translator.translate(SOURCES[:2])]

    sizes = []
    gc.freeze()  # so that collecting takes no time for what exists already
    for number in range(30):
        assert load_and_translate(number) == TARGETS[:2]
        gc.collect()
        sizes.append(resident())
    gc.unfreeze()
    assert sizes[-1] - sizes[9] < 10 * 2**20  # the weights of 20 models need more
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(load_and_translate, range(8))) == [TARGETS[:2]] * 8


def resident() -> int:
    """Resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


SERVER = """
import ctypes, os, signal, sys, threading, time
import torch
from mtrain import Translator
signal.alarm(120)  # in case that it hangs

class Allocated(ctypes.Structure):  # struct mallinfo2
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

def settings():
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype, libc.malloc.restype = Allocated, ctypes.c_void_p
    before = libc.mallinfo2().hblks
    libc.malloc(ctypes.c_size_t(64 << 20))  # by default, glibc maps a block of this size
    threads = []
    new = threading.Thread(target=lambda: threads.append(torch.get_num_threads()))
    new.start()
    new.join()
    return libc.mallinfo2().hblks - before, threads[0], torch.get_num_threads(), dict(os.environ)

torch.set_num_threads(2)
before = settings()
lines = sys.argv[2:] * 5
translator = Translator.load(
    sys.argv[1], "cpu", ["decoding.batch_tokens=128", "decoding.beam_size=1"], workers=2
)
texts = [found.text for found in translator.translate(lines)]
translator.workers.start()
assert [found.text for found in translator.translate(lines)] == texts
assert before[0] == 1, before
assert settings() == before, (settings()[:3], before[:3])
print("settings unchanged", flush=True)
child = os.fork()
if child == 0:  # as a server does that loads before it forks
    same = [found.text for found in translator.translate(lines)] == texts
    same &= [found.text for found in translator.translate(lines[:1])] == texts[:1]
    translator.close()
    sys.exit(0 if same else 1)
_, status = os.waitpid(child, 0)
print("child", status)
sent = translator.workers.sent
while translator.workers.sent == sent:  # the parent's worker process still runs after the child has ended
    assert [found.text for found in translator.translate(lines)] == texts
print("workers", *translator.workers.pids(), flush=True)
time.sleep(60)
"""


@pytest.mark.slow
@linux
def test_a_server_keeps_its_settings_and_its_worker_processes_survive_its_fork_but_not_its_end(
    run_dir: Path, tmp_path: Path
) -> None:
    """A forked process can translate. The server is killed, so it ends without cleaning up."""
    command = [sys.executable, "-c", SERVER, str(run_dir), *SOURCES]
    with (
        (tmp_path / "stderr").open("w") as stderr,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True) as server,
    ):
        assert server.stdout is not None
        settings, child, workers = (server.stdout.readline() for _ in range(3))
        server.kill()
    errors = (tmp_path / "stderr").read_text()
    assert settings == "settings unchanged\n", errors
    assert child == "child 0\n" and "failed" not in errors, errors
    [pid] = map(int, workers.split()[1:])
    end = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()
