"""Decoding on several cores, with threads of this process and, on a CPU, with worker processes.

Threads of one process share Python's global interpreter lock. On a CPU, a decoding step consists of many
short operations, so two threads are hardly faster than one, but two processes are almost twice as fast.
"""

import logging
import math
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from mtrain.config.sections.decoding import DecodingConfig
from mtrain.decoding.batches import SHORT, batch_tokens, in_batches
from mtrain.decoding.decode import DecodingTask, Ensemble, decode_batch, for_decoding
from mtrain.decoding.split import Part
from mtrain.decoding.translation import Translation
from mtrain.decoding.worker_process import make_decoder
from mtrain.device import release_cached_memory, thread_pool
from mtrain.duration import format_duration
from mtrain.errors import is_out_of_memory
from mtrain.graph_capture import capture_lock
from mtrain.model.transformer import Transformer
from mtrain.processes.pool import Prepare, WorkerEndedError, WorkerProcess

log = logging.getLogger(__name__)

_MIN_BATCH = 256  # tokens
# Seconds of decoding after which worker processes are started. Starting them takes about as long.
START_AFTER = 3.0
PAUSE = 60.0  # seconds without a new worker process after the first one that fails
# Workers wait for each other at the end of a window, so each needs many batches of it: at least so many lines
# on a CPU, and so many batches of SHORT lines on a CUDA device.
_LINES_PER_WORKER = 2048
_BATCHES_PER_WORKER = 3
_PATIENCE = 10.0  # seconds to wait for a process that failed, or for a thread that prepares a killed one

Decoded = Callable[[Part, list[Translation]], object]  # called with a part and its translations


