"""Other processes that decode beside this one.

Threads of one process share Python's lock: on a CPU, where a step is many short operations, two threads
decode little faster than one, and two processes almost twice as fast.
"""

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Future
from typing import Any, Protocol, Self

import loky
import torch

from mtrain.config.schema import DecodingConfig
from mtrain.device import keep_freed_memory

log = logging.getLogger(__name__)

# Seconds of decoding after which helpers are worth what it takes to start them, which is about as long.
WORTH_HELP = 3.0
_IDLE = 60  # seconds without work after which they end


class Decoder(Protocol):
    """What helpers need of a decoder. `parts()` are what it is made of, as its class takes them."""

    config: DecodingConfig

    def parts(self) -> tuple[Any, ...]: ...
    def batch(self, *batch: Any) -> Any: ...
    def with_config(self, config: DecodingConfig) -> Self: ...


class Helpers:
    """`count` processes with copies of a decoder and its weights, started once it has had much to do. Until
    the first is ready, while all are busy, and if they fail, this process does the work."""

    def __init__(self, count: int):
        self.count, self.spent = count, 0.0  # seconds that one thread here has decoded
        self.sent = 0  # batches that helpers have now
        self.decoding = threading.Lock()  # held while it does
        self.starting = threading.Lock()
        self.executor: loky.ProcessPoolExecutor | None = None
        self.ready: Future[Any] | None = None

    def decode(self, decoder: Decoder, *batch: Any) -> Any:
        """Decode a batch (see `Decoder.batch`) here, or in a helper if this process decodes one already."""
        if not self.decoding.acquire(blocking=False):
            if self._take(decoder):
                try:
                    return self._send(decoder, *batch)
                except BrokenExecutor as error:
                    self._do_without(error)
                finally:
                    with self.starting:
                        self.sent -= 1
            return decoder.batch(*batch)
        start = time.perf_counter()
        try:
            return decoder.batch(*batch)
        finally:
            self.spent += time.perf_counter() - start
            self.decoding.release()

    def _take(self, decoder: Decoder) -> bool:
        """Whether one of them can have a batch, which then counts as sent; starts them when it is time."""
        with self.starting:
            if self.executor is None and self.count and self.spent >= WORTH_HELP:
                try:
                    self._start(decoder)
                except Exception as error:  # no semaphores, say, or no children allowed
                    self._do_without(error)
            free = self.sent < self.count and self.ready is not None and self.ready.done()
            self.sent += free
        return free

    def _start(self, decoder: Decoder) -> None:
        threads = torch.get_num_threads()
        # A helper that grows is no leak: it keeps freed memory.
        env = {"OMP_NUM_THREADS": str(threads), "LOKY_MAX_MEMORY_LEAK_SIZE": str(10**15)}
        parts = (threads, os.getpid(), type(decoder), decoder.config, *decoder.parts())
        self.executor = loky.ProcessPoolExecutor(
            self.count, timeout=_IDLE, initializer=_become_helper, initargs=parts, env=env
        )
        atexit.register(self.executor.shutdown, wait=False, kill_workers=True)
        self.ready = self.executor.submit(_decode, decoder.config)

    def _do_without(self, error: Exception) -> None:
        log.warning("a helper process failed (%s); decoding goes on without", error)
        self.count = 0

    def _send(self, decoder: Decoder, *batch: Any) -> Any:
        assert self.executor is not None
        return self.executor.submit(_decode, decoder.config, *batch).result()


_decoder: Decoder  # of a helper


def _become_helper(
    threads: int, parent: int, make: Callable[..., Decoder], config: DecodingConfig, *parts: Any
) -> None:
    """Become a helper of the process `parent`."""
    global _decoder
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or who reads the parent's output would wait for ours
    torch.set_num_threads(threads)
    keep_freed_memory()
    _decoder = make(config, *parts)


def _end_with(parent: int) -> None:
    """End when the parent has been killed."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _decode(config: DecodingConfig, *batch: Any) -> Any:
    """Decode a batch as `config` says; without one, only be ready."""
    global _decoder
    if config != _decoder.config:
        _decoder = _decoder.with_config(config)
    return _decoder.batch(*batch) if batch else None
