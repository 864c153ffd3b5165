"""Translates the requests of many clients in common batches.

The texts of a request are split into parts, as `Translator.stream` splits them. Threads take parts of all
waiting requests, decode them together, and join the translations once all parts of a request are translated.
"""

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from starlette.exceptions import HTTPException

from mtrain.decoding import batches
from mtrain.decoding.decode import DecodingTask
from mtrain.decoding.join import join_texts
from mtrain.decoding.translate import Translator
from mtrain.decoding.translation import Translation
from mtrain.decoding.worker_process import Decode
from mtrain.device import use_threads
from mtrain.errors import is_recoverable

log = logging.getLogger(__name__)

SHORT = 64  # tokens; longer parts are decoded by a thread of their own
# Seconds without a new request after which idle threads begin to decode: a share of the time of the last
# batch, within limits. Requests wait for others for at most `_PATIENCE` times as long.
_QUIET_SHARE, _LEAST_QUIET, _MOST_QUIET = 0.01, 0.003, 0.03
_PATIENCE = 10.0
MOST_WAITING = 2048  # parts, before those of the last request


@dataclass(eq=False)
class Request:
    """Texts of one client, and what is translated of them."""

    texts: Sequence[str]
    task: DecodingTask
    decode: Decode
    budget: int  # padded source tokens of a batch
    arrived: float
    future: "Future[list[Translation]]" = field(default_factory=Future)
    found: dict[int, list[Translation]] = field(default_factory=dict)  # by index of the part

    @property
    def kind(self) -> tuple[object, ...]:
        """Parts of requests of the same kind can be in the same batch."""
        return self.decode, self.task.target_lang, self.task.alignments

    def finish(self, found: Mapping[int, list[Translation]]) -> None:
        """Keep the translations of some parts; after the last one, answer the client."""
        self.found |= {index: best[: self.task.n_best] for index, best in found.items()}
        if len(self.found) == len(self.task.parts):
            in_order = [self.found[i] for i in range(len(self.found))]
            with suppress(InvalidStateError):  # the client no longer waits
                self.future.set_result(list(join_texts(self.texts, self.task, in_order)))


class WaitingPart(NamedTuple):
    """A part of a request."""

    turn: int  # parts are decoded in the order of their turns
    request: Request
    number: int  # in its task

    @property
    def length(self) -> int:
        """Its source tokens, or what it counts as if it is very short."""
        return max(batches.SHORT, len(self.request.task.parts[self.number].source))