class Workers:
    """Decodes batches on `count` threads and in up to `count - 1` worker processes, which hold copies of the
    models and are started once this process has decoded for some seconds.

    While the processes are starting or busy, this process does all decoding. They end when the object is
    garbage collected, when this process ends, and after a minute without work. If one fails or cannot be
    started, none is started for `PAUSE` seconds, and for twice as long after each later failure, unless it
    comes much later. After a fork, the child decodes without worker processes.
    """

    # Held by the thread that decodes in this process. All objects share it, because threads of one process
    # slow each other down; batches of other models then go to worker processes.
    decoding = threading.Lock()

    def __init__(self, ensemble: Ensemble[Transformer], precision: str, count: int, processes: bool):
        self.originals, self.ensemble = ensemble, for_decoding(ensemble, precision)
        self.precision, self.count = precision, count
        self.start_after = START_AFTER
        self.sent = 0  # batches that were sent to worker processes
        self._start_up(processes and ensemble.search is None and ensemble.device.type == "cpu")

    def _start_up(self, processes: bool) -> None:
        self._pid, self._forked = os.getpid(), False
        self._threads = max(1, torch.get_num_threads() // self.count)  # of each worker
        self._pool: ThreadPoolExecutor | None = thread_pool(self.count)
        self._wanted = self.count - 1 if processes else 0  # number of worker processes
        self._pause, self._paused_until = PAUSE, -math.inf
        self._seconds = 0.0  # of decoding in this process
        self._exhausting = math.inf  # tokens of the smallest batch that has exhausted the memory of a GPU
        self._lock = threading.Lock()  # of the list of processes
        self._processes: list[WorkerProcess] = []
        self._free: queue.SimpleQueue[WorkerProcess] = queue.SimpleQueue()  # idle processes
        self._preparing: list[threading.Thread] = []  # that prepare processes
        self._end = weakref.finalize(self, _end, self._pid, self._processes, self._preparing)

    def decode(self, task: DecodingTask, decoded: Decoded = lambda _, found: None) -> list[list[Translation]]:
        """Like `decode_batch`, but for any number of parts, in batches of similar length. `decoded` is called
        with each part and its translations, as soon as that part and all longer ones are translated."""
        if os.getpid() != self._pid:  # the threads and processes are the parent's
            self._end.detach()
            self._start_up(processes=False)
            self._forked = True
            # The threads of libraries do not exist in the child, but a new thread can still decode.
            self._pool = self._pool or ThreadPoolExecutor(1)
        parts = task.parts
        results: list[list[Translation]] = [[]] * len(parts)
        batches = self.batches(task.config, [max(len(part.source), len(part.prefix)) for part in parts])

        def decode_rows(rows: list[int]) -> list[list[Translation]]:
            return self.decode_one(task._replace(parts=[parts[row] for row in rows]))

        alone = len(batches) == 1 and not self._forked  # then it uses all threads of this process
        mapped = map if self._pool is None or alone else self._pool.map
        try:
            for rows, translations in zip(batches, mapped(decode_rows, batches), strict=True):
                for row, found in zip(rows, translations, strict=True):
                    results[row] = found
                    decoded(parts[row], found)
        except KeyboardInterrupt:
            self.kill_processes()  # the threads would wait for processes that are stopped
            raise
        return results

    def batches(self, config: DecodingConfig, lengths: Sequence[int]) -> list[list[int]]:
        """Batches of indices of parts with these lengths: of at most `batch_tokens` over all hypotheses, and
        of sizes that give all workers about the same amount of work."""
        lengths = [max(SHORT, length) for length in lengths]
        tokens = batch_tokens(config, self.ensemble.models, self.ensemble.device)
        most, total = max(1, tokens // config.hypotheses), sum(lengths)
        rounds = math.ceil(total / (most * self.count))
        even = math.ceil(total / (max(rounds, 1) * self.count)) + max(lengths, default=0)
        return list(in_batches(lengths, min(most, max(_MIN_BATCH, even)), config.hypotheses))

    def lines_needed(self, config: DecodingConfig) -> int:
        """The number of lines of a window that each worker needs to be efficient."""
        ensemble = self.ensemble
        if ensemble.device.type != "cuda":
            return _LINES_PER_WORKER
        tokens = batch_tokens(config, ensemble.models, ensemble.device)
        return _BATCHES_PER_WORKER * tokens // (SHORT * config.hypotheses)

    def decode_one(self, task: DecodingTask) -> list[list[Translation]]:
        """Decode a batch in this process, or in a worker process if another thread is decoding here."""
        if not self.decoding.acquire(blocking=False):
            process = self._free_process()
            found = None if process is None else self._send(process, task)
            return self._decode_here(task) if found is None else found
        start = time.perf_counter()
        try:
            return self._decode_here(task)
        finally:
            self._seconds += time.perf_counter() - start
            self.decoding.release()

    def _decode_here(self, task: DecodingTask) -> list[list[Translation]]:
        """Decode a batch in this process. If memory runs out on a GPU, this batch and later ones of its size
        are decoded in halves."""
        parts, device = task.parts, self.ensemble.device
        size = len(parts) * max(len(part.source) for part in parts) * task.config.hypotheses
        if size < self._exhausting or len(parts) == 1:
            try:
                return decode_batch(self.ensemble, task)
            except RuntimeError as error:
                if device.type == "cpu" or len(parts) == 1 or not is_out_of_memory(error):
                    raise
            # Not in the handler, where the error refers to tensors.
            with capture_lock:
                release_cached_memory(device)
            self._exhausting = min(self._exhausting, size)
            log.warning("out of memory in a batch of %d lines; decoding it in halves", len(parts))
        half = len(parts) // 2
        halves = [self._decode_here(task._replace(parts=some)) for some in (parts[:half], parts[half:])]
        return halves[0] + halves[1]

    def _send(self, process: WorkerProcess, task: DecodingTask) -> list[list[Translation]] | None:
        """Decode a batch in a worker process; None if the process has ended."""
        self.sent += 1
        try:
            found: list[list[Translation]] = process.call(task)
        except WorkerEndedError as error:
            if not self._remove(process, error):
                raise
            return None
        except Exception:  # raised by decoding, so the process is usable, unless `call` has killed it
            self._free.put(process)
            raise
        self._free.put(process)
        return found

    def _free_process(self) -> WorkerProcess | None:
        """An idle worker process, if any. Starts the processes after `start_after` seconds of decoding."""
        if self._seconds >= self.start_after:
            self._start_missing()
        try:
            return self._free.get_nowait()
        except queue.Empty:
            return None

    def start(self) -> int:
        """Start the worker processes now, and wait until they are ready. Returns how many are running."""
        for thread in self._start_missing():
            thread.join()
        return len(self._processes)

    def pids(self) -> list[int]:
        """The process ids of the worker processes."""
        return [process.process.pid for process in self._processes]

    def _start_missing(self) -> list[threading.Thread]:
        """Start the worker processes that are not running, unless one has just failed. Does not wait until
        they are ready."""
        starting: list[threading.Thread] = []
        make = partial(make_decoder, self.originals, self.precision, self._threads)
        with self._lock:
            while len(self._processes) < self._wanted and time.monotonic() >= self._paused_until:
                try:
                    process = WorkerProcess(self._threads)
                except OSError as error:  # too many processes, for example
                    self._pause_starts(f"cannot start a worker process: {error}")
                    break
                self._processes.append(process)
                # The thread must not hold a reference to this object, which may be dropped meanwhile.
                arguments = (process, make, self._free)
                thread = threading.Thread(target=_prepare, args=arguments, name="preparing", daemon=True)
                starting.append(thread)
                thread.start()
            self._preparing[:] = [thread for thread in self._preparing if thread.is_alive()] + starting
        return starting

    def _remove(self, process: WorkerProcess, error: WorkerEndedError) -> bool:
        """Remove a worker process that has ended. Another is started in its place: soon if it was idle,
        after a pause if it failed. Returns False if `kill_processes` has ended it."""
        with self._lock:
            if process not in self._processes:
                return False
            self._processes.remove(process)
            if error.code != 0:
                self._pause_starts(f"a worker process {error}")
        return True

    def kill_processes(self) -> None:
        """End all worker processes. Others are started when they are needed."""
        with self._lock:
            killed, self._free = self._processes.copy(), queue.SimpleQueue()
            self._processes.clear()
        for process in killed:
            process.kill()

    def _pause_starts(self, reason: str) -> None:
        """Start no worker processes for a while. Those that are running continue."""
        now = time.monotonic()
        if now >= self._paused_until:  # not one of several processes that fail together
            if now - self._paused_until > 60 * self._pause:  # they have run well meanwhile
                self._pause = PAUSE
            self._paused_until, self._pause = now + self._pause, 2 * self._pause
        rest = format_duration(self._paused_until - now)
        log.warning("%s; no worker process is started for %s", reason, rest)


def _prepare(
    process: WorkerProcess, make: Callable[[], Prepare], free: "queue.SimpleQueue[WorkerProcess]"
) -> None:
    """Prepare a worker process with the function that `make` returns. If that fails, the process is killed,
    and its first task raises WorkerEndedError."""
    try:
        process.prepare(make())
    except Exception as error:
        if not isinstance(error, WorkerEndedError):
            log.warning("a worker process could not be prepared: %s", error)
        process.kill(_PATIENCE)  # unless it ends by itself, as after an error of its own
    free.put(process)


def _end(pid: int, processes: list[WorkerProcess], preparing: list[threading.Thread]) -> None:
    """End the worker processes, and wait for the threads that prepare them, unless this is a fork of the
    process that started them.

    If Python exits while one of these threads is in a function of PyTorch, the process is aborted.
    """
    if os.getpid() == pid:
        for process in processes:
            process.kill()
        for thread in preparing:
            if thread is not threading.current_thread():
                thread.join(_PATIENCE)
