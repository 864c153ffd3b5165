"""Other processes that decode beside this one.

Threads of one process share Python's lock: on a CPU, where a step is many short operations, two threads
decode little faster than one, and two processes almost twice as fast.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Future
from typing import Any, Protocol, Self

import loky
import torch

from mtrain.device import keep_few_kernels, keep_freed_memory
from mtrain.schema import DecodingConfig

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
    """`count` processes with copies of a decoder, started once it has had much to do; until they are ready,
    and if they fail, this process does the work."""

    def __init__(self, count: int):
        self.count, self.spent = count, 0.0  # seconds that this process has decoded
        self.decoding = threading.Lock()  # held while it does
        self.starting = threading.Lock()
        self.executor: loky.ProcessPoolExecutor | None = None
        self.ready: Future[Any] | None = None

    def decode(self, decoder: Decoder, *batch: Any) -> Any:
        """Decode a batch (see `Decoder.batch`) here, or in a helper if this process decodes one already."""
        if not self.decoding.acquire(blocking=False):
            if self._at_hand(decoder):
                try:
                    return self._send(decoder, *batch)
                except (BrokenExecutor, OSError) as error:
                    log.warning("a helper process failed (%s); decoding goes on without", error)
                    self.count = 0
            return decoder.batch(*batch)
        start = time.perf_counter()
        try:
            return decoder.batch(*batch)
        finally:
            self.spent += time.perf_counter() - start
            self.decoding.release()

    def _at_hand(self, decoder: Decoder) -> bool:
        """Whether one of them waits for work; starts them when it is time."""
        with self.starting:
            if self.executor is None and self.count and self.spent >= WORTH_HELP:
                threads = torch.get_num_threads()
                self.executor = loky.ProcessPoolExecutor(
                    self.count,
                    timeout=_IDLE,
                    initializer=_start,
                    initargs=(threads, type(decoder), _single(decoder.config), *decoder.parts()),
                    env={"OMP_NUM_THREADS": str(threads)},
                )
                self.ready = self.executor.submit(_decode, decoder.config)
        return bool(self.count) and self.ready is not None and self.ready.done()

    def _send(self, decoder: Decoder, *batch: Any) -> Any:
        assert self.executor is not None
        return self.executor.submit(_decode, decoder.config, *batch).result()


_decoder: Decoder  # of a helper


def _start(threads: int, make: Callable[..., Decoder], config: DecodingConfig, *parts: Any) -> None:
    global _decoder
    torch.set_num_threads(threads)
    keep_freed_memory()
    keep_few_kernels()
    _decoder = make(config, *parts)


def _single(config: DecodingConfig) -> DecodingConfig:
    return config.model_copy(update={"workers": 1})


def _decode(config: DecodingConfig, *batch: Any) -> Any:
    """Decode a batch as `config` says; without one, only be ready."""
    global _decoder
    config = _single(config)
    if config != _decoder.config:
        _decoder = _decoder.with_config(config)
    return _decoder.batch(*batch) if batch else None