class WaitingParts:
    """Parts of requests that wait to be decoded, of similar length. It has neither threads nor a clock: times
    are arguments, in seconds."""

    def __init__(self) -> None:
        self._parts: list[WaitingPart] = []  # in order
        self._turn = 0  # of the first part of the next request
        self._last_arrival = self._last_end = 0.0
        self._quiet = _LEAST_QUIET
        self.idle = 0  # threads that wait for parts

    def __len__(self) -> int:
        return len(self._parts)

    def add(self, request: Request, indices: Iterable[int]) -> None:
        """Add parts of a request; its longest parts come first, so that batches have parts of like length.
        Each has a turn of its own, so that a long request does not hold up others."""
        ordered = sorted(indices, key=lambda i: -len(request.task.parts[i].source))
        self._parts += [WaitingPart(turn, request, i) for turn, i in enumerate(ordered, self._turn)]
        self._parts.sort(key=lambda part: part.turn)
        self._last_arrival = request.arrived

    def oldest(self) -> float:
        """The time when the oldest request arrived; infinity if none waits."""
        return min((part.request.arrived for part in self._parts), default=math.inf)

    def delay(self, now: float) -> float:
        """The seconds to wait for further requests. The clients of a batch that has just ended may ask again;
        if its end did not count as an arrival, many small batches would follow."""
        quiet_since = max(self._last_arrival, self._last_end)
        waiting_since = max(self.oldest(), self._last_end)
        return max(0.0, min(quiet_since + self._quiet, waiting_since + _PATIENCE * self._quiet) - now)

    def end(self, now: float, seconds: float) -> None:
        """A batch ends that has taken some seconds."""
        self._last_end = now
        self._quiet = min(max(_LEAST_QUIET, _QUIET_SHARE * seconds), _MOST_QUIET)

    def drop_canceled(self) -> None:
        """Remove the parts of requests that nobody waits for any longer."""
        self._parts = [part for part in self._parts if not part.request.future.done()]

    def take(self) -> list[WaitingPart]:
        """Remove the parts of the next batch: the first part, and the parts closest to it in length, within
        the budget of its request. They are chosen from the share of an idle thread."""
        self.drop_canceled()
        if not self._parts:
            return []
        first, budget = self._parts[0], self._parts[0].request.budget
        self._turn = 1 + max(self._turn, first.turn)  # later requests do not hold up earlier ones forever
        same = [part for part in self._parts if part.request.kind == first.request.kind]
        most = min(math.ceil(len(self) / max(1, self.idle)), 2 * budget // batches.SHORT)
        near = sorted(same[: max(1, most)], key=lambda part: abs(part.length - first.length))
        longest = accumulate((part.length for part in near), max)
        fitting = sum(count * length <= budget for count, length in enumerate(longest, start=1))
        batch = near[: max(1, fitting)]
        taken = {*batch}
        self._parts = [part for part in self._parts if part not in taken]
        return batch


class Batcher:
    """Threads that translate requests. Parts of up to `SHORT` tokens have `workers` threads. Longer parts
    have one thread of their own, so that short parts need not wait for them."""

    def __init__(self, workers: int = 1):
        """`workers` is the largest number of workers of a model."""
        self.counts: Counter[str] = Counter(failures_total=0)  # what the threads have done
        self._condition = threading.Condition()
        self._short, self._long = WaitingParts(), WaitingParts()
        self._closed = False
        cores = torch.get_num_threads()
        # The same number for all, because results depend on it; see `Translator.translate`.
        arguments = max(1, cores // workers), cores
        queues = [self._short] * workers + [self._long]
        self._threads = [
            threading.Thread(target=self._work, args=(queue, *arguments), name="serve", daemon=True)
            for queue in queues
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self, translator: Translator, texts: Sequence[str], n_best: int = 1, alignments: bool = False
    ) -> "Future[list[Translation]]":
        """Translate texts as `Translator.translate` does.

        Raises HTTPException if too many parts wait, UsageError if a line begins with the tag of another
        language or if there are fewer than `n_best` hypotheses.
        """
        config = translator.decoding
        config.require_hypotheses(n_best)
        parts = translator.splitter.parts_of(texts, [], 0, alignments)
        task = DecodingTask(config, parts, translator.target_lang, n_best, alignments, scored=False)
        budget = batches.batch_tokens(config, translator.models, translator.device) // config.hypotheses
        request = Request(texts, task, translator.workers.decode_one, budget, time.monotonic())
        if not parts:
            request.finish({})
        with self._condition:
            self._short.drop_canceled()
            self._long.drop_canceled()
            if self._closed or self.waiting >= MOST_WAITING:
                oldest = min(self._short.oldest(), self._long.oldest(), request.arrived)
                seconds = {"Retry-After": str(1 + round(request.arrived - oldest))}
                raise HTTPException(429, "the server is busy; try again later", seconds)
            short = {i for i, part in enumerate(parts) if len(part.source) <= SHORT}
            self._short.add(request, short)
            self._long.add(request, {*range(len(parts))} - short)
            self._condition.notify_all()
        return request.future

    @property
    def waiting(self) -> int:
        """The number of parts that wait to be decoded."""
        return len(self._short) + len(self._long)

    def close(self, seconds: float | None = None) -> bool:
        """Accept no more requests, and wait until all others are translated, at most some `seconds` for each
        thread. Returns whether they are."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        for thread in self._threads:
            thread.join(seconds)
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self, queue: WaitingParts, threads: int, default: int) -> None:
        use_threads(threads, default)
        while batch := self._next_batch(queue):
            start = time.monotonic()
            self._decode(batch)
            end = time.monotonic()
            seconds: Any = end - start
            with self._condition:
                queue.end(end, seconds)
                self.counts.update(batches_total=1, parts_total=len(batch), decoding_seconds_total=seconds)

    def _next_batch(self, queue: WaitingParts) -> list[WaitingPart]:
        """The next batch, once there is one; an empty one after `close`."""
        with self._condition:
            queue.idle += 1
            batch: list[WaitingPart] = []
            while not batch and (queue or not self._closed):
                delay = queue.delay(time.monotonic()) if queue else None
                if delay is None or (delay and not self._closed):
                    self._condition.wait(delay)
                else:
                    batch = queue.take()
            queue.idle -= 1
            return batch

    def _decode(self, batch: Sequence[WaitingPart]) -> None:
        """Decode parts, and give them to their requests. If that fails, the parts of each request are decoded
        alone, so that only the requests fail that cannot be translated."""
        first, requests = batch[0].request, dict.fromkeys(part.request for part in batch)
        parts = [part.request.task.parts[part.number] for part in batch]
        n_best = max(request.task.n_best for request in requests)
        try:
            found = first.decode(first.task._replace(parts=parts, n_best=n_best))
            for part, best in zip(batch, found, strict=True):
                part.request.finish({part.number: best})
        except Exception as error:
            if len(requests) > 1:
                for request in requests:
                    self._decode([part for part in batch if part.request is request])
                return
            log.warning("a request cannot be translated: %s", error, exc_info=not is_recoverable(error))
            self.counts["failures_total"] += 1
            with suppress(InvalidStateError):  # the client no longer waits
                first.future.set_exception(error)
